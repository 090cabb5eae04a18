"""Settings for a user's own data, where nothing is published: they follow from the model and the data."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_text
from bertsmith.core.wording import counted
from bertsmith.finetuning.splits import read_splits
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.recipe.finetuning_schema import FinetuningRecipe, TextSection
from bertsmith.recipe.section import Section
from bertsmith.recipe.toml_text import value_text
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_recipe import finetuning_recipe

DEFAULTS_FILE = "task_defaults.toml"
STEPS = 250
"""A run has at least about this many steps, unless the data are so few that they would be seen too often."""
MIN_PASSES, MAX_PASSES = 3, 20
FEW_ROWS = 500
"""Below it a step has half as many examples, so that few passes have more steps."""
MEASURED_TEXTS = 2_000
UNCUT = 0.95
"""Fraction of the training texts that are not cut."""
KNOWN_SIZE, KNOWN_RATE, KNOWN_LORA_RATE, SIZE_EXPONENT = 22e6, 2e-4, 4e-3, 0.85
"""Rates fall with this power of the weights, from a 22M model (measured) to BERT-Large (the papers)."""


class TaskDefaults(Section):
    """Settings that fine-tune a model well, from `task_defaults.toml` in its folder."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate where the whole encoder is tuned."""
    lora_lr: Annotated[float, Field(gt=0)]
    """Peak learning rate of adapters (head.encoder = lora)."""
    pooling: Literal["first", "mean"] = "mean"
    """What stands for a text."""


@dataclass(frozen=True, slots=True)
class SuitedSettings:
    """Chosen settings, in the form of `--set`, and why they were chosen."""

    settings: tuple[str, ...]
    reason: str


def suited_recipe(
    task: Task,
    data: Path,
    model: Path,
    overrides: Sequence[str],
    *,
    options: Sequence[tuple[str, str]],
    skip_bad: bool = False,
) -> tuple[FinetuningRecipe, str]:
    """Return the recipe of a task, and the reason for the settings that were left open, if there are any.

    Options and overrides are those of `finetuning_recipe`, and win.
    """
    asked = finetuning_recipe(task, overrides, options=options)
    if not task.own or asked.head.encoder == "frozen-features" or asked.distill.teachers:
        return asked, ""
    suited = suited_settings(task, data, model, asked, skip_bad=skip_bad)
    lines = [("the model and the data", line) for line in suited.settings]
    return finetuning_recipe(task, overrides, options=[*lines, *options]), suited.reason


def suited_settings(
    task: Task, data: Path, model: Path, asked: FinetuningRecipe, *, skip_bad: bool
) -> SuitedSettings:
    """Return the settings that suit a model folder and the training data."""
    splits = read_splits(task, data, skip_bad=skip_bad).limited(asked.run.limit)
    examples, bert = splits.splits["train"], load(model, device="cpu")
    positions = bert.model.network.config.positions
    sample = examples[:: -(-len(examples) // MEASURED_TEXTS)]
    uncut = TextSection(longest=positions, context=asked.text.context)
    lengths = np.diff(task.kind.encode(sample, splits.labels, bert.tokenizer, uncut).starts_N1)
    longest = max(TextSection().longest, 16 * -(-int(np.quantile(lengths, UNCUT)) // 16))
    values: dict[str, object] = {"text.longest": min(longest, positions)}
    shown = []
    known, source = task_defaults(bert, model)
    if splits.evaluation_names:
        values["run.keep"] = "best"
    if asked.head.encoder != "frozen-linear":
        rate = known.lora_lr if asked.head.encoder == "lora" else known.lr
        batch = asked.run.examples if len(examples) >= FEW_ROWS else asked.run.examples // 2 or 1
        passes = min(max(MIN_PASSES, round(STEPS * batch / len(examples))), MAX_PASSES)
        values |= {
            "optim.peak_lr": rate,
            "run.epochs": float(passes),
            "run.examples": batch,
            "head.weights": "solved",
        }
        steps = passes * -(-len(examples) // batch)
        shown = [f"rate {rate:g}", f"{passes} passes of {counted(len(examples), 'example')} ({steps} steps)"]
        shown[0] += f" ({source})"
    if task.kind.head.reads == "sentence":
        values |= _pooling(bert, task, known)
        shown.append(f"{values['head.pooling']} of the states")
    shown.append(f"texts of up to {values['text.longest']} tokens")
    reason = f"{', '.join(shown)}; --lr, --epochs, --batch, --max-length and --set head.pooling change it"
    return SuitedSettings(tuple(f"{key}={value_text(value)}" for key, value in values.items()), reason)


def task_defaults(bert: Bert, model: Path) -> tuple[TaskDefaults, str]:
    """Return what a model's folder says of fine-tuning it, or what its size suggests, and which it was."""
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


def _pooling(bert: Bert, task: Task, known: TaskDefaults) -> dict[str, object]:
    """Return what the head reads: as in the folder if it was fine-tuned, else the usual for this model."""
    if bert.finetuned is not None:
        head = bert.finetuned.config.head
        return {"head.pooling": head.pooling, "head.cls": head.cls}
    config = bert.model.network.config
    has_pooler = "pooler" in architecture_of(config.model_type).heads[task.kind.head.name].needs
    # A pooler that no pre-training taught is a random layer between the states and a solved head.
    return {"head.pooling": known.pooling, "head.cls": "raw" if has_pooler else "pooled"}
