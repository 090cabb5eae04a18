"""Settings for a user's own data, chosen by the model and the data."""

import tomllib
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field, ValidationError

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_text
from bertsmith.core.wording import counted
from bertsmith.finetuning.splits import TaskSplits, read_splits
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.recipe.finetuning_schema import FinetuningRecipe, Target, TextSection
from bertsmith.recipe.section import Section
from bertsmith.recipe.toml_text import value_text
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_recipe import finetuning_recipe, finetuning_recipe_with_origins

DEFAULTS_FILE = "task_defaults.toml"
STEPS = 250
"""Approximate minimum number of steps of a run, unless that would take more than MAX_PASSES epochs."""
MIN_PASSES, MAX_PASSES = 3, 20
LONG_RUN, EVALUATIONS, PATIENCE = 1_000, 10, 3
"""Number of steps above which a run is long, number of its evaluations, and its patience in evaluations."""
EARLY_STOPPING = {"run.keep", "run.evaluations", "run.patience"}
"""Settings of early stopping: if the user gives one of them, the others keep their defaults."""
FEW_ROWS = 500
"""With fewer rows, a step has half as many examples, so that few epochs have more steps."""
MEASURED_TEXTS, MAX_LONGEST = 2_000, 512
UNCUT = 0.95
"""Fraction of the training texts that are not cut."""
KNOWN_SIZE, KNOWN_RATE, KNOWN_LORA_RATE, SIZE_EXPONENT = 22e6, 2e-4, 2e-3, 0.85
"""Rates fall with this power of the weights, from a 22M model (measured) to BERT-Large (the papers)."""


class TaskDefaults(Section):
    """Settings that fine-tune a model well, from `task_defaults.toml` in its folder."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate for tuning the whole encoder."""
    lora_lr: Annotated[float, Field(gt=0)]
    """Peak learning rate of adapters (head.encoder = lora)."""
    pooling: Literal["first", "mean"] = "mean"
    """State that represents a text: its first token's, or the mean of all."""


