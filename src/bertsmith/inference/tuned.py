"""What a folder of a fine-tuning run holds beside a model: how it is asked, and weights without a name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.tasks.task import TASK_FILE

if TYPE_CHECKING:
    from bertsmith.tasks.task_file import TaskNote

MIX_FILE = "mix.safetensors"
"""The weights on top of a frozen encoder, which no published class has a name for."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """How a fine-tuned model is asked."""

    note: "TaskNote"
    mix: dict[str, Tensor] = field(default_factory=dict)
    """What was learned on top of a frozen encoder (head.encoder = frozen-mix); otherwise empty."""

    @property
    def reads_raw(self) -> bool:
        """Whether its head passes the pooler by."""
        return self.note.head.cls == "raw"


def read_tuned(folder: Path) -> Tuned | None:
    """How the model of this folder is asked, or nothing where it was not fine-tuned here."""
    if not (folder / TASK_FILE).is_file():
        return None
    from bertsmith.tasks.task_file import read_task_note  # pydantic, which a plain model needs not wait for

    note = read_task_note(folder)
    return Tuned(note, _read_mix(folder / MIX_FILE) if note.head.encoder == "frozen-mix" else {})


def write_tuned(folder: Path, tuned: Tuned) -> None:
    """Put it into a model folder that is being written."""
    from bertsmith.tasks.task_file import write_task_note

    write_task_note(folder, tuned.note)
    if tuned.mix:
        try:
            save_file(tuned.mix, folder / MIX_FILE)
        except SafetensorError as error:  # how a full disk looks from here
            raise OSError(str(error)) from error


def tuned_files() -> tuple[str, ...]:
    """The names of the files that `write_tuned` may write."""
    return TASK_FILE, MIX_FILE


def _read_mix(file: Path) -> dict[str, Tensor]:
    remedy = "copy the whole folder again, or fine-tune again"
    if not file.is_file():
        raise UserError("is missing, and task.json speaks of it", where=str(file), remedy=remedy)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"cannot be read ({error})", where=str(file), remedy=remedy) from error
