"""The two kinds of stages that train: the one place where cells call pre-training and fine-tuning."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch

from bertsmith.core.errors import DoesNotFit, UserError
from bertsmith.core.files import read_json, sha256_of
from bertsmith.corpus.token_store import TokenStore
from bertsmith.finetuning.assignment import Assignment, hashes_of, hashes_of_files
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.splits import read_splits
from bertsmith.inference.adapter_folder import base_folder
from bertsmith.inference.model_path import is_adapter, model_folder
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.pretraining.hardware import step_size
from bertsmith.pretraining.pretrain import pretrain
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.idle_keys import FINETUNING_KEYS, PRETRAINING_KEYS, idle_in_cells
from bertsmith.recipe.load import encoder_parameters, published_vocabulary
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.section import Section
from bertsmith.studies.cells import Data, Kind, Model, Result, Stage, Work
from bertsmith.tasks.catalogue import OWN, task_named
from bertsmith.tasks.custom import custom_task, spec_of
from bertsmith.tasks.task import Task
from bertsmith.training.journal import package_hash
from bertsmith.training.trainer import choose_precision

CONTEXT_BYTES = 1 << 30
"""Memory of a GPU that a process needs in addition to its tensors: CUDA's context and the kernels."""
BYTES_OF_A_WEIGHT = 4
EXAMPLE_TOKENS = 0.5
"""Length of a usual example of a task, as a fraction of text.longest."""
BY_MINUTES = 1e14
"""Assumed operations per minute of a run with a budget in minutes, to compare it with others."""
HELD_OUT = "held-out"
MODEL, TEACHER = "model", "teacher"
"""Names of the inputs of a stage; further teachers are teacher-1, teacher-2 ..."""
CUSTOM, SKIP_BAD = "custom", "skip_bad"
"""Names of the options of a fine-tuning stage: the columns of a user's table, and True to skip bad lines."""


Device = Literal["cuda", "cpu"]
"""The device that replaces "auto"."""


def pretraining_stage(
    recipe: Recipe, store: Path, *, device: Device, inputs: Mapping[str, Stage | Model] | None = None
) -> Stage:
    """Return the stage of a pre-training run; a model or teacher of the recipe becomes an input, too."""
    start, teacher = recipe.start.model, recipe.distill.teacher
    named = {MODEL: known_model(start)} if start != "scratch" and MODEL not in (inputs or {}) else {}
    if teacher != "none" and TEACHER not in (inputs or {}):
        named[TEACHER] = known_model(teacher)
    known = _stored(store.resolve())
    content = dict(known.content)
    if recipe.start.add_words != "none":
        content["words"] = sha256_of(Path(recipe.start.add_words).expanduser())
    known = replace(known, content=content)
    return Stage(PRETRAIN, answered(recipe, device=device), known, {**(inputs or {}), **named})


def finetuning_stage(  # noqa: PLR0913 - all that a run is of
    recipe: FinetuningRecipe,
    task: Task,
    data: Path,
    *,
    device: Device,
    inputs: Mapping[str, Stage | Model],
    skip_bad: bool = False,
) -> Stage:
    """Return the stage of a fine-tuning run from a model; teachers of the recipe become inputs, too."""
    custom, place = tuple(sorted(task.custom.items())), data.resolve()
    known = _examples(task.name, custom, place, skip_bad=skip_bad, files=_files_beside(place))
    named = (
        {} if TEACHER in inputs else teacher_inputs([known_model(each) for each in recipe.distill.teachers])
    )
    options = {CUSTOM: dict(task.custom), SKIP_BAD: skip_bad}
    given = {name: value for name, value in options.items() if value}
    return Stage(FINETUNE, answered(recipe, device=device), known, {**inputs, **named}, given)


def teacher_inputs(teachers: Sequence[Stage | Model]) -> dict[str, Stage | Model]:
    """Return teachers by their names among the inputs of a stage."""
    return {f"{TEACHER}-{number}" if number else TEACHER: each for number, each in enumerate(teachers)}


@cache
def _stored(store: Path) -> Data:
    """Return a store with its hash, read once for all trials."""
    opened = TokenStore.open(store)
    return Data(store, {"store": opened.hash}, opened.tokens)


def _files_beside(data: Path) -> tuple[tuple[Path, int, int], ...]:
    """Return the size and the time of each file that data may consist of."""
    files = sorted(each for each in (data if data.is_dir() else data.parent).glob("*") if each.is_file())
    return tuple((each, each.stat().st_size, each.stat().st_mtime_ns) for each in files)