def suited_recipe(
    task: Task,
    data: Path,
    model: Path,
    overrides: Sequence[str],
    *,
    options: Sequence[tuple[str, str]],
    skip_bad: bool = False,
) -> tuple[FinetuningRecipe, str]:
    """Return the recipe of a task, and the reason for the settings that were chosen here, if any.

    Options and overrides are the ones of `finetuning_recipe`, and take precedence.
    """
    asked = finetuning_recipe_with_origins(task, overrides, options=options)
    head = asked.recipe.head.encoder
    if not task.own or asked.recipe.head.has_bilstm or asked.recipe.distill.teachers:
        return asked.recipe, ""
    splits = read_splits(task, data, skip_bad=skip_bad).limited(asked.recipe.run.limit)
    bert, rows = load(model, device="cpu"), len(splits.splits["train"])
    known, source = task_defaults(bert, model)
    values: dict[str, object] = {"run.keep": "best"} if splits.evaluation_names else {}
    if asked.recipe.text.context == "sentence":
        values["text.longest"] = _longest(bert, splits, asked.recipe)
    if task.kind.head.reads == "sentence":
        values |= _pooling(bert, splits, known)
    rate = known.lora_lr if head == "lora" else known.lr
    if head != "frozen-linear":
        batch = asked.recipe.run.examples
        if rows < FEW_ROWS and "run.examples" not in asked.origins:
            batch = max(1, batch // 2)
        passes = min(max(MIN_PASSES, round(STEPS * batch / rows)), MAX_PASSES)
        values |= {"optim.peak_lr": rate, "run.epochs": float(passes)}
        values |= {"run.examples": batch, "head.weights": "solved"}
        epochs = asked.recipe.run.epochs if "run.epochs" in asked.origins else passes
        left_open = not asked.origins.keys() & EARLY_STOPPING
        if epochs * rows > LONG_RUN * batch and splits.evaluation_names and left_open:
            values |= {"run.evaluations": EVALUATIONS, "run.patience": PATIENCE}
    if head == "lora":
        values["lora.targets"] = get_args(Target)
    lines = [("the model and the data", f"{key}={value_text(value)}") for key, value in values.items()]
    recipe = finetuning_recipe(task, overrides, options=[*lines, *options])
    return recipe, _reason(recipe, task, rows, source=source if recipe.optim.peak_lr == rate else "given")


def _reason(recipe: FinetuningRecipe, task: Task, rows: int, *, source: str) -> str:
    """Return the chosen settings in one line, with the options that change them."""
    shown, changes = [f"texts of up to {recipe.text.longest} tokens"], ["`text.longest`"]
    if task.kind.head.reads == "sentence":
        shown.insert(0, f"{recipe.head.pooling} of the states")
        changes.append("`head.pooling`")
    if recipe.head.encoder != "frozen-linear":
        epochs, steps = recipe.run.epochs, ceil(recipe.run.epochs * -(-rows // recipe.run.examples))
        passes = f"{epochs:g} passes of {counted(rows, 'example')} ({steps:,} steps)"
        if recipe.run.minutes != "off":
            passes += f" or {counted(recipe.run.minutes, 'minute')}, whichever ends first"
        if recipe.run.patience != "off":
            passes += f", fewer if {recipe.run.patience} of {recipe.run.evaluations} evaluations gain nothing"
        shown = [f"rate {recipe.optim.peak_lr:g} ({source})", passes, *shown]
        if recipe.head.encoder == "lora":
            shown.append(f"adapters on {', '.join(recipe.lora.targets)}")
            changes.append("`lora.targets`")
        dials = ["`run.epochs`", *(["`run.minutes`"] if recipe.run.minutes != "off" else [])]
        changes = ["`optim.peak_lr`", *dials, "`run.examples`", *changes]
    return f"{', '.join(shown)}; {', '.join(changes)} change it"


def _longest(bert: Bert, splits: TaskSplits, asked: FinetuningRecipe) -> int:
    """Return a length in tokens that leaves most training texts uncut, at most what the model supports."""
    positions, examples = bert.model.network.config.positions, splits.splits["train"]
    most = min(positions, MAX_LONGEST)
    sample = examples[:: -(-len(examples) // MEASURED_TEXTS)]
    uncut = asked.text.model_copy(update={"longest": most, "long_texts": "truncate"})
    encoded = splits.task.kind.encode(sample, splits.labels, bert.tokenizer, uncut)
    longest = 16 * -(-int(np.quantile(np.diff(encoded.starts_N1), UNCUT)) // 16)
    return min(max(TextSection().longest, longest), most)


def task_defaults(bert: Bert, model: Path) -> tuple[TaskDefaults, str]:
    """Return the settings in a model's folder, or else the ones for its size, and their source."""
    file = model / DEFAULTS_FILE
    if file.is_file():
        try:
            values = tomllib.loads(read_text(file, remedy="write it as TOML"))
            return TaskDefaults.model_validate(values), f"{DEFAULTS_FILE} of {model.name}"
        except (ValueError, ValidationError) as error:
            raise UserError(
                f"is not valid ({error})", where=str(file), remedy="correct or remove it"
            ) from error
    weights = sum(each.numel() for each in bert.model.network.encoder.parameters())
    factor = min((KNOWN_SIZE / weights) ** SIZE_EXPONENT, 1.5)
    rate, lora_rate = (float(f"{factor * known:.1g}") for known in (KNOWN_RATE, KNOWN_LORA_RATE))
    return TaskDefaults(lr=rate, lora_lr=lora_rate), f"for {weights / 1e6:.0f}M weights"


def _pooling(bert: Bert, splits: TaskSplits, known: TaskDefaults) -> dict[str, object]:
    """Return the head's pooling: a fine-tuned folder's own, else the model's default."""
    finetuned, name = bert.finetuned, splits.task.kind.head.name
    if finetuned is not None and finetuned.config.kind.head.reads == "sentence" and not finetuned.mix:
        head = finetuned.config.head
        return {"head.pooling": head.pooling, "head.cls": head.cls}
    if finetuned is None and name in bert.model.network.heads and bert.model.labels() == splits.labels:
        return {}  # a trained head that is kept
    has_pooler = "pooler" in architecture_of(bert.model.network.config.model_type).heads[name].needs
    # An untrained pooler is a random layer between the states and a solved head.
    return {"head.pooling": known.pooling, "head.cls": "raw" if has_pooler else "pooled"}
