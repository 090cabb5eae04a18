"""What a user should know before a run's first step: what is not judged, what is cut, what is too little."""

from collections.abc import Iterator

from bertsmith.finetuning.folder import Assignment
from bertsmith.finetuning.loop import steps_of
from bertsmith.finetuning.material import Material, Sheet
from bertsmith.finetuning.number_scale import NumberScale
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.custom import FEWEST_TO_PART
from bertsmith.tasks.cut_texts import cut_share
from bertsmith.tasks.task_file import TaskNote
from bertsmith.text.tokenizer import Tokenizer

FEW_STEPS = 10
MOST_NAMES = 4
LEAST_SHARE = 0.001
"""What is told in tenths of a percent."""


def on_exams(assignment: Assignment, material: Material) -> Iterator[str]:
    """That there is no development set, and why."""
    if not material.exams:
        yield f"no development set ({_why(assignment, material)}): the model is not judged"


def _why(assignment: Assignment, material: Material) -> str:
    if assignment.task.custom.get("dev_share"):
        few = len(material.splits["train"]) < FEWEST_TO_PART
        return f"fewer than {FEWEST_TO_PART} rows" if few else "no label can spare a row"
    if assignment.data.is_file():
        return "one file was given, not the folder that holds both"
    names = list(assignment.task.splits["dev"].files)  # what can be trained for has such a split
    return f"looked for {', '.join(names[:MOST_NAMES])}"


def on_cuts(train: Sheet, note: TaskNote, tokenizer: Tokenizer) -> Iterator[str]:
    """How many training texts are cut."""
    share = cut_share(train.examples, train.encoded, tokenizer, note.text)
    if share:
        told = f"{share:.1%}" if share >= LEAST_SHARE else f"under {LEAST_SHARE:.1%}"
        yield (
            f"{told} of the training texts are longer than text.longest ({note.text.longest} tokens) and are "
            f"cut; see text.longest and text.long_texts"
        )


def on_steps(batches: ShuffledBatches, recipe: FinetuningRecipe) -> Iterator[str]:
    """That the run is very short."""
    steps = steps_of(batches, recipe)
    if steps < FEW_STEPS:
        told = "only one step" if steps == 1 else f"only {steps} steps"
        yield f"the run has {told}, which teach a model little; see run.epochs and run.examples"


def on_numbers(scale: NumberScale | None) -> Iterator[str]:
    """That numbers are learned on a scale of their own."""
    if scale is not None:
        yield (
            f"the numbers are learned as distances from their mean ({scale.mean:g}) in standard deviations "
            f"({scale.deviation:g}), and the loss is that of the distances; the model gives true numbers"
        )
