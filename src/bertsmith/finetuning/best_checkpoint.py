"""The weights that did best on the development set, kept beside the state of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from bertsmith.core.files import atomic_path
from bertsmith.model.tensor_files import read_safetensors, write_safetensors
from bertsmith.training.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Best:
    """The weights that did best on the development set so far."""

    value: float
    loss: float
    step: int
    weights: dict[str, Tensor]
    waited: int = 0
    """So many evaluations since were not better."""

    def has_run_out(self, patience: int | Literal["off"]) -> bool:
        """Whether the run has waited long enough for better weights."""
        return patience != "off" and self.waited >= patience


def _best_file(folder: RunFolder, step: int) -> Path:
    return folder.path / f"best-{step}.safetensors"


def write_best(folder: RunFolder, best: Best) -> None:
    """Write the weights, unless they are there."""
    if not _best_file(folder, best.step).is_file():
        with atomic_path(_best_file(folder, best.step)) as temporary:
            write_safetensors(temporary, best.weights)


def read_best(folder: RunFolder, saved: dict[str, Any]) -> Best:
    """What a saved state says of the best weights, with the weights."""
    file = _best_file(folder, saved["step"])
    weights = read_safetensors(file, remedy="the saved state needs it: remove the run folder and start again")
    # Older versions saved no loss: as 0 it is never undercut, and the earlier of two equals stays.
    return Best(saved["value"], saved.get("loss", 0.0), saved["step"], weights, saved.get("waited", 0))


def remove_best_but(folder: RunFolder, step: int) -> None:
    """Remove the weights of all steps but one."""
    for file in folder.path.glob("best-*.safetensors"):
        if file != _best_file(folder, step):
            file.unlink()
