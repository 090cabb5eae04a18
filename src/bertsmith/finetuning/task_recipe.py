"""The recipe of a fine-tuning run, and what a user should know of it before the first step.

The recipe: the defaults, the task's published settings, and what the user sets. The warnings: what is not
evaluated, what is cut, what is too little.
"""

from collections.abc import Iterator, Sequence
from math import ceil

from pydantic import ValidationError

from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.splits import EncodedSplit, TaskSplits
from bertsmith.finetuning.target_scaler import TargetScaler
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.load import Tree, layer_of_override, leaves, merge
from bertsmith.recipe.toml_text import value_text
from bertsmith.recipe.validation_errors import user_error
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.custom import MIN_ROWS_TO_SPLIT
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.tasks.text_encoding import cut_fraction
from bertsmith.text.tokenizer import Tokenizer

FEW_STEPS = 10
MAX_NAMES = 4
MIN_FRACTION = 0.001
"""What is reported in tenths of a percent."""


def finetuning_recipe(task: Task, overrides: Sequence[str] = ()) -> FinetuningRecipe:
    """The recipe for a task, with `key=value` overrides on top of its published settings."""
    published = [f"{key}={value_text(value)}" for key, value in task.settings.items()]
    values: Tree = {"task": task.name}
    origins: dict[str, str] = {}
    for origin, lines in ((f"task {task.name}", published), ("--set", overrides)):
        for line in lines:
            layer = layer_of_override(line)
            merge(values, layer.values)
            origins |= dict.fromkeys(leaves(layer.values), origin)
    try:
        return FinetuningRecipe.model_validate(values)
    except ValidationError as error:
        raise user_error(error, values, origins, FinetuningRecipe) from error


def total_steps(batches: ShuffledBatches, recipe: FinetuningRecipe) -> int:
    """How many steps the run's epochs come to."""
    return max(1, ceil(recipe.run.epochs * batches.steps_per_epoch - 1e-9))


def warn_of_no_development_set(assignment: Assignment, splits: TaskSplits) -> Iterator[str]:
    """That there is no development set, and why."""
    if not splits.evaluation_names:
        yield f"no development set ({_why_none(assignment, splits)}): the model is not evaluated"


def _why_none(assignment: Assignment, splits: TaskSplits) -> str:
    if assignment.task.custom.get("dev_fraction"):
        few = len(splits.splits["train"]) < MIN_ROWS_TO_SPLIT
        return f"fewer than {MIN_ROWS_TO_SPLIT} rows" if few else "no label can spare a row"
    if assignment.data.is_file():
        return "one file was given, not the folder that holds both"
    names = list(assignment.task.splits["dev"].files)  # what can be trained for has such a split
    return f"looked for {', '.join(names[:MAX_NAMES])}"


def warn_of_cut_texts(train: EncodedSplit, config: TaskConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """How many training texts are cut."""
    fraction = cut_fraction(train.examples, train.encoded, tokenizer, config.text)
    if fraction:
        shown = f"{fraction:.1%}" if fraction >= MIN_FRACTION else f"under {MIN_FRACTION:.1%}"
        yield (
            f"{shown} of the training texts are longer than text.longest ({config.text.longest} tokens) and "
            f"are cut; see text.longest and text.long_texts"
        )


def warn_of_few_steps(batches: ShuffledBatches, recipe: FinetuningRecipe) -> Iterator[str]:
    """That the run is very short."""
    steps = total_steps(batches, recipe)
    if steps < FEW_STEPS:
        shown = "only one step" if steps == 1 else f"only {steps} steps"
        yield f"the run has {shown}, which teach a model little; see run.epochs and run.examples"


def describe_target_scaler(scaler: TargetScaler | None) -> Iterator[str]:
    """That numbers are learned on a scale of their own."""
    if scaler is not None:
        yield (
            f"the numbers are learned as distances from their mean ({scaler.mean:g}) in standard deviations "
            f"({scaler.deviation:g}), and the loss is that of the distances; the model gives true numbers"
        )