@cache
def _examples(
    task: str,
    custom: tuple[tuple[str, str | float], ...],
    data: Path,
    *,
    skip_bad: bool,
    files: tuple[tuple[Path, int, int], ...],  # noqa: ARG001 - a file that has changed is read again
) -> Data:
    """Return the data of a task with the hash of each split, read once for all trials."""
    splits = read_splits(_task_named(task, dict(custom)), data, skip_bad=skip_bad).splits
    return Data(data, hashes_of(splits), len(splits["train"]))


def known_model(name: str) -> Model:
    """Return an existing model folder as an input of stages."""
    folder = model_folder(name)
    return Model(folder.resolve(), hashes_of_files(transformer_folder(folder)))


def answered(recipe: Section, *, device: Device) -> Section:
    """Return the recipe with a value for each "auto" that depends on the machine and decides the result.

    The device is the cells', not this process's, which may see other ones.
    """
    run = cast(Any, recipe).run
    if run.device == "cuda" and device == "cpu":
        what, remedy = "cuda, but no GPU is available", "set it to auto or cpu"
        raise UserError(what, key="run.device", remedy=remedy)
    device = device if run.device == "auto" else run.device
    on_gpu = device == "cuda"
    answers: dict[str, str] = {
        "device": device,
        "precision": choose_precision(run.precision, torch.device(device)),
    }
    for key, answer in (("compile", on_gpu), ("deterministic", not on_gpu)):
        if getattr(run, key, "") == "auto":
            answers[key] = "on" if answer else "off"
    return recipe.model_copy(update={"run": run.model_copy(update=answers)})


# ---- pre-training


def run_pretraining(work: Work) -> Result | None:
    """Pre-train, or resume; return None if stopped."""
    recipe = cast(Recipe, work.stage.recipe)
    if MODEL in work.inputs:
        start = recipe.start.model_copy(update={"model": str(model_folder(work.inputs[MODEL]))})
        recipe = recipe.model_copy(update={"start": start})
    if TEACHER in work.inputs:
        distill = recipe.distill.model_copy(update={"teacher": str(model_folder(work.inputs[TEACHER]))})
        recipe = recipe.model_copy(update={"distill": distill})
    with reporting_lack_of_memory():
        result = pretrain(recipe, store=work.stage.data.path, out=work.folder, callback=work.callback)
    if result.state != "finished":
        return None
    if not recipe.run.keep_at:
        shutil.rmtree(work.folder / "checkpoints", ignore_errors=True)  # three times the size of the model
    metric = result.declared.deciding
    return Result(
        {HELD_OUT: result.held_out}, HELD_OUT, metric, result.steps, result.seconds, made_with(), *_memory()
    )


def _idle_in_pretraining(recipe: Recipe) -> frozenset[str]:
    others = {f"run.{budget}" for budget in ("steps", "tokens", "minutes") if budget != recipe.run.budget}
    inputs = {"start.model", "start.add_words", "distill.teacher"}
    # The shape of a continued model, or of one with layers of a teacher, is not the recipe's.
    given = recipe.start.model != "scratch" or bool(recipe.distill.layers)
    model = {f"model.{key}" for key in type(recipe.model).model_fields} if given else set()
    return idle_in_cells(PRETRAINING_KEYS) | others | inputs | model


def _parts_of_pretraining(stage: Stage) -> list[str]:
    recipe = cast(Recipe, stage.recipe)
    objective, optimiser = recipe.examples.objective, recipe.optim.algorithm
    return ["kind pretrain", f"objective {objective}", f"optimiser {optimiser}", _architecture(stage)]


def _operations_of_pretraining(stage: Stage) -> float:
    recipe = cast(Recipe, stage.recipe)
    run, tokens = recipe.run, step_size(recipe)[0]
    if run.budget == "minutes":
        return BY_MINUTES * run.minutes
    return 6.0 * _parameters(stage) * (run.tokens if run.budget == "tokens" else run.steps * tokens)


# ---- fine-tuning


