"""Structured pruning as a job: remove the least important heads and neurons in rounds, with training between.

In this order: the request, the rounds, one round, and the finished folder.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.core.cache import cache_folder
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, read_json, write_json
from bertsmith.finetuning.assignment import (
    EXAMPLES,
    MODEL_FILES,
    Assignment,
    hashes_of,
    hashes_of_files,
)
from bertsmith.finetuning.evaluation import evaluate
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.predict import task_config_in
from bertsmith.finetuning.splits import TaskSplits, encoded_split, read_splits
from bertsmith.inference.finetuned_folder import write_finetuned
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.model_path import model_folder
from bertsmith.inference.task_model import task_model_of
from bertsmith.inference.unit_importance import task_importance
from bertsmith.model.folder.model_folder import write_model
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.model.network import Network
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.load import leaves
from bertsmith.recipe.toml_text import value_text
from bertsmith.shrink.layer_dropping import without_layers
from bertsmith.shrink.selection import Widths, chosen_units, counts_left
from bertsmith.shrink.slicing import KeptUnits, all_units, blocks_to_prune, pruned_network
from bertsmith.studies.sweep import Stopped, check_no_stop, with_values
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import custom_task, spec_of
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.distributed import refuse_several_processes
from bertsmith.training.run_folder import RunFolder

ASSIGNMENT, RESULT, ROUNDS = "pruning.json", "result.json", "rounds"
Metrics = dict[str, dict[str, float]]
"""Values by split and metric."""


# ---- the request


@dataclass(frozen=True, slots=True)
class Removal:
    """The units and layers to remove."""

    heads: float = 0.0
    """Fraction of all heads to remove."""
    neurons: float = 0.0
    """Fraction of the feed-forward neurons to remove."""
    widths: Widths = "equal"
    layers: tuple[int, ...] = ()
    """Indices of whole layers to remove."""
    rounds: int = 4
    """Number of equal parts of the removal of heads and neurons."""
    examples: int = 1024
    """Number of training examples to measure importance on."""

    @property
    def fractions(self) -> tuple[float, float]:
        """Fractions of heads and of neurons to remove."""
        return self.heads, self.neurons


@dataclass(frozen=True, slots=True)
class PruningRequest:
    """A fine-tuned model, and the parts to remove."""

    task: Task
    model: Path
    data: Path
    out: Path
    removal: Removal
    recipe: FinetuningRecipe
    """Recipe of the training after each round."""
    trains: bool = True
    """True if there is a training after each round."""
    skip_bad: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the settings, without examples, that an existing job must share to be resumed."""
        own = {"trains": self.trains, "skip_bad": self.skip_bad, **leaves({"removal": asdict(self.removal)})}
        return plain_request(self.task, self.recipe, self.model, self.data, own)


