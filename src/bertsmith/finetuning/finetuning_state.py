"""Run state of fine-tuning: saved with the weights, restored on resume, and adapted to more epochs."""

import shutil
from dataclasses import dataclass, field, replace
from typing import Any

from bertsmith.finetuning.assignment import ENDED_AFTER
from bertsmith.finetuning.best_checkpoint import NO_STEP, Best, read_best, remove_best_but, write_best
from bertsmith.finetuning.evaluation import Evaluation
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.training.checkpoint import TrainingState, latest_state, load_checkpoint, save_checkpoint
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import Progress


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Early end of a trial that did worse than the median of others."""

    evaluation: int
    """Number of the last evaluation, counted from 1."""
    best: float
    """Best value of the deciding metric until then."""
    median: float
    """Median of other trials, which is better."""


@dataclass
class RunState:
    """State other than the weights that changes from step to step; most of it is saved with them."""

    progress: Progress = field(default_factory=Progress)
    loss_sum: float = 0.0
    """Loss of this process since the last line of metrics; saved, so that resuming changes no line."""
    loss_count: float = 0.0
    """Divisor of the loss since the last line of metrics, for all processes."""
    best: Best | None = None
    """Best weights so far, in the main process and only if the run keeps them."""
    evaluated_step: int = -1
    """Step of the last evaluation on the development set; -1 if there was none."""
    ended_after: float | None = None
    """Epochs of the run once it has ended; None before."""
    early_end: EarlyEnd | None = None
    """Set with the last step of a trial that was not worth more time."""
    shown: dict[str, Any] = field(default_factory=dict)
    """Progress that this start reported last; not saved."""
    lengthened: tuple[tuple[float, int], ...] = ()
    """Epochs and last step of each end after which the run was lengthened."""

    def lengthened_to(self, epochs: float) -> "RunState":
        """Return the state for a run of this many epochs; a lengthened run gets its full patience again."""
        if self.ended_after is None or self.ended_after == epochs:
            return self
        best = None if self.best is None else replace(self.best, waited=0)
        ends = (*self.lengthened, (self.ended_after, self.progress.step))
        return replace(self, best=best, ended_after=None, lengthened=ends)


def restore(run: Run) -> RunState:
    """Load the last saved state into the trainer and return it; without one, return that of a new run."""
    main, saved = run.world.main, latest_state(run.folder.checkpoints, run.world)
    if saved is None:
        return RunState()
    load_checkpoint(saved, run.trainer)
    scalars = saved.state.scalars
    best = run.world.on_main(lambda: read_best(run.folder, scalars["best"]) if "best" in scalars else None)
    loss_sum, loss_count = scalars["loss"]
    state = RunState(
        saved.state.progress,
        loss_sum if main else 0.0,  # the saved sum is over all processes
        loss_count,
        best,
        scalars["evaluated_step"],
        scalars.get(ENDED_AFTER),
        lengthened=tuple((epochs, step) for epochs, step in scalars.get("lengthened", ())),
    )
    return state.lengthened_to(run.recipe.run.epochs)


def save(run: Run, state: RunState, *, seconds: float) -> None:
    """Save the state of this step and remove the previous one."""
    folder, world, best, progress = run.folder, run.world, state.best, state.progress
    scalars: dict[str, Any] = {
        "loss": [*world.sum([state.loss_sum]), state.loss_count],
        "evaluated_step": state.evaluated_step,
        ENDED_AFTER: state.ended_after,
        "lengthened": state.lengthened,
    }
    checksum = world.on_main(lambda: write_best(folder, best) if best is not None else None)
    if best is not None:
        scalars["best"] = {
            "value": best.value,
            "loss": best.loss,
            "step": best.step,
            "waited": best.waited,
            "sha256": checksum,
        }
    saved = TrainingState.at(replace(progress, seconds=seconds), scalars)
    save_checkpoint(folder.checkpoints, saved, run.trainer, keep_last=1)
    world.on_main(lambda: remove_best_but(folder, best.step if best is not None else NO_STEP))


def remember_best(run: Run, state: RunState, found: Evaluation) -> None:
    """Copy the weights if they are better than all earlier ones, or as good with a smaller loss."""
    metric, best = run.model.config.deciding_metric, state.best
    value = found.deciding[metric.name]
    is_better = best is None or metric.is_better(value, than=best.value)
    if best is not None and not is_better and not (value == best.value and found.loss < best.loss):
        # Tuning starts below the probe of step 0: waiting counts only from a best result of tuning itself.
        state.best = replace(best, waited=best.waited + 1 if best.step else 0)
    else:
        tensors = run.model.objective.state_dict()
        weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        state.best = Best(value, found.loss, state.progress.step, weights)


def remove_states(folder: RunFolder) -> None:
    """Remove the resumable states and best weights of a finished run."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    remove_best_but(folder, NO_STEP)
