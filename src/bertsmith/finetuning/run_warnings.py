"""Warnings and notes before a run's first step: missing evaluation, cut texts, too little data or steps."""

from collections.abc import Iterator
from math import ceil

from bertsmith.core.wording import counted
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.splits import EncodedSplit, TaskSplits
from bertsmith.finetuning.target_scaler import TargetScaler
from bertsmith.model.lora import targeted_layers
from bertsmith.model.network import Network
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.custom import spec_of
from bertsmith.tasks.stratified_split import MIN_ROWS_TO_SPLIT
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.tasks.text_encoding import cut_fraction
from bertsmith.text.tokenizer import Tokenizer

FEW_STEPS = 10
FEW_EXAMPLES = 50
"""Size of a development set that causes a warning: one example is more than 2 % of the accuracy."""
MAX_NAMES = 4
MIN_FRACTION = 0.001
"""Smallest fraction that is printed exactly, in tenths of a percent."""
LOW_LORA_RATE = 1e-4
"""LoRA learns little below this in a usual run: the paper's rates for GLUE are 2e-4 to 5e-4."""


def total_steps(batches: ShuffledBatches, recipe: FinetuningRecipe) -> int:
    """Return the number of steps in the run's epochs."""
    return max(1, ceil(recipe.run.epochs * batches.steps_per_epoch - 1e-9))


def warn_of_no_development_set(assignment: Assignment, splits: TaskSplits) -> Iterator[str]:
    """Warn about a missing development set, with the reason."""
    if not splits.evaluation_names:
        yield f"no development set ({_why_none(assignment, splits)}): the model is not evaluated"


def warn_of_weak_development_set(splits: TaskSplits) -> Iterator[str]:
    """Warn if a class is missing from a development set, or if the set is too small for reliable figures."""
    for name in splits.evaluation_names:
        examples, kind = splits.splits[name], splits.task.kind
        found = {label for example in examples for label in example.label_names}
        missing = [label for label in splits.labels if label not in found] if kind.from_tables else []
        if missing:
            listed = ", ".join(map(repr, missing[:MAX_NAMES])) + (", ..." if missing[MAX_NAMES:] else "")
            yield f"{name} lacks examples of {listed}: the model is not evaluated on them"
        if len(examples) < FEW_EXAMPLES:
            yield (
                f"{name} has only {counted(len(examples), 'example')}, so its figures may be chance; "
                "for your own table see `folds` and `dev_share`"
            )


def _why_none(assignment: Assignment, splits: TaskSplits) -> str:
    if assignment.task.custom and spec_of(assignment.task.custom).is_parted:
        few = len(splits.splits["train"]) < MIN_ROWS_TO_SPLIT
        return f"fewer than {MIN_ROWS_TO_SPLIT} rows" if few else "none of the labels can spare a row"
    if assignment.data.is_file():
        return "one file was given, not the folder with both"
    names = list(assignment.task.splits["dev"].files)  # every task with training data has this split
    return f"looked for {', '.join(names[:MAX_NAMES])}"


def warn_of_cut_texts(train: EncodedSplit, config: TaskConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """Warn if training texts are cut, with their fraction."""
    fraction = cut_fraction(train.examples, train.encoded, tokenizer, config.text)
    if fraction:
        shown = f"{fraction:.1%}" if fraction >= MIN_FRACTION else f"under {MIN_FRACTION:.1%}"
        yield (
            f"{shown} of the training texts are longer than text.longest ({config.text.longest} tokens) and "
            f"are cut; see text.longest and text.long_texts"
        )


def warn_of_few_steps(batches: ShuffledBatches, recipe: FinetuningRecipe) -> Iterator[str]:
    """Warn if the run has very few steps."""
    steps = total_steps(batches, recipe)
    if steps < FEW_STEPS:
        shown = "only one step" if steps == 1 else f"only {steps} steps"
        yield f"the run has {shown}, too few to learn much; see `run.epochs` and `run.examples`"


def warn_of_vain_patience(batches: ShuffledBatches, recipe: FinetuningRecipe) -> Iterator[str]:
    """Warn if the run is evaluated too seldom to end early."""
    patience = recipe.run.patience
    before_the_end = min(recipe.run.evaluations, total_steps(batches, recipe)) - 1
    if patience != "off" and patience >= before_the_end:  # the first cannot be compared with any
        yield (
            f"the run cannot end early: it has {counted(before_the_end, 'evaluation')} before its end, and "
            f"run.patience is {patience}; see run.evaluations"
        )


def describe_target_scaler(scaler: TargetScaler | None) -> Iterator[str]:
    """Note that numeric targets are learned as standardised values."""
    if scaler is not None:
        yield (
            f"the numbers are learned as distances from their mean ({scaler.mean:g}) in standard deviations "
            f"({scaler.deviation:g}), and the loss refers to them; the model predicts true numbers"
        )


def describe_solved_head(*, solved: bool) -> Iterator[str]:
    """Note that the head is the optimum of a regression, and how its penalty was chosen."""
    if solved:
        yield (
            "the linear probe is the optimal head on the encoder's vectors (L-BFGS; the penalty was chosen "
            "by cross-validation on the training set)"
        )


def describe_micro_tokens(recipe: FinetuningRecipe, chosen: int, device: str) -> Iterator[str]:
    """Note how many tokens a forward pass on a GPU has, if this was chosen automatically."""
    if recipe.run.micro_tokens == "auto" and device == "cuda":
        yield f"a forward pass has up to {chosen:,} tokens, by the GPU's free memory (run.micro_tokens)"


def describe_adapters(network: Network, recipe: FinetuningRecipe) -> Iterator[str]:
    """Note how many weights the adapters have, if any; warn if the learning rate is low for them."""
    if recipe.head.encoder != "lora":
        return
    learned = sum(each.numel() for each in network.encoder.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in network.encoder.parameters()) - learned
    targets = ", ".join(recipe.lora.targets)
    yield (
        f"adapters of rank {recipe.lora.rank} on {targets} learn with the head: {learned:,} weights, while "
        f"the encoder's {frozen:,} are frozen"
    )
    stacked = {f"encoder.{each.name}" for each in network.encoder.linears() if len(each.targets) > 1}
    if any(
        each.stacked == 1 and each.ours in stacked for each in targeted_layers(network, recipe.lora.targets)
    ):
        yield "query, key and value are one layer of this model: they share one adapter"
    if recipe.optim.peak_lr < LOW_LORA_RATE:
        yield (
            f"optim.peak_lr = {recipe.optim.peak_lr:g} is low for adapters, which need 1e-4 to "
            "1e-3: `optim.peak_lr=5e-4`"
        )
