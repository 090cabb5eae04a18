"""Structured pruning as stages: remove the least important heads and neurons in rounds, training in between.

In this order: what both prunings share, the stage that cuts, and the rounds.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from bertsmith.core.cache import cache_folder
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, read_json, write_json
from bertsmith.finetuning.assignment import EXAMPLES, MODEL_FILES
from bertsmith.finetuning.evaluation import evaluate
from bertsmith.finetuning.predict import task_config_in
from bertsmith.finetuning.splits import TaskSplits, encoded_split, read_splits
from bertsmith.inference.finetuned_folder import write_finetuned
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.model_path import model_folder
from bertsmith.inference.task_model import TaskModel, task_model_of
from bertsmith.inference.unit_importance import task_importance
from bertsmith.model.folder.model_folder import write_model
from bertsmith.model.network import Network
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.load import leaves
from bertsmith.recipe.toml_text import value_text
from bertsmith.shrink.layer_dropping import without_layers
from bertsmith.shrink.selection import UnitCounts, Widths, chosen_units, counts_left
from bertsmith.shrink.slicing import KeptUnits, all_units, blocks_to_prune, pruned_network
from bertsmith.studies.cells import RUN, Cells, Kind, Model, Result, Stage, Work
from bertsmith.studies.scheduler import make_here
from bertsmith.studies.stages import (
    FINETUNE,
    MODEL,
    SKIP_BAD,
    Device,
    finetuning_stage,
    known_model,
    made_with,
    task_of,
)
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import custom_task, spec_of
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.distributed import refuse_several_processes
from bertsmith.training.run_folder import RunFolder

ASSIGNMENT, RESULT, WORK, FACTS = "pruning.json", "result.json", "work", "facts.json"
Metrics = Mapping[str, Mapping[str, float]]
"""Values by split and metric."""


# ---- both prunings


@dataclass(frozen=True, slots=True)
class PruningJob:
    """A model, the data of its task, and a folder for the result."""

    task: Task
    model: Path
    data: Path
    out: Path
    recipe: FinetuningRecipe
    """Recipe of a training."""
    skip_bad: bool = False

    def training(self, recipe: FinetuningRecipe, inputs: Mapping[str, Stage | Model]) -> Stage:
        """Return the stage that trains a model by a recipe."""
        device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        return finetuning_stage(
            recipe, self.task, self.data, device=device, inputs=inputs, skip_bad=self.skip_bad
        )

    def do_once(self, own: Mapping[str, Any], first: Stage, work: Callable[[Cells], None]) -> None:
        """Do the work, whose first stage is given, unless it is done; raise if the folder has other work."""
        refuse_several_processes("pruning has one process")
        folder, model = RunFolder(self.out, ASSIGNMENT, RESULT), cast(Model, first.inputs[MODEL])
        hashes = {MODEL_FILES: dict(model.files), EXAMPLES: dict(first.data.content)}
        asked = {**own, **first.options, "recipe": leaves(self.recipe.model_dump(mode="json")), **hashes}
        asked = json.loads(json.dumps(asked))  # tuples become lists, as in the file
        folder.check_same_run(asked)
        if not folder.finished:
            with folder.locked():
                write_json(folder.config, asked)
                work(Cells(self.out / WORK))
        shutil.rmtree(self.out / WORK, ignore_errors=True)


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
    return finetuning_recipe(task, overrides, options=[*known, *options])


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
    return task, finetuning_recipe(task, overrides, options=options)


def task_model(bert: Bert) -> TaskModel:
    """Return a fine-tuned model whose network can be changed."""
    assert bert.finetuned is not None, "task_of_model has checked"
    return task_model_of(bert.model.network, bert.finetuned, bert.engine)


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


# ---- the stage that cuts


def cut_of(stage: Stage, how: Mapping[str, Any]) -> Stage:
    """Return the stage that cuts the model of a training, or only measures it."""
    return replace(stage, kind=CUT, options={**stage.options, **({"cut": how} if how else {})})


def run_cut(work: Work) -> Result:
    """Remove the least important units of a model, if any are to go, and measure it."""
    began, stage, model = time.monotonic(), work.stage, work.inputs[MODEL]
    recipe, task = cast(FinetuningRecipe, stage.recipe), task_of(stage)
    splits = read_splits(task, stage.data.path, skip_bad=stage.options.get(SKIP_BAD, False))
    splits, kept = splits.limited(recipe.run.limit), list[list[int]]()
    if how := stage.options.get("cut"):
        kept = _cut(load(model, device=recipe.run.device), splits, how, work.folder / "model")
        model = work.folder
    bert = load(model, device=recipe.run.device)
    units = all_units(bert.model.network)
    shape = {"heads": [len(each.heads) for each in units], "neurons": [len(each.neurons) for each in units]}
    parameters = sum(each.numel() for each in bert.model.network.parameters())
    write_json(work.folder / FACTS, {**shape, "parameters": parameters, "kept": kept})
    metrics, metric = _metrics(bert, splits), task.deciding_metric
    return Result(metrics, next(iter(metrics), ""), metric, 0, time.monotonic() - began, made_with())


def _cut(bert: Bert, splits: TaskSplits, how: Mapping[str, Any], folder: Path) -> list[list[int]]:
    """Write a model without its least important units; return the indices of the heads that are left."""
    model = task_model(bert)
    if how["layers"]:
        cast(Any, model.objective.scorer).network = without_layers(model.network, how["layers"])
    examples = splits.limited(how["examples"]).splits["train"]
    importance = task_importance(model, model.encode(examples))
    units = chosen_units(importance, UnitCounts(how["heads"], how["neurons"], how["widths"]))
    write_pruned(folder, bert, pruned_network(model.network, units).cpu())
    return [list(block.heads) for block in units]


def _metrics(bert: Bert, splits: TaskSplits) -> dict[str, dict[str, float]]:
    assert bert.finetuned is not None, "task_of_model has checked"
    model, cache = task_model_of(bert.engine.network, bert.finetuned, bert.engine), cache_folder("encodings")
    encoded = {
        name: encoded_split(splits.splits[name], model.config, model.tokenizer, cache=cache)
        for name in splits.evaluation_names
    }
    return evaluate(model, encoded).metrics


def no_operations(_: Stage) -> float:
    """Return 0: such a stage takes no steps."""
    return 0.0


CUT = Kind("cut", run_cut, FINETUNE.parts, FINETUNE.idle, no_operations)


# ---- heads, neurons and layers


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
    trains: bool = True
    """True if there is a training after each round."""


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


def prune(job: PruningJob, removal: Removal, callback: ProgressCallback) -> PruningResult:
    """Prune a model; a job in the folder resumes, or is reported if it is finished."""
    units = _units_to_begin_with(job, removal)
    stages = stages_of(job, removal, units)

    def work(cells: Cells) -> None:
        results, kept = make_here(stages, cells, callback), [list(each.heads) for each in units]
        rounds: list[dict[str, Any]] = []
        for name, stage in stages.items():
            if stage.kind is not CUT:
                rounds[-1]["tuned"] = results[name].metrics
                continue
            facts = read_json(cells.folder(stage) / RUN / FACTS, remedy="give `out` a new folder")
            if left := facts.pop("kept"):
                kept = [[heads[each] for each in block] for heads, block in zip(kept, left, strict=True)]
            rounds.append({**facts, "pruned": results[name].metrics, "tuned": {}})
        copy_model(cells.folder([*stages.values()][-1]) / RUN, job.out / "model")
        write_json(job.out / RESULT, {"task": job.task.name, "rounds": rounds, "kept_heads": kept})

    job.do_once({"removal": asdict(removal)}, stages["as given"], work)
    result = read_json(job.out / RESULT, remedy="remove the folder and run again")
    for each in result["rounds"]:
        each |= {name: tuple(each[name]) for name in ("heads", "neurons")}
    reports = tuple(RoundReport(**each) for each in result["rounds"])
    return PruningResult(job.out, reports, tuple(map(tuple, result["kept_heads"])))


def _units_to_begin_with(job: PruningJob, removal: Removal) -> list[KeptUnits]:
    """Return every unit of the layers to keep; raise if there is nothing to prune."""
    network = load(job.model, device="cpu").model.network
    if removal.layers:
        network = without_layers(network, removal.layers)
    blocks_to_prune(network)
    return all_units(network)


def stages_of(job: PruningJob, removal: Removal, units: Sequence[KeptUnits]) -> dict[str, Stage]:
    """Return the stages of all rounds by name; raise if so many units cannot go."""
    model: Stage | Model = known_model(str(job.model))
    found = {"as given": cut_of(job.training(job.recipe, {MODEL: model}), {})}
    for number in range(1, removal.rounds + 1):
        fractions, done = (removal.heads, removal.neurons), number / removal.rounds
        counts = asdict(counts_left(units, fractions, removal.widths, done=done))
        layers = list(removal.layers) if number == 1 else []
        how = {**counts, "layers": layers, "examples": removal.examples}
        model = found[f"round {number}: cut"] = cut_of(job.training(job.recipe, {MODEL: model}), how)
        if removal.trains:
            model = found[f"round {number}"] = job.training(job.recipe, {MODEL: model})
    return found