def run_finetuning(work: Work) -> Result | None:
    """Fine-tune, or resume; return None if stopped."""
    recipe = cast(FinetuningRecipe, work.stage.recipe)
    given = (path for name, path in work.inputs.items() if name.startswith(TEACHER))
    teachers = tuple(str(model_folder(path)) for path in given)
    distill = recipe.distill.model_copy(update={"teachers": teachers})
    run = recipe.run.model_copy(update={"keep_state": False})
    recipe = recipe.model_copy(update={"distill": distill, "run": run})
    model = model_folder(work.inputs[MODEL])
    skip_bad = work.stage.options.get(SKIP_BAD, False)
    assignment = Assignment(task_of(work.stage), recipe, model, work.stage.data.path, work.folder, skip_bad)
    with reporting_lack_of_memory():
        result = finetune(assignment, work.callback)
    if not result.finished:
        return None
    split = next(iter(result.metrics), "")
    metric = assignment.task.deciding_metric if result.deciding is None else result.deciding[0]
    return Result(result.metrics, split, metric, result.steps, result.seconds, made_with(), *_memory())


def task_of(stage: Stage) -> Task:
    """Return the task of a fine-tuning stage."""
    return _task_named(cast(FinetuningRecipe, stage.recipe).task, stage.options.get(CUSTOM, {}))


def _task_named(name: str, custom: Mapping[str, Any]) -> Task:
    return custom_task(spec_of(custom)) if name == OWN else task_named(name)


def _idle_in_finetuning(_: FinetuningRecipe) -> frozenset[str]:
    return idle_in_cells(FINETUNING_KEYS) | {"distill.teachers"}


def _parts_of_finetuning(stage: Stage) -> list[str]:
    recipe, task = cast(FinetuningRecipe, stage.recipe), task_of(stage).kind.name
    parts = ["kind finetune", f"task {task}", f"optimiser {recipe.optim.algorithm}", _architecture(stage)]
    return [*parts, *(["bilstm"] if recipe.head.has_bilstm else [])]


def _operations_of_finetuning(stage: Stage) -> float:
    recipe = cast(FinetuningRecipe, stage.recipe)
    if recipe.run.minutes != "off":
        return BY_MINUTES * recipe.run.minutes
    examples = stage.data.size if recipe.run.limit == "off" else min(stage.data.size, recipe.run.limit)
    tokens = recipe.run.epochs * examples * recipe.text.longest * EXAMPLE_TOKENS
    return 6.0 * _parameters(stage) * tokens


PRETRAIN = Kind(
    "pretrain", run_pretraining, _parts_of_pretraining, _idle_in_pretraining, _operations_of_pretraining
)
FINETUNE = Kind(
    "finetune", run_finetuning, _parts_of_finetuning, _idle_in_finetuning, _operations_of_finetuning
)


# ---- both


def _architecture(stage: Stage) -> str:
    """Return the trained architecture of a stage, as a part of the code."""
    model = stage.inputs.get(MODEL)
    if isinstance(model, Stage):
        return _architecture(model)
    if model is not None:
        folder = transformer_folder(model.folder)
        folder = model_folder(base_folder(folder)) if is_adapter(folder) else folder
        config = read_json(folder / "config.json", remedy="give a model folder")
        return f"architecture {config.get('base_model_type', config.get('model_type'))}"
    return f"architecture {cast(Recipe, stage.recipe).model.type}"


def _parameters(stage: Stage) -> float:
    """Estimate the number of trained weights of a stage."""
    model = stage.inputs.get(MODEL)
    if isinstance(model, Stage):
        return _parameters(model)
    if model is not None:
        return sum(each.stat().st_size for each in model.folder.glob("*.safetensors")) / BYTES_OF_A_WEIGHT
    section = cast(Recipe, stage.recipe).model
    return encoder_parameters(section, published_vocabulary(section.type))


def made_with() -> dict[str, str | int]:
    """Return other influences on the result of this process: code, torch, device and threads."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    threads = torch.get_num_threads()
    return {"source": package_hash()[:12], "torch": torch.__version__, "device": gpu, "threads": threads}


def _memory() -> tuple[int, int]:
    """Return the peak memory of a GPU in this process, and the memory that studies can share; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0, 0
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() + CONTEXT_BYTES
    return torch.cuda.max_memory_reserved() + CONTEXT_BYTES, room


@contextmanager
def reporting_lack_of_memory() -> Iterator[None]:
    """Report that memory ran out as a user error."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        remedy = "set micro_tokens (batch.micro_tokens, run.micro_tokens) or run.recompute=true"
        raise DoesNotFit(f"memory ran out ({error})", remedy=remedy) from error
