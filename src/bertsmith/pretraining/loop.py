"""The steps of a run, one after the other; what is done with them (logs, saving) is the caller's."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bertsmith.examples.feed import Feed, StepAddress, StepBatches, steps_ahead
from bertsmith.objectives.pretraining import Counts
from bertsmith.pretraining.course import Course, Position
from bertsmith.pretraining.evaluation import means_of
from bertsmith.training.parallel import World
from bertsmith.training.schedules import learning_rate
from bertsmith.training.steps import LaunchedStep, Learner, StepOutcome, StepWork, launch_step, settle


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds spent on a run, earlier starts included."""

    before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Seconds up to now."""
        return self.before + time.monotonic() - self.started


@dataclass(frozen=True, slots=True)
class Lesson:
    """All that the steps need."""

    learner: Learner
    feed: Feed
    course: Course
    clock: Clock
    loader_workers: int


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done when a step is over, for which the weights must be at rest."""

    evaluation: bool = False
    saving: bool = False
    stopping: bool = False
    """Comes with saving."""

    @property
    def anything(self) -> bool:
        """Whether the next step must wait."""
        return self.evaluation or self.saving


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step: where it led, what it came to, how long it waited for its batch."""

    position: Position
    outcome: StepOutcome
    batches: StepBatches
    tokens: int
    """Over all ranks."""
    learning_rate: float
    waited_seconds: float
    due: Due


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step on its way: where it leads, and its report but for what it will come to."""

    position: Position
    launched: LaunchedStep
    report: partial[StepReport]


def training_steps(
    lesson: Lesson, position: Position, due_at: Callable[[Position], Due] = lambda _: Due()
) -> Iterator[StepReport]:
    """Take steps until the budget is spent.

    Where a GPU needs no watching, a step's report comes once the next step is on its way, so that the GPU
    never waits for Python; where something is due after a step, its report comes before the next one begins.
    """
    begun: deque[tuple[_Begun, Due]] = deque()
    for step in _begun_steps(lesson, position):
        due = due_at(step.position)
        begun.append((step, due))
        at_rest = due.anything or not lesson.learner.unwatched
        while len(begun) > (0 if at_rest else 1):
            report = _report(lesson, *begun.popleft(), before=position)
            position = report.position
            yield report
    for step, due in begun:
        yield _report(lesson, step, due, before=position)


def _report(lesson: Lesson, step: _Begun, due: Due, *, before: Position) -> StepReport:
    outcome = settle(lesson.learner, step.launched)
    return step.report(position=step.position.judged(before, outcome.skipped), outcome=outcome, due=due)


def _begun_steps(lesson: Lesson, position: Position) -> Iterator[_Begun]:
    """Begin steps, each when it is asked for, until the budget is spent."""
    course = lesson.course
    while not course.arrived(position):
        position = course.entered(position)
        address = course.address(position)
        pin = lesson.learner.world.device.type == "cuda"
        ahead = steps_ahead(lesson.feed, _following(address), workers=lesson.loader_workers, pin=pin)
        while not course.arrived(position) and _same_part(course, position, address):
            asked = time.monotonic()
            batches = next(ahead)
            step = _begin(lesson, position, batches, waited=time.monotonic() - asked)
            position = step.position
            yield step


def _following(address: StepAddress) -> Iterator[StepAddress]:
    """The addresses from here on within the same stage and masking level."""
    return (StepAddress(address.stage, step, address.progress) for step in itertools.count(address.step))


def _same_part(course: Course, position: Position, address: StepAddress) -> bool:
    due = course.address(course.entered(position))
    return (due.stage, due.progress) == (address.stage, address.progress)


def _begin(lesson: Lesson, position: Position, batches: StepBatches, *, waited: float) -> _Begun:
    learner, recipe = lesson.learner, lesson.course.recipe
    world = learner.world
    masked, pairs, tokens = world.sum([batches.masked, batches.pairs, float(batches.tokens)])
    rate = learning_rate(lesson.course.progress(position), recipe.optim)
    launched = launch_step(
        learner,
        StepWork(batches.micros, Counts(masked, pairs)),
        learning_rate=rate,
        seed=(recipe.run.seed, position.step),
    )
    # Ranks must agree on when a budget in minutes ends.
    seconds = (
        world.broadcast(lesson.clock.seconds()) if recipe.run.budget == "minutes" else lesson.clock.seconds()
    )
    after = position.after(tokens=int(tokens), seconds=seconds)
    report = partial(
        StepReport, batches=batches, tokens=int(tokens), learning_rate=rate, waited_seconds=waited
    )
    return _Begun(after, launched, report)


@dataclass
class Window:
    """What was seen since the last line of metrics; saved too, so that a resume changes no line."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    masked: float = 0.0
    pairs: float = 0.0
    tokens: int = 0
    sequences: int = 0
    waited: float = 0.0
    since: float = 0.0
    """The run's seconds at the last line."""

    def add(self, report: StepReport) -> None:
        """Take in one step."""
        if not report.outcome.skipped:
            pairs = zip(self.sums, report.outcome.sums.tolist(), strict=True)
            self.sums = [old + new for old, new in pairs]
            self.masked += report.batches.masked
            self.pairs += report.batches.pairs
        self.tokens += report.tokens
        self.sequences += report.batches.sequences
        self.waited += report.waited_seconds

    def values(self, world: World, report: StepReport) -> dict[str, Any]:
        """The line of metrics over all ranks."""
        passed = max(report.position.seconds - self.since, 1e-9)
        return {
            **means_of(world, self.sums, Counts(self.masked, self.pairs)),
            "learning_rate": report.learning_rate,
            "gradient_norm": report.outcome.gradient_norm,
            "tokens": report.position.tokens,
            "seconds": round(report.position.seconds, 3),
            "tokens_per_second": round(self.tokens / passed, 1),
            "input_wait": round(self.waited / passed, 5),
            "skipped": report.position.skipped,
        }

    def over_all_ranks(self, world: World) -> "Window":
        """What all ranks together have seen, for a saved state; sequences and waiting stay this rank's."""
        *sums, masked, pairs = world.sum([*self.sums, self.masked, self.pairs])
        return replace(self, sums=sums, masked=masked, pairs=pairs)
