"""Cells in processes of their own: order, neighbours, failures, kills."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.core.files import locked
from bertsmith.studies.cells import LOCK, LOG, RUN, Cells, Data, Failure, Stage, distinct
from bertsmith.studies.scheduler import STOPPED, CellProcess, Places, Scheduler, Stopped
from tests.unit.studies.toy_stage import MODEL, STEPS, Heard, stage
from tests.unit.studies.toy_study import run_toy_study

ROOT = Path(__file__).parents[3]
KILLS = 3


def made(
    place: Path, *stages: Stage, keeps_models: bool = False, **places: object
) -> tuple[Scheduler, Heard]:
    heard = Heard()
    cells, wanted = Cells(place), distinct(stages)
    scheduler = Scheduler(cells, Places(**places), wanted, heard, lambda _: None, keeps_models)
    scheduler.run()
    return scheduler, heard


def contents(place: Path) -> dict[str, bytes]:
    """All files of cells, but for locks, logs and steps that were taken again after a kill."""
    left_out = (LOCK, LOG, STEPS)
    files = (each for each in (place / "cells").rglob("*") if each.is_file() and each.name not in left_out)
    return {str(each.relative_to(place)): each.read_bytes() for each in files}


def test_inputs_come_first_then_the_longest_and_each_has_its_own_settings(tmp_path):
    first, longest, short = stage(steps=1), stage(steps=9, seed=1), stage(steps=2, seed=2)
    second = stage(steps=12, before=first)
    scheduler, heard = made(tmp_path, short, second, longest, devices=("3",), threads=2)
    begun = [text.partition(" ")[0] for text in heard.messages if text.endswith("begins")]
    assert begun == [each.name for each in (first, second, longest, short)]
    settings = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3", "BERTSMITH_MEMORY_SHARE": "1.0"}
    assert [dict(each.result.made_with) for each in scheduler.outcomes.values()] == [settings] * 4
    assert heard.most_at_once() == 1


def test_failures_end_neither_the_study_nor_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.studies.scheduler.MAX_ENDS", 2)
    kinds = ("diverges", "bad", "busy", "name", "device", "crashes", "is killed", "is always killed")
    stages = {kind: stage(end=kind) for kind in kinds}
    stages["behind"] = stage(before=stages["diverges"])
    scheduler, heard = made(tmp_path, *stages.values(), together=3)
    failures = {kind: scheduler.outcomes[each.key].failure for kind, each in stages.items()}
    assert {kind: each and each.repeats for kind, each in failures.items()} == {
        **{"diverges": True, "bad": True, "behind": True},
        **{"busy": False, "name": False, "device": False, "crashes": False},
        **{"is killed": None, "is always killed": False},
    }
    assert scheduler.outcomes[stages["is killed"].key].result is not None
    assert failures["is always killed"].reason == "its process was ended 2 times by a signal"
    assert failures["crashes"].reason == "its process failed: ValueError: stumbled"
    assert failures["behind"].reason == "the walk left the world; take a smaller factor"
    # Only what does not repeat is tried again.
    _, heard = made(tmp_path, stages["diverges"], stages["bad"], stages["busy"], stages["is killed"])
    assert [text for text in heard.messages if text.endswith("begins")] == [f"{stages['busy'].name} begins"]


def test_models_leave_the_disk_when_no_stage_needs_them_and_are_made_again_for_one_that_does(tmp_path):
    first, cells = stage(), Cells(tmp_path)
    second, busy = stage(before=first, seed=1), stage(before=first, end="busy")
    outcomes = made(tmp_path, second, busy)[0].outcomes
    # What failed may be tried again, and needs its input.
    assert [cells.lacks_model(each) for each in (first, second)] == [False, True]
    assert not (cells.folder(second) / MODEL).exists()
    made(tmp_path, second)
    assert cells.lacks_model(first) and cells.outcome(first).result == outcomes[first.key].result
    third = stage(before=first, seed=2)
    scheduler, heard = made(tmp_path, third, keeps_models=True)
    begun = [text for text in heard.messages if text.endswith("begins")]
    assert begun == [f"{each.name} begins" for each in (first, third)]
    assert scheduler.outcomes[first.key].result == outcomes[first.key].result
    # Models that another call has kept are not removed, neither by the same study nor by another one.
    fourth = stage(before=first, seed=3)
    made(tmp_path, third)
    made(tmp_path, third, fourth)
    assert [cells.lacks_model(each) for each in (first, third, fourth)] == [False, False, True]


def test_what_does_not_fit_beside_others_is_tried_once_more_alone(tmp_path):
    tight, others = stage(end="tight", steps=9), [stage(seed=number, seconds=0.02) for number in (1, 2)]
    scheduler, heard = made(tmp_path, tight, *others, together=2)
    assert scheduler.outcomes[tight.key].result is not None
    at = max(place for place, text in enumerate(heard.messages) if text == f"{tight.name} begins")
    ended = [text for text in heard.messages[:at] if "is done" in text]
    begun = [text for text in heard.messages[:at] if "begins" in text and tight.name not in text]
    assert len(ended) == len(begun)  # nothing ran beside it
    assert heard.messages[at + 1].startswith(f"{tight.name} is done")
    alone = stage(end="tight", seed=5)
    failure = made(tmp_path, alone)[0].outcomes[alone.key].failure
    assert failure is not None and not failure.repeats  # another GPU may have more memory


def test_a_cell_that_does_not_fit_into_its_share_then_has_all_of_the_memory(tmp_path):
    wide = stage(end="wide")
    result = made(tmp_path, wide, devices=("0",), together=2)[0].outcomes[wide.key].result
    assert result is not None and result.made_with["BERTSMITH_MEMORY_SHARE"] == "1.0"


class EndsItsReader:
    """A path at which the process that reads it ends."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_process_that_ends_before_its_log_is_opened_is_a_failure_without_older_lines(tmp_path):
    cell = replace(stage(), data=Data(EndsItsReader(), {"text": "0"}))
    for _ in range(2):
        failure = made(tmp_path, cell)[0].outcomes[cell.key].failure
        assert failure is not None and failure.reason == "its process failed: it did not print anything"
        (Cells(tmp_path).folder(cell) / LOG).write_text("ValueError: of an earlier start\n")


