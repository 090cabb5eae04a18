"""The steps of a fine-tuning run, one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches, StepItems
from bertsmith.training.steps import LaunchedStep, Learner, StepOutcome, StepWork, launch_step, settle
from bertsmith.training.tuning import tuning_rate


@dataclass(frozen=True, slots=True)
class TuningStep:
    """One step: its number (from 1), what it came to, what it was shown."""

    number: int
    outcome: StepOutcome
    items: StepItems
    learning_rate: float


def steps_of(batches: ShuffledBatches, recipe: FinetuningRecipe) -> int:
    """How many steps the run's epochs come to."""
    return max(1, ceil(recipe.run.epochs * batches.steps_per_epoch - 1e-9))


def tuning_steps(
    learner: Learner,
    batches: ShuffledBatches,
    recipe: FinetuningRecipe,
    *,
    first: int,
    pause_after: Callable[[int], bool],
) -> Iterator[TuningStep]:
    """Take the steps from `first` on.

    On a GPU a step is reported once the next one is on its way, except where the caller must pause after it.
    """
    total = steps_of(batches, recipe)
    waiting: tuple[int, LaunchedStep, StepItems, float] | None = None
    for number in range(first, total):
        items = batches.step(number)
        rate = tuning_rate(number / total, recipe.optim)
        seed = (recipe.run.seed, number)
        work = StepWork(items.micros, (items.count,))
        launched = launch_step(learner, work, learning_rate=rate, seed=seed)
        if waiting is not None:
            yield _settled(learner, *waiting)
        waiting = (number + 1, launched, items, rate)
        if pause_after(number + 1) or not learner.unwatched:
            yield _settled(learner, *waiting)
            waiting = None
    if waiting is not None:
        yield _settled(learner, *waiting)


def _settled(
    learner: Learner, number: int, launched: LaunchedStep, items: StepItems, rate: float
) -> TuningStep:
    return TuningStep(number, settle(learner, launched), items, rate)
