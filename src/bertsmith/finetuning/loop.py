"""The steps of a fine-tuning run, one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches, StepItems
from bertsmith.training.steps import LaunchedStep, Learner, StepOutcome, StepWork, launch_step, settle
from bertsmith.training.tuning import tuning_rate, with_useful_warm_up


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done after a step, decided once and before the next one begins."""

    exam: bool = False
    saving: bool = False
    stopping: bool = False

    @property
    def anything(self) -> bool:
        """Whether the next step must wait."""
        return self.exam or self.saving or self.stopping


@dataclass(frozen=True, slots=True)
class TuningStep:
    """One step: its number (from 1), what it came to, what it was shown, what is due after it."""

    number: int
    outcome: StepOutcome
    items: StepItems
    learning_rate: float
    due: Due


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A step that was begun and is still to be reported."""

    number: int
    launched: LaunchedStep
    items: StepItems
    learning_rate: float
    due: Due

    def settled(self, learner: Learner) -> TuningStep:
        return TuningStep(
            self.number, settle(learner, self.launched), self.items, self.learning_rate, self.due
        )


def steps_of(batches: ShuffledBatches, recipe: FinetuningRecipe) -> int:
    """How many steps the run's epochs come to."""
    return max(1, ceil(recipe.run.epochs * batches.steps_per_epoch - 1e-9))


def tuning_steps(
    learner: Learner,
    batches: ShuffledBatches,
    recipe: FinetuningRecipe,
    *,
    first: int,
    due_after: Callable[[int], Due],
) -> Iterator[TuningStep]:
    """Take the steps from `first` on; `due_after` is asked once for each.

    On a GPU a step is reported once the next one is on its way, except where something is due after it.
    """
    waiting: _Waiting | None = None
    for number in range(first, steps_of(batches, recipe)):
        launched = _launched(learner, batches, recipe, number, due_after)
        if waiting is not None:
            yield waiting.settled(learner)
        waiting = launched
        if waiting.due.anything or not learner.unwatched:
            yield waiting.settled(learner)
            waiting = None
    if waiting is not None:
        yield waiting.settled(learner)


def _launched(
    learner: Learner,
    batches: ShuffledBatches,
    recipe: FinetuningRecipe,
    number: int,
    due_after: Callable[[int], Due],
) -> _Waiting:
    items = batches.step(number)
    steps = steps_of(batches, recipe)
    rate = tuning_rate(number / steps, with_useful_warm_up(recipe.optim, steps=steps))
    work = StepWork(items.micros, (items.count,))
    launched = launch_step(learner, work, learning_rate=rate, seed=(recipe.run.seed, number))
    return _Waiting(number + 1, launched, items, rate, due_after(number + 1))
