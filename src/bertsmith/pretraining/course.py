"""Where a run stands: how much of its budget is spent, in which stage it is, which step comes next."""

from dataclasses import dataclass, replace

from bertsmith.examples.feed import StepAddress
from bertsmith.recipe.schema import Recipe
from bertsmith.training.steps import Skip


@dataclass(frozen=True, slots=True)
class Position:
    """All that a run needs, beside its weights, to go on: steps taken, and where in the data they led."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_step_seconds: float = 0.0
    """What the first step took, compiling included."""
    skipped: int = 0
    """Steps whose gradient was not used."""
    skipped_in_a_row: int = 0

    def after(self, *, tokens: int, seconds: float) -> "Position":
        """The position after one more step, before it is known whether its gradient was used."""
        return replace(
            self,
            step=self.step + 1,
            stage_step=self.stage_step + 1,
            tokens=self.tokens + tokens,
            seconds=seconds,
            first_step_seconds=self.first_step_seconds if self.step else seconds,
        )

    def judged(self, before: "Position", skipped: Skip) -> "Position":
        """The same position, knowing what became of its step and of those before it."""
        rows = {"": 0, "taken back": before.skipped_in_a_row}  # the latter is no sign of anything
        row = rows.get(skipped, before.skipped_in_a_row + 1)
        return replace(self, skipped=before.skipped + bool(skipped), skipped_in_a_row=row)


@dataclass(frozen=True, slots=True)
class Course:
    """The way through a recipe's budget and stages, as pure functions of the position."""

    recipe: Recipe

    def progress(self, position: Position) -> float:
        """The share of the budget that is spent, at most 1."""
        run = self.recipe.run
        spent = {
            "steps": position.step / run.steps,
            "tokens": position.tokens / run.tokens,
            "minutes": _share_of_time(position, 60 * run.minutes),
        }[run.budget]
        return min(1.0, spent)

    def arrived(self, position: Position) -> bool:
        """Whether the budget is spent."""
        return self.progress(position) >= 1.0

    def seconds_left(self, position: Position) -> float:
        """How long the rest of the budget takes if steps go on as they did after the first one."""
        if self.recipe.run.budget == "minutes":
            return max(0.0, 60 * self.recipe.run.minutes - position.seconds)
        steps, first = position.step - 1, position.first_step_seconds
        for_each = (position.seconds - first) / steps if steps else position.seconds
        progress = self.progress(position)
        return for_each * position.step * (1 - progress) / progress

    def entered(self, position: Position) -> Position:
        """The position in the stage that its progress calls for; a new stage starts at its own step 0."""
        due = _due([stage.share for stage in self.recipe.examples.stages], self.progress(position))
        stage = max(position.stage, due)
        return position if stage == position.stage else replace(position, stage=stage, stage_step=0)

    def level_progress(self, position: Position) -> float:
        """The middle of the current masking level: constant while it lasts, so batches can be built ahead."""
        masking = self.recipe.masking
        if not masking.levels or masking.levels_by != "stage":
            return 0.0
        shares = [level.share for level in masking.levels]
        level = _due(shares, self.progress(position))
        return sum(shares[:level]) + shares[level] / 2

    def address(self, position: Position) -> StepAddress:
        """Where in the data the next step lies."""
        return StepAddress(position.stage, position.stage_step, self.level_progress(position))


def _share_of_time(position: Position, budget: float) -> float:
    """The share of the seconds after the first step: a minute of compiling must not eat the warm-up."""
    if position.seconds >= budget:
        return 1.0
    first = position.first_step_seconds
    return (position.seconds - first) / (budget - first)


def _due(shares: list[float], progress: float) -> int:
    """Which of the parts with these shares a progress falls into."""
    passed = 0.0
    for number, share in enumerate(shares[:-1]):
        passed += share
        if progress < passed - 1e-9:
            return number
    return len(shares) - 1
