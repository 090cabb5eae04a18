"""Fine-tuning in two processes, started as torchrun starts them, is fine-tuning in one."""

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.finetuning.finetune import LOGGED_LINES
from bertsmith.studies.sweep import over_seeds, run_trials
from bertsmith.tasks.objective import NetworkScorer
from tests.tiny_runs import differing, metrics_of, without_pictures
from tests.toy_folder import write_toy_folder
from tests.tuning import Notebook, stop_at, toy_assignment, tune, weights_of
from tests.worlds import as_torchrun, meeting, run_processes

EXACT = 1e-5
SETTINGS = ("optim.peak_lr=1e-4", "run.epochs=1", "run.evaluations=3", "run.keep=best", "run.keep_state=true")
# The last of four steps has one example: the second process has none.
TASKS = {
    "sst2": ("run.examples=53",),
    "wnut17": ("run.examples=31",),
    "rte": ("run.examples=53", "head.encoder=lora"),
}
ODD = ("run.examples=31", "run.epochs=0.9")


@dataclass(frozen=True)
class Start:
    """One start of a run in both processes."""

    place: Path
    task: str
    settings: tuple[str, ...]
    port: int
    model: Path
    stops: int = -1
    """The step during which the second process, and only that one, is asked to stop."""
    logged_lines: int = LOGGED_LINES


@dataclass(frozen=True)
class Answer:
    """What a process says of a start."""

    finished: bool
    steps: int
    main: bool
    notes: int


def take_part(rank: int, starts: list[Start], cache: Path) -> list[Answer]:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    with without_pictures():
        return [_started(rank, start) for start in starts]


def _started(rank: int, start: Start) -> Answer:
    as_torchrun(rank, start.port)
    notebook = Notebook()
    with stop_at(start.stops if rank == 1 else -1), pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertsmith.finetuning.finetune.LOGGED_LINES", start.logged_lines)
        result = tune(start.task, start.model, start.place, *start.settings, notebook=notebook)
    return Answer(result.finished, result.steps, result.main_process, len(notebook.notes))


@dataclass(frozen=True)
class Runs:
    """Where the runs are, and what both processes said of each start."""

    place: Path
    answers: list[list[Answer]]

    def folder(self, place: str, task: str = "sst2") -> Path:
        return self.place / place / "runs" / task


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("worlds")
    write_toy_folder(place / "dropping")
    write_toy_folder(place / "toy")  # without dropout, which differs from process to process
    config = read_json(place / "toy" / "config.json", remedy="")
    none = {key: 0.0 for key in config if "dropout" in key}
    write_json(place / "toy" / "config.json", config | none)
    with without_pictures(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        for task, settings in TASKS.items():
            tune(task, place / "toy", place / "alone", *SETTINGS, *settings)
        with stop_at(1):
            tune("sst2", place / "toy", place / "from-1-to-2", *SETTINGS, *TASKS["sst2"])
        toy = {"port": 0, "model": place / "toy"}
        starts = [
            *(Start(place / "two", task, (*SETTINGS, *settings), **toy) for task, settings in TASKS.items()),
            Start(place / "from-1-to-2", "sst2", (*SETTINGS, *TASKS["sst2"]), **toy),
            Start(place / "from-2-to-1", "sst2", (*SETTINGS, *TASKS["sst2"]), stops=1, **toy),
        ]
        # One line of metrics for all steps: a resume has the losses of both processes before it to add to.
        dropping = {"port": 0, "model": place / "dropping", "logged_lines": 1}
        starts += [
            Start(place / "straight", "sst2", (*SETTINGS, *ODD), **dropping),
            Start(place / "parts", "sst2", (*SETTINGS, *ODD), stops=1, **dropping),
            Start(place / "parts", "sst2", (*SETTINGS, *ODD), **dropping),
        ]
        starts = [Start(**{**vars(start), "port": meeting()}) for start in starts]
        for start in starts:
            toy_assignment(start.task, start.model, start.place)  # writes the data, before both look for them
        answers = run_processes(2, take_part, starts, place / "cache")
        tune("sst2", place / "toy", place / "from-2-to-1", *SETTINGS, *TASKS["sst2"])
    return Runs(place, answers)


def assert_same_learning(ours: Path, theirs: Path) -> None:
    """The same losses, norms and scores at every step but for rounding, and the same weights."""
    assert len(metrics_of(ours)) == len(metrics_of(theirs)) > 3
    for one, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        assert one == pytest.approx(other, abs=EXACT), one["step"]
    found, expected = weights_of(ours), weights_of(theirs)
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) <= 1e-4


