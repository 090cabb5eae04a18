"""Workers on several processes: results in order, mistakes that come through, and nobody left behind."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import closing

import pytest

from bertsmith.core.errors import UserError
from bertsmith.core.processes import Job, results_of_processes
from tests.scripts import started
from tests.worker_jobs import double_slowly, fail_at_seven, read_process


def die_at_three(number: int, _: str) -> int:
    if number == 3:
        os._exit(9)
    return number


def break_at_three(number: int, _: str) -> float:
    return 1 / (number - 3)


def answer_at_length(number: int, _: str) -> bytes:
    return bytes(50_000_000) if number == 3 else b""


def work_for_ever(_: int, __: str) -> None:
    print("begun", flush=True)
    time.sleep(3600)


class Deadly:
    """Materials that end the process to which they come."""

    def __reduce__(self) -> tuple:
        return os._exit, (9,)


class StopsWhatStartsAWorker:
    """Materials that interrupt the process they come from while they are still on their way to a worker."""

    def __init__(self) -> None:
        self.stop = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))

    def __getstate__(self) -> dict[str, bytes]:
        if self.stop.ident is None:
            self.stop.start()
        return {"load": bytes(20_000_000)}  # more than a pipe holds: it waits for the worker to begin

    def upper(self) -> str:
        return "HAMMER"


def results_of(work, items: Iterable[int] = range(20), *, materials="hammer") -> Generator:
    return results_of_processes(items, Job(make_tools, materials, work), workers=2, at_once=4)


def make_tools(materials) -> str:
    return materials.upper()


def test_results_come_in_the_order_of_the_items() -> None:
    assert list(results_of(double_slowly)) == [(2 * number, "HAMMER") for number in range(20)]


def test_only_so_many_items_are_begun_ahead() -> None:
    taken = []
    items = (taken.append(number) or number for number in range(100))
    with closing(results_of(double_slowly, items)) as results:
        for done in range(1, 20):
            next(results)
            assert len(taken) == done + 3


def test_a_mistake_of_the_user_comes_through_whole() -> None:
    with pytest.raises(UserError) as caught:
        list(results_of(fail_at_seven))
    assert (caught.value.where, caught.value.remedy) == ("item 7", "mend it")


def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(UserError, match="a worker process died; use fewer `workers` if memory ran out"):
        list(results_of(die_at_three))


def test_a_worker_that_dies_over_its_materials_is_reported() -> None:
    more_than_a_pipe_holds = bytes(20_000_000)
    with pytest.raises(UserError, match="a worker process died"):
        list(results_of(double_slowly, materials=[Deadly(), more_than_a_pipe_holds]))


def test_a_fault_in_a_worker_is_reported_with_where_it_is(capfd) -> None:
    with pytest.raises(UserError, match="a worker process failed; see its own message above"):
        list(results_of(break_at_three))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_worker_that_is_killed_in_the_middle_of_its_result_is_reported_too() -> None:
    with (
        pytest.raises(UserError, match="a worker process died"),
        closing(results_of(answer_at_length)) as results,
    ):
        for _ in range(3):
            next(results)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        list(results)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_it_to_their_parent_to_stop(number: int) -> None:
    with closing(results_of(double_slowly)) as results:
        first = next(results)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, number)
        rest = list(results)
    assert [first, *rest] == [(2 * number, "HAMMER") for number in range(20)]


def test_workers_go_home_when_the_results_are_closed() -> None:
    with closing(results_of(read_process, range(100))) as results:
        process = next(results)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_interrupt_in_the_middle_of_a_start_leaves_no_worker_and_no_word_of_one(capfd) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(results_of(double_slowly, itertools.count(), materials=StopsWhatStartsAWorker()))
    assert multiprocessing.active_children() == []
    assert capfd.readouterr().err == ""


FOR_EVER = """
from tests.unit.core.test_processes import results_of, work_for_ever
if __name__ == "__main__":
    list(results_of(work_for_ever))
"""


def test_workers_leave_with_a_parent_that_is_killed(tmp_path) -> None:
    running = started(tmp_path, FOR_EVER)
    assert running.stdout
    assert running.stdout.readline() == b"begun\n"
    running.kill()
    running.communicate(timeout=30)  # the pipe ends with the last process that could write into it


FORGOTTEN = """
from bertsmith.core.processes import Job, results_of_processes

def keep(materials):
    return materials

def double(number, _):
    return 2 * number

if __name__ == "__main__":
    results = results_of_processes(range(1000), Job(keep, None, double), workers=2, at_once=4)
    print(next(results), flush=True)
    raise SystemExit(3)
"""


def test_a_program_that_forgets_its_workers_ends_all_the_same(tmp_path) -> None:
    running = started(tmp_path, FORGOTTEN)
    printed, _ = running.communicate(timeout=60)
    assert (running.returncode, printed) == (3, b"0\n")
