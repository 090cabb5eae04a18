"""How far a fine-tuning run is, kept on disk so that it can go on, to the bit, where it was interrupted."""

import time
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertsmith.finetuning.folder import TuningFolder
from bertsmith.finetuning.setup import Run
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_path
from bertsmith.training.checkpoint import TrainingState, latest_state, load_state, prune, save_state

SECONDS_BETWEEN_STATES = 300.0


@dataclass(frozen=True, slots=True)
class Best:
    """The weights that did best on the development set so far."""

    value: float
    step: int
    weights: dict[str, Tensor]


@dataclass
class Standing:
    """What changes from step to step beside the weights."""

    step: int = 0
    loss_sum: float = 0.0
    """Since the last line of metrics, as the count."""
    loss_count: float = 0.0
    best: Best | None = None
    """Only where the best weights are kept."""
    started: float = field(default_factory=time.monotonic)
    """On a clock that stood still between two starts."""
    saved: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time spent so far, in all starts."""
        return time.monotonic() - self.started

    @property
    def state_is_due(self) -> bool:
        """Whether so much was done since the last saved state that it should not be lost."""
        return time.monotonic() - self.saved >= SECONDS_BETWEEN_STATES


def take_up(run: Run, standing: Standing) -> None:
    """Put the newest saved state into the run, if there is one."""
    saved = latest_state(run.folder.checkpoints)
    if saved is None:
        return
    learner, state = run.learner, saved.state
    load_state(saved, learner.objective, optimizer=learner.optimizer, world=learner.world)
    standing.step = state.step
    standing.started -= state.seconds
    standing.loss_sum, standing.loss_count = state.scalars["loss"]
    if "best" in state.scalars:
        standing.best = _read_best(run.folder, state.scalars["best"])


def save(run: Run, standing: Standing) -> None:
    """Save the state of this step in place of the one before."""
    learner, folder, best = run.learner, run.folder, standing.best
    scalars: dict[str, Any] = {"loss": [standing.loss_sum, standing.loss_count]}
    if best is not None:
        _write_best(folder, best)
        scalars["best"] = {"value": best.value, "step": best.step}
    save_state(
        folder.checkpoints,
        TrainingState(standing.step, 0, standing.seconds, scalars),
        module=learner.objective,
        optimizer=learner.optimizer,
        world=learner.world,
    )
    prune(folder.checkpoints, keep_last=1)
    folder.forget_best_but(best.step if best is not None else 0)
    standing.saved = time.monotonic()


def remember_best(run: Run, standing: Standing, value: float) -> None:
    """Keep a copy of the weights if no earlier ones did as well."""
    if standing.best is None or value > standing.best.value:
        state = run.learner.objective.state_dict()
        weights = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        standing.best = Best(value, standing.step, weights)


def _write_best(folder: TuningFolder, best: Best) -> None:
    if not folder.best(best.step).is_file():
        with atomic_path(folder.best(best.step)) as temporary:
            try:
                save_file(best.weights, temporary)
            except SafetensorError as error:  # how a full disk looks from here
                raise OSError(str(error)) from error


def _read_best(folder: TuningFolder, facts: dict[str, Any]) -> Best:
    file = folder.best(facts["step"])
    try:
        return Best(facts["value"], facts["step"], load_file(file))
    except (SafetensorError, OSError) as error:
        what = "cannot be read, and the saved state needs it"
        raise UserError(what, where=str(file), remedy="remove the run folder and start again") from error