@pytest.mark.parametrize("task", TASKS)
def test_two_processes_learn_what_one_does(runs, task):
    assert_same_learning(runs.folder("two", task), runs.folder("alone", task))


@pytest.mark.parametrize("place", ["from-1-to-2", "from-2-to-1"])
def test_a_run_resumes_in_another_number_of_processes(runs, place):
    assert_same_learning(runs.folder(place), runs.folder("alone"))


def test_two_processes_resume_to_the_bit_with_dropout(runs):
    straight, parts = runs.folder("straight"), runs.folder("parts")
    assert differing(weights_of(parts), weights_of(straight)) == []
    assert metrics_of(parts) == metrics_of(straight)


def test_a_wish_to_stop_that_one_process_hears_stops_both_and_the_main_one_alone_speaks(runs):
    first, second = runs.answers
    stopped = [len(TASKS) + 1, len(TASKS) + 3]
    for answers in (first, second):
        assert [index for index, answer in enumerate(answers) if not answer.finished] == stopped
        assert {answers[index].steps for index in stopped} == {2}
    assert all(answer.main and answer.notes for answer in first)
    assert not any(answer.main or answer.notes for answer in second)


def refused(rank: int, model: Path, place: Path, port: int) -> str | int:
    """What a process is told, or with which code it ends without a word."""
    as_torchrun(rank, port)
    try:
        run_trials(over_seeds(toy_assignment("sst2", model, place), 2), Notebook())
    except UserError as error:
        return error.line()
    except SystemExit as ending:
        return int(ending.code or 0)
    return "it ran"


def test_a_study_in_two_processes_is_refused_in_one_line(runs, tmp_path):
    toy_assignment("sst2", runs.place / "toy", tmp_path)  # writes the data
    line, code = run_processes(2, refused, runs.place / "toy", tmp_path, meeting())
    assert "the runs of a study have one process each, and 2 were started; start it without torchrun" in line
    assert code == 2
    assert not (tmp_path / "runs").exists()


class Broken(Exception):
    pass


def break_evaluations(module: nn.Module, _: object) -> None:
    if isinstance(module, NetworkScorer) and not torch.is_grad_enabled():
        raise Broken


def fail(rank: int, model: Path, place: Path, port: int) -> tuple[str, int]:
    """With what a run ends whose main process fails amid the steps, and how many networks gloo still held."""
    as_torchrun(rank, port)
    nn.modules.module.register_module_forward_pre_hook(break_evaluations)
    alive, disconnect = [], distributed.destroy_process_group

    def look_and_disconnect() -> None:
        alive.append(sum(type(each) is DistributedDataParallel for each in gc.get_objects()))
        disconnect()

    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setattr(distributed, "destroy_process_group", look_and_disconnect)
        try:
            tune("sst2", model, place, "run.epochs=0.5", "run.evaluations=2")
        except (Broken, SystemExit) as error:
            # Where a bug stands is still said, though the functions on the way are let go of.
            told = any("in break_evaluations" in note for note in getattr(error, "__notes__", ()))
            return f"{type(error).__name__}{' with its place' if told else ''}", alive[0]
    return "it ran", alive[0]


def test_what_fails_in_the_main_process_ends_both_and_leaves_no_network_that_waits_for_ever(
    runs, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toy_assignment("sst2", runs.place / "toy", tmp_path)
    endings = run_processes(2, fail, runs.place / "toy", tmp_path, meeting())
    # What is freed after the processes have disconnected waits for a lock that nobody gives, one time in ten.
    assert endings == [("Broken with its place", 0), ("MainProcessFailed", 0)]
