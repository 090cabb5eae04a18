"""A run's budget: what fraction of it is spent, in which stage that is, and which step comes next."""

from dataclasses import dataclass, replace

from bertsmith.data.data_loader import StepIndex
from bertsmith.recipe.schema import Recipe
from bertsmith.training.trainer import Progress


@dataclass(slots=True)
class Budget:
    """The way through a recipe's budget and stages, as functions of the progress."""

    recipe: Recipe
    ending_seconds: float = 0.0
    """What the end of a run takes that a budget in minutes must leave time for: the last evaluation, the
    checkpoint, the model and its curves."""
    ready_seconds: float | None = None
    """The run's seconds when its first step began, if that step takes as long as any other."""

    def fraction(self, progress: Progress) -> float:
        """The fraction of the budget that is spent, at most 1."""
        run = self.recipe.run
        if run.budget == "steps":
            return min(1.0, progress.step / run.steps)
        if run.budget == "tokens":
            return min(1.0, progress.tokens / run.tokens)
        # A step that would end too late is not begun.
        next_ends = progress.seconds + self.step_seconds(progress)
        if progress.seconds >= self.step_limit or next_ends > self.step_limit:
            return 1.0
        # Of the seconds after the first step: a minute of compiling must not eat the warm-up.
        first = progress.first_step_seconds
        return (progress.seconds - first) / (self.step_limit - first)

    @property
    def step_limit(self) -> float:
        """The seconds after which a budget in minutes has no more steps."""
        seconds = 60 * self.recipe.run.minutes
        return max(seconds - self.ending_seconds, seconds / 2)

    def step_seconds(self, progress: Progress) -> float:
        """What a step takes: the mean of those after the first, which may compile; 0 where none is known."""
        if progress.step > 1:
            return (progress.seconds - progress.first_step_seconds) / (progress.step - 1)
        if progress.step == 1 and self.ready_seconds is not None:
            return progress.first_step_seconds - self.ready_seconds
        return 0.0

    def steps_that_fit(self, progress: Progress) -> int | None:
        """How many steps a budget in minutes has, as far as can be told after this one."""
        each = self.step_seconds(progress)
        if self.recipe.run.budget != "minutes" or not each:
            return None
        return progress.step + max(0, int((self.step_limit - progress.seconds) / each))

    def spent(self, progress: Progress) -> bool:
        """Whether nothing of the budget remains."""
        return self.fraction(progress) >= 1.0

    def seconds_remaining(self, progress: Progress) -> float:
        """How long the rest of the budget takes if steps take as long as they did after the first one."""
        if self.recipe.run.budget == "minutes":
            return max(0.0, 60 * self.recipe.run.minutes - progress.seconds)
        for_each = self.step_seconds(progress) or progress.seconds
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

    def masking_rate(self, progress: Progress, *, steps_ahead: int) -> float | None:
        """The masking rate so many steps after this progress; None where it is always the recipe's."""
        if self.recipe.masking.final_rate == "rate":
            return None
        # A budget in minutes goes by what is known when the step is built: nobody knows how long others take.
        ahead = steps_ahead if self.recipe.run.budget == "steps" else 0
        return self.recipe.masking.rate_at(self.fraction(replace(progress, step=progress.step + ahead)))

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
