"""The task config of a fine-tuned model folder, and its weights without published names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.model.folder.tensor_files import read_safetensors, write_safetensors

if TYPE_CHECKING:
    from bertsmith.tasks.task_config import TaskConfig

TASK_FILE = "task.json"
MIX_FILE = "mix.safetensors"
"""Weights of a BiLSTM over an encoder, which no published class has names for."""
FINETUNED_FILES = (TASK_FILE, MIX_FILE)
"""Files that `write_finetuned` may write."""


@dataclass(frozen=True, slots=True)
class FinetunedTask:
    """The task that a model was fine-tuned for, and its weights that are not part of the network."""

    config: "TaskConfig"
    mix: dict[str, Tensor] = field(default_factory=dict)
    """Weights of the BiLSTM over the encoder, if the head has one, else empty."""

    @property
    def skips_pooler(self) -> bool:
        """True if its head reads the last state and not the pooler's output."""
        return self.config.head.cls == "raw"

    def check_exportable(self, where: Path) -> None:
        """Raise an error if the formats of other tools cannot contain what it learned."""
        if self.mix:
            what = "has a BiLSTM over the encoder's layers, which published formats cannot contain"
            remedy = "fine-tune without it to export (head.reader = linear, head.encoder = tuned)"
            raise UserError(what, where=str(where), remedy=remedy)


def read_finetuned(folder: Path) -> FinetunedTask | None:
    """Read the task of the model in this folder; return None if bertsmith did not fine-tune it."""
    if not (folder / TASK_FILE).is_file():
        return None
    from bertsmith.tasks.task_config import read_task_config  # pydantic, which a plain model does not need

    config = read_task_config(folder / TASK_FILE)
    if not config.head.has_bilstm:
        return FinetunedTask(config)
    file, remedy = folder / MIX_FILE, "copy the whole folder again, or fine-tune again"
    if not file.is_file():
        raise UserError("is missing, but task.json requires it", where=str(file), remedy=remedy)
    return FinetunedTask(config, read_safetensors(file, remedy=remedy))


def write_finetuned(folder: Path, finetuned: FinetunedTask) -> None:
    """Write the task into an unfinished model folder."""
    from bertsmith.tasks.task_config import write_task_config

    write_task_config(folder / TASK_FILE, finetuned.config)
    if finetuned.mix:
        write_safetensors(folder / MIX_FILE, finetuned.mix)