def test_a_failure_that_repeats_is_taken_over_from_another_study(tmp_path):
    cell, known = stage(), Cells(tmp_path)
    scheduler = Scheduler(known, Places(), distinct([cell]), Heard(), lambda _: None)
    with locked(known.folder(cell) / LOCK):
        scheduler._begin(cell, "")
        known.end(cell, Failure("diverged there", cell.name, repeats=True))
    while scheduler.running:
        scheduler._wait()
    assert scheduler.outcomes[cell.key].failure == Failure("diverged there", cell.name, repeats=True)


def test_the_first_cell_of_a_shape_tells_how_many_fit_on_a_gpu(tmp_path):
    cells = [stage(seed=number, peak=40, seconds=0.02) for number in range(4)]
    scheduler, heard = made(tmp_path, *cells, devices=("0",), together=4)
    order = [text.partition(" ")[2][:7] for text in heard.messages]
    assert order[:4] == ["begins", "is done", "begins", "begins"]
    assert heard.most_at_once() == 2  # 1.2 x 40 of 100 bytes each


def test_a_lock_that_an_orphan_holds_is_waited_for(tmp_path):
    cell, heard = stage(), Heard()
    scheduler = Scheduler(Cells(tmp_path), Places(), distinct([cell]), heard, lambda _: None)
    with locked(Cells(tmp_path).folder(cell) / LOCK):
        scheduler._begin(cell, "")
        for _ in range(3):  # its process has started and does not end
            scheduler._wait()
        assert scheduler.state_of(cell) == "running"
    while scheduler.running:
        scheduler._wait()
    assert scheduler.state_of(cell) == "done"


def steps_of(cell: Path) -> list[int]:
    """The steps that a cell took, in order."""
    return list(map(int, (cell / RUN / STEPS).read_text().split()))


def study_process(place: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", "from tests.unit.studies.toy_study import main; main()", str(place)]
    path = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    return subprocess.Popen(words, env=os.environ | path, cwd=ROOT, start_new_session=True)


def begun_cells(place: Path) -> int:
    return len(list(place.glob("cells/*/run/state.json")))


def test_a_study_killed_at_any_moment_ends_with_the_cells_of_one_that_was_not(tmp_path):
    run_toy_study(tmp_path / "one")
    chance, other = random.Random(3), tmp_path / "other"
    for kill in range(KILLS):
        process, known = study_process(other), begun_cells(other)
        while process.poll() is None and begun_cells(other) <= known:  # until something new is under way
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        if kill % 2:
            process.kill()  # alone: its cells save and end themselves
        elif kill:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait() in (-signal.SIGKILL, 130, 0)
    run_toy_study(other)
    assert contents(other) == contents(tmp_path / "one")
    taken = [steps_of(each.parent) for each in other.glob("cells/*/run")]
    assert sorted(len(set(steps)) for steps in taken) == [2, 8, 8, 8, 8]
    # Only the kill of all processes can have come between a step and its state, once for each of two cells.
    assert sum(len(steps) - len(set(steps)) for steps in taken) <= 2
    # A second call begins nothing.
    written = {each: each.stat().st_mtime_ns for each in (other / "cells").rglob("*")}
    assert run_toy_study(other).messages == []
    assert written == {each: each.stat().st_mtime_ns for each in (other / "cells").rglob("*")}


def test_a_wish_to_stop_lets_all_cells_save(tmp_path):
    cells = [stage(seed=number, seconds=0.05, steps=100) for number in (0, 1)]
    heard, asked = Heard(), dict[str, CellProcess]()

    def stop(scheduler: Scheduler) -> None:
        if len(scheduler.running) == 2 and all(each.fraction for each in scheduler.running.values()):
            asked.update(scheduler.running)
            os.kill(os.getpid(), signal.SIGTERM)

    scheduler = Scheduler(Cells(tmp_path), Places(together=2), distinct(cells), heard, stop)
    with pytest.raises(Stopped):
        scheduler.run()
    assert [scheduler.state_of(each) for each in cells] == ["waiting", "waiting"]
    assert scheduler.running == {}
    assert [each.process.exitcode for each in asked.values()] == [STOPPED, STOPPED]
    # They go on where they stopped, and take no step twice.
    made(tmp_path, *(stage(seed=number, steps=100) for number in (0, 1)), together=2)
    for each in cells:
        assert steps_of(Cells(tmp_path).folder(each)) == list(range(100))
