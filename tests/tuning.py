"""Fine-tuning runs on toy tasks, small enough for a test."""

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningResult, finetune
from bertsmith.finetuning.finetuning_setup import Run, set_up
from bertsmith.finetuning.splits import read_splits
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.objective import TaskObjective
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.distributed import start_world
from tests.tiny_runs import BeforeSteps, ask_to_stop, without_pictures
from tests.toy_folder import write_toy_folder
from tests.toy_tasks import TOYS

QUICK = (
    *("optim.peak_lr=2e-3", "run.epochs=5", "run.examples=16", "run.evaluations=1"),
    *("text.longest=64", "text.step=32", "text.longest_question=16", "run.keep_state=false"),
)
SHORT = ("run.epochs=0.5",)
"""Five steps: enough to see what happens, not to learn anything."""


class Notebook:
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.lines: list[dict[str, Any]] = []

    def on_message(self, text: str) -> None:
        self.notes.append(text)

    def on_signal(self, text: str) -> None:
        self.notes.append(text)

    def on_progress(self, progress: float) -> None:
        pass

    def on_deadline(self, seconds: float, total: float) -> None:
        pass

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        self.lines.append({"progress": progress, **values})


def toy_assignment(name: str, model: Path, place: Path, *settings: str) -> Assignment:
    """A quick run of a toy task, its files made beside it."""
    task: Task = task_named(name)
    recipe = finetuning_recipe(task, [*QUICK, *settings])
    data = place / "data" / name
    if not data.exists():
        TOYS[name](data)
    return Assignment(task, recipe, model, data, place / "runs" / name)


def tune(
    name: str, model: Path, place: Path, *settings: str, notebook: Notebook | None = None
) -> FinetuningResult:
    """Run it."""
    return finetune(toy_assignment(name, model, place, *settings), notebook or Notebook())


def set_up_run(assignment: Assignment) -> Run:
    """The run of an assignment, before its first step."""
    splits = read_splits(assignment.task, assignment.data, skip_bad=False)
    return set_up(assignment, splits, start_world(assignment.recipe.run.device))


def stop_at(step: int) -> BeforeSteps:
    """While it is open, a run that starts in this process is asked to stop during this step of its start."""

    def act(_: TaskObjective, seen: int) -> None:
        if seen == step:
            ask_to_stop()

    return BeforeSteps(act, objective=TaskObjective)


def weights_of(run: Path) -> dict[str, Tensor]:
    """The weights of a finished run's model folder, or of its adapter folder."""
    (file,) = (run / "model").glob("*model.safetensors")
    return load_file(file)


@pytest.fixture(scope="session", name="model")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder to begin with; not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "toy"
    write_toy_folder(folder)
    return folder


@pytest.fixture(scope="session", name="lesson")
def shared_lesson(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[..., Path]:
    """Gives the run of a toy lesson, learned once for all workers of the tests; not to be changed."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "lessons"
    place.mkdir(exist_ok=True)

    def learned(name: str, *settings: str) -> Path:
        with (place / "lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            if not (place / "toy").exists():
                write_toy_folder(place / "toy")
            return tune(name, place / "toy", place, *settings).folder  # a finished one is only looked up

    return learned


@pytest.fixture(scope="module", autouse=True)
def quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where it is imported: no pictures unless asked for, and encodings kept away from the user's own."""
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
