"""The budget of a run: the fraction spent, the current stage, and the next step."""

from dataclasses import dataclass, replace

from bertsmith.data.data_loader import StepIndex
from bertsmith.recipe.schema import Recipe
from bertsmith.training.trainer import Progress


@dataclass(slots=True)
class Budget:
    """A recipe's budget and stages, as functions of a run's progress."""

    recipe: Recipe
    ending_seconds: float = 0.0
    """Seconds that a budget in minutes reserves for the end of a run: the last evaluation, the checkpoint,
    the model and its curves."""
    ready_seconds: float | None = None
    """Seconds of the run before its first step; None if the first step compiles and so takes longer."""

    def fraction(self, progress: Progress) -> float:
        """Return the fraction of the budget that is spent, at most 1."""
        run = self.recipe.run
        if run.budget == "steps":
            return min(1.0, progress.step / run.steps)
        if run.budget == "tokens":
            return min(1.0, progress.tokens / run.tokens)
        # Do not begin a step that would end too late.
        next_ends = progress.seconds + self.step_seconds(progress)
        if progress.seconds >= self.step_limit or next_ends > self.step_limit:
            return 1.0
        # Count the seconds after the first step, so that a minute of compiling does not use up the warm-up.
        first = progress.first_step_seconds
        return (progress.seconds - first) / (self.step_limit - first)

    @property
    def step_limit(self) -> float:
        """Seconds after which a budget in minutes has no more steps."""
        seconds = 60 * self.recipe.run.minutes
        return max(seconds - self.ending_seconds, seconds / 2)

    def step_seconds(self, progress: Progress) -> float:
        """Return the mean seconds of steps after the first, which may compile; 0 if unknown."""
        if progress.step > 1:
            return (progress.seconds - progress.first_step_seconds) / (progress.step - 1)
        if progress.step == 1 and self.ready_seconds is not None:
            return progress.first_step_seconds - self.ready_seconds
        return 0.0

    def steps_that_fit(self, progress: Progress) -> int | None:
        """Estimate the total steps of a budget in minutes; None for other budgets or an unknown speed."""
        each = self.step_seconds(progress)
        if self.recipe.run.budget != "minutes" or not each:
            return None
        return progress.step + max(0, int((self.step_limit - progress.seconds) / each))

    def spent(self, progress: Progress) -> bool:
        """True if the whole budget is spent."""
        return self.fraction(progress) >= 1.0

    def seconds_remaining(self, progress: Progress) -> float:
        """Estimate the seconds for the rest of the budget from the steps so far, without the first."""
        if self.recipe.run.budget == "minutes":
            return max(0.0, 60 * self.recipe.run.minutes - progress.seconds)
        for_each = self.step_seconds(progress) or progress.seconds
        fraction = self.fraction(progress)
        return for_each * progress.step * (1 - fraction) / fraction

    def enter_stage(self, progress: Progress) -> Progress:
        """Return the progress in the stage that is due by the budget; a new stage begins at its step 0."""
        due = _part([stage.fraction for stage in self.recipe.examples.stages], self.fraction(progress))
        stage = max(progress.stage, due)
        return progress if stage == progress.stage else replace(progress, stage=stage, stage_step=0)

    def address(self, progress: Progress) -> StepIndex:
        """Return the index of the next step in the data."""
        return StepIndex(progress.stage, progress.stage_step, self._masking_level(progress))

    def masking_rate(self, progress: Progress, *, steps_ahead: int) -> float | None:
        """Return the masking rate this many steps ahead; None if the recipe's rate is constant."""
        if self.recipe.masking.final_rate == "rate":
            return None
        # With other budgets, use the fraction at the time when the step is built: later ones are unknown.
        ahead = steps_ahead if self.recipe.run.budget == "steps" else 0
        return self.recipe.masking.rate_at(self.fraction(replace(progress, step=progress.step + ahead)))

    def _masking_level(self, progress: Progress) -> float:
        """Return the middle of the current masking level: constant within it, to build batches ahead."""
        masking = self.recipe.masking
        if not masking.levels or masking.levels_by != "stage":
            return 0.0
        fractions = [level.fraction for level in masking.levels]
        level = _part(fractions, self.fraction(progress))
        return sum(fractions[:level]) + fractions[level] / 2


def _part(fractions: list[float], fraction: float) -> int:
    """Return the index of the part that a fraction of the run falls into; parts are fractions of the run."""
    passed = 0.0
    for number, part in enumerate(fractions[:-1]):
        passed += part
        if fraction < passed - 1e-9:
            return number
    return len(fractions) - 1
