"""The weights with the best result on the development set, stored with the state of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path, sha256_of
from bertsmith.model.tensor_files import read_safetensors, write_safetensors
from bertsmith.training.run_folder import RunFolder

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class Best:
    """The weights with the best result on the development set so far."""

    value: float
    loss: float
    step: int
    weights: dict[str, Tensor]
    waited: int = 0
    """Number of evaluations since then that were not better."""

    def has_run_out(self, patience: int | Literal["off"]) -> bool:
        """True if as many evaluations as the patience allows were not better."""
        return patience != "off" and self.waited >= patience


def _best_file(folder: RunFolder, step: int) -> Path:
    return folder.path / f"best-{step}.safetensors"


def write_best(folder: RunFolder, best: Best) -> str:
    """Write the weights unless their file exists already; return the checksum of the file."""
    file = _best_file(folder, best.step)
    if not file.is_file():
        with atomic_path(file) as temporary:
            write_safetensors(temporary, best.weights)
    return sha256_of(file)


def read_best(folder: RunFolder, saved: dict[str, Any]) -> Best:
    """Read the best weights that a saved state names; raise if their file is missing or damaged."""
    file = _best_file(folder, saved["step"])
    remedy = "the saved state needs it: remove the run folder and start again"
    if file.is_file() and saved["sha256"] != sha256_of(file):
        raise UserError("is damaged: its checksum is another", where=str(file), remedy=remedy)
    weights = read_safetensors(file, remedy=remedy)
    return Best(saved["value"], saved["loss"], saved["step"], weights, saved["waited"])


def remove_best_but(folder: RunFolder, step: int) -> None:
    """Remove the best weights of all steps but this one."""
    for file in folder.path.glob("best-*.safetensors"):
        if file != _best_file(folder, step):
            file.unlink()
