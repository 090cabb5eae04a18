"""Crews: results in the order of the items, few items under way, and mistakes that come through."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from bertsmith.corpus.workers import Crew, Job, results_in_order
from bertsmith.ground.errors import UserError


def double_slowly(number: int, tools: str) -> tuple[int, str]:
    time.sleep(0.02 * (number % 3 == 0))
    return 2 * number, tools


def fail_at_seven(number: int, _: str) -> int:
    if number == 7:
        raise UserError("is no good", where=f"item {number}", remedy="mend it")
    return number


def die_at_three(number: int, _: str) -> int:
    if number == 3:
        os._exit(9)
    return number


def break_at_three(number: int, _: str) -> float:
    return 1 / (number - 3)


def answer_at_length(number: int, _: str) -> bytes:
    return bytes(50_000_000) if number == 3 else b""


def read_process(_: int, __: str) -> int:
    return os.getpid()


def job(work) -> Job:
    return Job(str.upper, "hammer", work)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    results = list(results_in_order(range(20), job(double_slowly), Crew(workers)))
    assert results == [(2 * number, "HAMMER") for number in range(20)]


def test_only_so_many_items_are_under_way() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    crew = Crew(2)
    with closing(results_in_order(items(), job(double_slowly), crew)) as results:
        for done, _ in enumerate(results):
            assert taken <= done + crew.items_at_once
            if done == 20:
                break


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_of_the_user_comes_through_whole(workers: int) -> None:
    with (
        pytest.raises(UserError) as caught,
        closing(results_in_order(range(20), job(fail_at_seven), Crew(workers))) as results,
    ):
        list(results)
    assert (caught.value.where, caught.value.remedy) == ("item 7", "mend it")


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(UserError, match="a worker process died; use fewer --workers"):
        list(results_in_order(range(20), job(die_at_three), Crew(2)))


def test_a_fault_in_a_worker_is_told_with_where_it_is(capfd) -> None:
    with pytest.raises(UserError, match="a worker process failed; its own message stands above"):
        list(results_in_order(range(20), job(break_at_three), Crew(2)))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_worker_that_is_killed_in_the_middle_of_its_result_is_told_too() -> None:
    with (
        pytest.raises(UserError, match="a worker process died"),
        closing(results_in_order(range(20), job(answer_at_length), Crew(2))) as results,
    ):
        for _ in range(3):
            next(results)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        list(results)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_it_to_their_parent_to_stop(number: int) -> None:
    with closing(results_in_order(range(20), job(double_slowly), Crew(2))) as results:
        first = next(results)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, number)
        rest = list(results)
    assert [first, *rest] == [(2 * number, "HAMMER") for number in range(20)]


def test_one_worker_is_this_very_process() -> None:
    assert list(results_in_order([0], job(read_process), Crew(1))) == [os.getpid()]


def test_workers_go_home_when_the_results_are_closed() -> None:
    with closing(results_in_order(range(100), job(read_process), Crew(2))) as results:
        process = next(results)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_ray_that_is_not_installed_is_asked_for(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not installed; pip install 'bertsmith\[cluster\]'"):
        list(results_in_order([1], job(double_slowly), Crew(1, "ray")))
