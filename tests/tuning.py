"""Fine-tuning runs on toy tasks, small enough for a test."""

from pathlib import Path
from typing import Any

from bertsmith.finetuning.folder import Assignment
from bertsmith.finetuning.job import FinetuningResult, finetune
from bertsmith.finetuning.recipes import finetuning_recipe
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task import Task
from tests.toy_tasks import TOYS

QUICK = (
    *("optim.peak_lr=2e-3", "run.epochs=5", "run.examples=16", "run.evaluations=1"),
    *("text.longest=64", "text.step=32", "text.longest_question=16"),
)


class Notebook:
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.lines: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def alert(self, text: str) -> None:
        self.notes.append(text)

    def step(self, progress: float, values: dict[str, Any]) -> None:
        self.lines.append({"progress": progress, **values})


def toy_assignment(name: str, model: Path, place: Path, *settings: str) -> Assignment:
    """A quick run of a toy task, its files made beside it."""
    task: Task = task_named(name)
    recipe = finetuning_recipe(task, [*QUICK, *settings])
    data = place / "data" / name
    if not data.exists():
        TOYS[name](data)
    return Assignment(task, recipe, model, data, place / "runs" / name)


def tune(name: str, model: Path, place: Path, *settings: str) -> FinetuningResult:
    """Run it."""
    return finetune(toy_assignment(name, model, place, *settings), Notebook())
