"""Runs that are finished and then given more epochs."""

from collections.abc import Iterator
from dataclasses import dataclass

from bertsmith.core.wording import counted
from bertsmith.finetuning.assignment import ENDED_AFTER
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.training.checkpoint import SavedState
from bertsmith.training.optimizers import learning_rate, without_short_warmup


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of a run: one, unless it was lengthened."""

    ended_after: float | None = None
    """Epochs of the run if it has taken its last step, else None."""
    lengthened: tuple[tuple[float, int], ...] = ()
    """Epochs and last step of each end after which the run was lengthened."""

    @classmethod
    def of(cls, saved: SavedState | None, epochs: float) -> "Ends":
        """Return the ends of a saved run that is to have this many epochs."""
        if saved is None:
            return cls()
        ended, before = (saved.state.scalars[key] for key in (ENDED_AFTER, "lengthened"))
        lengthened = tuple((epochs, step) for epochs, step in before)
        if ended is None or ended == epochs:
            return cls(ended, lengthened)
        return cls(None, (*lengthened, (ended, saved.state.step)))

    def notes(self, run: Run) -> Iterator[str]:
        """Yield a note for each time the run was lengthened; the last one gives the new learning rates."""
        steps = run.budget.steps
        for epochs, end in self.lengthened[:-1]:
            yield f"the run was lengthened after {counted(epochs, 'epoch')} ({counted(end, 'step')})"
        for epochs, end in self.lengthened[-1:]:
            first, last = (rate_of_step(step, run.recipe, steps=steps) for step in (end, steps - 1))
            longer = f"{counted(run.recipe.run.epochs, 'epoch')} ({steps:,} steps)"
            yield (
                f"the run of {counted(epochs, 'epoch')}, which ended after step {end:,}, is lengthened to "
                f"{longer}: the learning rate continues as that of a run of the new length "
                f"({run.recipe.optim.schedule}), from {first:.3g} to {last:.3g}"
            )


def rate_of_step(step: int, recipe: FinetuningRecipe, *, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of this many steps."""
    return learning_rate(step / steps, without_short_warmup(recipe.optim, steps=steps))
