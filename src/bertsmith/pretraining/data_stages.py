"""The way of a run through its data: its budget, stages and masking levels."""

from dataclasses import dataclass, replace

from bertsmith.data.data_loader import StepIndex
from bertsmith.recipe.schema import Recipe
from bertsmith.training.budget import Budget, Minutes, Steps, Tokens
from bertsmith.training.trainer import Progress


def budget_of(recipe: Recipe) -> Budget:
    """Return the budget of a recipe."""
    run = recipe.run
    if run.budget == "minutes":
        return Minutes(run.minutes)
    return Steps(run.steps) if run.budget == "steps" else Tokens(run.tokens)


@dataclass(frozen=True, slots=True)
class Stages:
    """A recipe's stages and masking levels, as functions of a run's progress."""

    recipe: Recipe
    budget: Budget

    def enter(self, progress: Progress) -> Progress:
        """Return the progress in the stage that is due by the budget; a new stage begins at its step 0."""
        due = _part([stage.fraction for stage in self.recipe.examples.stages], self.budget.fraction(progress))
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
        fraction = self.budget.fraction(replace(progress, step=progress.step + ahead))
        return self.recipe.masking.rate_at(fraction)

    def _masking_level(self, progress: Progress) -> float:
        """Return the middle of the current masking level: constant within it, to build batches ahead."""
        masking = self.recipe.masking
        if not masking.levels or masking.levels_by != "stage":
            return 0.0
        fractions = [level.fraction for level in masking.levels]
        level = _part(fractions, self.budget.fraction(progress))
        return sum(fractions[:level]) + fractions[level] / 2


def _part(fractions: list[float], fraction: float) -> int:
    """Return the index of the part that a fraction of the run falls into; parts are fractions of the run."""
    passed = 0.0
    for number, part in enumerate(fractions[:-1]):
        passed += part
        if fraction < passed - 1e-9:
            return number
    return len(fractions) - 1
