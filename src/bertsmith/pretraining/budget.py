"""A run's budget: what fraction of it is spent, in which stage that is, and which step comes next."""

from dataclasses import dataclass, replace

from bertsmith.data.data_loader import StepIndex
from bertsmith.recipe.schema import Recipe
from bertsmith.training.trainer import Progress


@dataclass(frozen=True, slots=True)
class Budget:
    """The way through a recipe's budget and stages, as pure functions of the progress."""

    recipe: Recipe

    def fraction(self, progress: Progress) -> float:
        """The fraction of the budget that is spent, at most 1."""
        run = self.recipe.run
        if run.budget == "steps":
            return min(1.0, progress.step / run.steps)
        if run.budget == "tokens":
            return min(1.0, progress.tokens / run.tokens)
        if progress.seconds >= 60 * run.minutes:
            return 1.0
        # Of the seconds after the first step: a minute of compiling must not eat the warm-up.
        first = progress.first_step_seconds
        return (progress.seconds - first) / (60 * run.minutes - first)

    def spent(self, progress: Progress) -> bool:
        """Whether nothing of the budget remains."""
        return self.fraction(progress) >= 1.0

    def seconds_remaining(self, progress: Progress) -> float:
        """How long the rest of the budget takes if steps take as long as they did after the first one."""
        if self.recipe.run.budget == "minutes":
            return max(0.0, 60 * self.recipe.run.minutes - progress.seconds)
        steps, first = progress.step - 1, progress.first_step_seconds
        for_each = (progress.seconds - first) / steps if steps else progress.seconds
        fraction = self.fraction(progress)
        return for_each * progress.step * (1 - fraction) / fraction

    def enter_stage(self, progress: Progress) -> Progress:
        """The progress in the stage that its budget calls for; a new stage starts at its own step 0."""
        due = _part([stage.fraction for stage in self.recipe.examples.stages], self.fraction(progress))
        stage = max(progress.stage, due)
        return progress if stage == progress.stage else replace(progress, stage=stage, stage_step=0)

    def address(self, progress: Progress) -> StepIndex:
        """Where in the data the next step lies."""
        return StepIndex(progress.stage, progress.stage_step, self._masking_level(progress))

    def _masking_level(self, progress: Progress) -> float:
        """The middle of the current masking level: constant while it lasts, so batches can be built ahead."""
        masking = self.recipe.masking
        if not masking.levels or masking.levels_by != "stage":
            return 0.0
        fractions = [level.fraction for level in masking.levels]
        level = _part(fractions, self.fraction(progress))
        return sum(fractions[:level]) + fractions[level] / 2


def _part(fractions: list[float], fraction: float) -> int:
    """Which of the parts, each this fraction of the run, a fraction of the run falls into."""
    passed = 0.0
    for number, part in enumerate(fractions[:-1]):
        passed += part
        if fraction < passed - 1e-9:
            return number
    return len(fractions) - 1