def plain_request(
    task: Task, recipe: FinetuningRecipe, model: Path, data: Path, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON form of a request to prune: the common settings and `own`."""
    asked = {
        **own,
        "task": task.name,
        "custom": dict(task.custom),
        "recipe": leaves(recipe.model_dump(mode="json")),
        "model": str(model.resolve()),
        MODEL_FILES: hashes_of_files(transformer_folder(model_folder(model))),
        "data": str(data.resolve()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(asked))  # tuples become lists, as in the file
    return plain


def task_of_model(folder: Path, named: str) -> tuple[Task, TaskConfig]:
    """Return the task that a model was fine-tuned for; raise if `named` is another one."""
    config = task_config_in(folder)
    if config is None:
        remedy = "fine-tune it first, to measure importance on a task"
        raise UserError(
            "was not fine-tuned by bertsmith: it lacks task.json", where=str(folder), remedy=remedy
        )
    if named and named != config.task:
        what, remedy = f"was fine-tuned for {config.task}, not for {named}", "remove `task`"
        raise UserError(what, where=str(folder), remedy=remedy)
    if config.head.has_bilstm:
        what = "a BiLSTM over its layers learned the task, and what the encoder's own head needs is unknown"
        remedy = "prune a model that was tuned without it (head.reader = linear)"
        raise UserError(what, where=str(folder), remedy=remedy)
    return custom_task(spec_of(config.custom)) if config.custom else task_named(config.task), config


def pruning_recipe(
    task: Task, config: TaskConfig, overrides: Sequence[str], *, options: Sequence[tuple[str, str]]
) -> FinetuningRecipe:
    """Return the recipe between rounds: texts and head from the model, the rest from the task."""
    own = {"text": config.text.model_dump(), "head": config.head.model_dump(include={"cls", "pooling"})}
    known = [("task.json", f"{key}={value_text(value)}") for key, value in leaves(own).items()]
    recipe = finetuning_recipe(task, overrides, options=[*known, *options])
    # As in all studies: these runs are never extended.
    return with_values(recipe, {"run.keep_state": False})


def task_to_train(
    folder: Path, named: str, overrides: Sequence[str], *, options: Sequence[tuple[str, str]]
) -> tuple[Task, FinetuningRecipe]:
    """Return the named task, or the model's own, with a training recipe."""
    if task_config_in(folder) is not None:
        task, config = task_of_model(folder, named)
        return task, pruning_recipe(task, config, overrides, options=options)
    if not named:
        what = "was not fine-tuned by bertsmith, and the task is missing"
        raise UserError(what, where=str(folder), remedy="add `task`, for example sst2")
    task = task_named(named)
    return task, with_values(finetuning_recipe(task, overrides, options=options), {"run.keep_state": False})


# ---- the rounds


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The size and the metrics of the model after a round."""

    heads: tuple[int, ...]
    """Number of heads in each layer."""
    neurons: tuple[int, ...]
    parameters: int
    pruned: Metrics
    """Metrics before the round's training; in round 0, of the given model."""
    tuned: Metrics
    """Metrics after the training; empty without training."""

    @classmethod
    def of(cls, facts: Mapping[str, Any], tuned: Metrics) -> "RoundReport":
        """Build a report from the facts in a file and the metrics after training."""
        shapes = tuple(facts["heads"]), tuple(facts["neurons"])
        return cls(*shapes, parameters=facts["parameters"], pruned=facts["pruned"], tuned=tuned)

    @property
    def metrics(self) -> Metrics:
        """Metrics at the end of the round."""
        return self.tuned or self.pruned


@dataclass(frozen=True, slots=True)
class PruningResult:
    """The model's folder, the report of each round, and the original indices of the heads left."""

    folder: Path
    rounds: tuple[RoundReport, ...]
    kept_heads: tuple[tuple[int, ...], ...]


def prune(request: PruningRequest, callback: ProgressCallback) -> PruningResult:
    """Prune a model; a job in the folder resumes, or is reported if it is finished."""
    refuse_several_processes("pruning has one process")
    folder = RunFolder(request.out, ASSIGNMENT, RESULT)
    folder.check_same_run(asked := request.to_json())
    splits = read_splits(request.task, request.data, skip_bad=request.skip_bad)
    splits = splits.limited(request.recipe.run.limit)
    folder.check_same_run(hashes := {EXAMPLES: hashes_of(splits.splits)})
    if not folder.finished:
        first = _units_to_begin_with(request)
        with folder.locked(), StopRequested(callback.on_signal) as stop:
            write_json(folder.config, {**asked, **hashes})
            _Pruning(request, splits, first, callback, stop).run(folder)
    shutil.rmtree(request.out / ROUNDS, ignore_errors=True)
    return _result_in(folder)


def _units_to_begin_with(request: PruningRequest) -> list[KeptUnits]:
    """Return every unit of the layers to keep; raise before any work if the request is impossible."""
    removal = request.removal
    network = load(request.model, device="cpu").model.network
    if removal.layers:
        network = without_layers(network, removal.layers)
    blocks_to_prune(network)
    units = all_units(network)
    counts_left(units, removal.fractions, removal.widths)
    return units


def _result_in(folder: RunFolder) -> PruningResult:
    result = read_json(folder.path / RESULT, remedy="remove the folder and run again")
    rounds = tuple(RoundReport.of(each, each["tuned"]) for each in result["rounds"])
    return PruningResult(folder.path, rounds, tuple(map(tuple, result["kept_heads"])))


@dataclass(frozen=True, slots=True)
class _Pruning:
    """One start of a job; a job may need several."""

    request: PruningRequest
    splits: TaskSplits
    first: Sequence[KeptUnits]
    """All units before the first round."""
    callback: ProgressCallback
    stop: StopRequested

    def run(self, folder: RunFolder) -> None:
        """Run the remaining rounds, and write the model and the result."""
        rounds, place = self.request.removal.rounds, self.request.out / ROUNDS
        model, reports = self.request.model, [RoundReport.of(self._evaluated(place / "given"), {})]
        kept: Sequence[Sequence[int]] = [units.heads for units in self.first]
        for number in range(1, rounds + 1):
            check_no_stop(self.stop, f"round {number - 1}")
            self.callback.on_message(f"round {number} of {rounds}")
            pruned = place / str(number) / "pruned"
            facts = self._evaluated(pruned, model, kept, number)
            kept = facts["kept"]
            model, tuned = self._train(pruned) if self.request.trains else (pruned, {})
            reports.append(RoundReport.of(facts, tuned))
        copy_model(model, folder.model)
        listed = [asdict(each) for each in reports]
        write_json(
            folder.path / RESULT, {"task": self.request.task.name, "rounds": listed, "kept_heads": kept}
        )

    def _evaluated(
        self, folder: Path, before: Path | None = None, kept: Sequence[Sequence[int]] = (), number: int = 0
    ) -> dict[str, Any]:
        """Prune a round's model from `before` and measure it; its JSON file is written last."""
        facts = folder.with_suffix(".json")
        if not facts.is_file():
            if before is not None:
                kept = self._prune_once(before, folder, kept, number)
            bert = load(self.request.model if before is None else folder, device=self._device)
            write_json(facts, self._facts(bert, kept))
        return read_json(facts, remedy="give `out` a new folder")

    def _facts(self, bert: Bert, kept: Sequence[Sequence[int]]) -> dict[str, Any]:
        units = all_units(bert.model.network)
        return {
            "heads": [len(block.heads) for block in units],
            "neurons": [len(block.neurons) for block in units],
            "parameters": sum(each.numel() for each in bert.model.network.parameters()),
            "pruned": self._metrics(bert),
            "kept": [list(heads) for heads in kept],
        }

    def _metrics(self, bert: Bert) -> Metrics:
        assert bert.finetuned is not None, "task_of_model has checked"
        model = task_model_of(bert.engine.network, bert.finetuned, bert.engine)
        cache = cache_folder("encodings")
        encoded = {
            name: encoded_split(self.splits.splits[name], model.config, model.tokenizer, cache=cache)
            for name in self.splits.evaluation_names
        }
        return evaluate(model, encoded).metrics

    def _prune_once(
        self, before: Path, folder: Path, kept: Sequence[Sequence[int]], number: int
    ) -> list[list[int]]:
        """Write a model without this round's units; return the original indices of the heads left."""
        removal = self.request.removal
        bert = load(before, device=self._device)
        assert bert.finetuned is not None, "task_of_model has checked"
        model = task_model_of(bert.model.network, bert.finetuned, bert.engine)
        if number == 1:
            model.objective.scorer.network = without_layers(model.network, removal.layers)
        examples = self.splits.limited(removal.examples).splits["train"]
        importance = task_importance(model, model.encode(examples))
        left = counts_left(self.first, removal.fractions, removal.widths, done=number / removal.rounds)
        units = chosen_units(importance, left)
        network = pruned_network(model.network, units).cpu()
        write_pruned(folder, bert, network)
        return [[heads[each] for each in block.heads] for heads, block in zip(kept, units, strict=True)]

    def _train(self, pruned: Path) -> tuple[Path, Metrics]:
        request, out = self.request, pruned.parent / "tuned"
        check_no_stop(self.stop, f"round {pruned.parent.name}")
        assignment = Assignment(request.task, request.recipe, pruned, request.data, out, request.skip_bad)
        result = finetune(assignment, self.callback)
        if not result.finished:
            raise Stopped(f"round {pruned.parent.name}")
        return out, result.metrics

    @property
    def _device(self) -> str:
        return self.request.recipe.run.device


def copy_model(trained: Path, folder: Path) -> None:
    """Copy the model of a run to the folder of a job's result."""
    shutil.rmtree(folder, ignore_errors=True)  # a leftover of a start that was killed afterwards
    with atomic_folder(folder) as fresh:
        shutil.copytree(model_folder(trained), fresh, dirs_exist_ok=True)


def write_pruned(folder: Path, bert: Bert, network: Network) -> None:
    """Write a model folder with a network in place of a fine-tuned model's network."""
    assert bert.finetuned is not None, "task_of_model has checked"
    shutil.rmtree(folder, ignore_errors=True)  # a leftover of a start that was killed afterwards
    with atomic_folder(folder) as fresh:
        write_model(fresh, replace(bert.model, network=network))
        write_finetuned(fresh, bert.finetuned)
        bert.tokenizer.save(fresh)
