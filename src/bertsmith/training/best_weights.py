"""The weights with the best result of a run's evaluations, stored next to its saved states."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path, sha256_of
from bertsmith.core.measures import Metric
from bertsmith.model.folder.tensor_files import read_safetensors, write_safetensors
from bertsmith.training.checkpoint import SavedState
from bertsmith.training.distributed import World


@dataclass(frozen=True, slots=True)
class Best:
    """The weights with the best result so far."""

    value: float
    loss: float
    step: int
    weights: dict[str, Tensor]
    waited: int = 0
    """Number of evaluations since then that were not better."""


@dataclass
class BestWeights:
    """Keeps the best weights of a module: the best value, or an equal value with a smaller loss."""

    folder: Path
    module: nn.Module
    metric: Metric
    world: World
    best: Best | None = None
    """Best weights so far, in the main process."""
    named: Path | None = None
    """File of the weights that the newest state names."""

    def offer(self, value: float, loss: float, *, step: int) -> None:
        """Copy the current weights, evaluated in the main process, if they are better than all before."""
        best = self.best
        is_better = best is None or self.metric.is_better(value, than=best.value)
        if best is not None and not is_better and not (value == best.value and loss < best.loss):
            # Tuning starts below the probe of step 0: waiting counts only from a result of tuning itself.
            self.best = replace(best, waited=best.waited + 1 if best.step else 0)
            return
        tensors = self.module.state_dict()
        weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self.best = Best(value, loss, step, weights)

    def has_run_out(self, patience: int | Literal["off"]) -> bool:
        """True, in every process, if as many evaluations as the patience allows were not better."""
        waited = 0 if self.best is None else self.best.waited
        return self.world.broadcast(float(patience != "off" and waited >= patience)) > 0

    def wait_anew(self) -> None:
        """Forget how many evaluations were not better."""
        self.best = None if self.best is None else replace(self.best, waited=0)

    def scalars(self) -> dict[str, Any]:
        """Write the weights, unless their file exists, and return the values that a resume needs."""
        best = self.best
        checksum = self.world.on_main(lambda: None if best is None else self._write(best))
        self.named = None if best is None else self._file(best.step)
        if best is None:
            return {}
        values = {"value": best.value, "loss": best.loss, "step": best.step, "waited": best.waited}
        return {"best": {**values, "sha256": checksum}}

    def restore(self, saved: SavedState) -> None:
        """Read the weights that a saved state names; raise if their file is missing or damaged."""
        values = saved.state.scalars.get("best")
        self.best = self.world.on_main(lambda: None if values is None else self._read(values))

    def saved(self) -> None:
        """Remove the files of weights that were best before the newest state."""
        # The best may be a newer one by now: steps go on while a state is written.
        self.world.on_main(lambda: remove_best_weights(self.folder, but=self.named))

    def _file(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"

    def _write(self, best: Best) -> str:
        file = self._file(best.step)
        if not file.is_file():
            with atomic_path(file) as temporary:
                write_safetensors(temporary, best.weights)
        return sha256_of(file)

    def _read(self, values: dict[str, Any]) -> Best:
        file = self._file(values["step"])
        remedy = "the saved state needs it: remove the run folder and start again"
        if file.is_file() and values["sha256"] != sha256_of(file):
            raise UserError("is damaged: its checksum differs", where=str(file), remedy=remedy)
        weights = read_safetensors(file, remedy=remedy)
        return Best(values["value"], values["loss"], values["step"], weights, values["waited"])


def remove_best_weights(folder: Path, *, but: Path | None = None) -> None:
    """Remove all files of best weights in a run folder but one."""
    for file in folder.glob("best-*.safetensors"):
        if file != but:
            file.unlink()
