"""Crews: results in the order of the items, few items under way, and mistakes that come through."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from bertsmith.core.errors import UserError
from bertsmith.core.processes import Job, Workers, results_in_order
from tests.worker_jobs import double_slowly, fail_at_seven, read_process


def job(work) -> Job:
    return Job(str.upper, "hammer", work)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    results = list(results_in_order(range(20), job(double_slowly), Workers(workers)))
    assert results == [(2 * number, "HAMMER") for number in range(20)]


def test_only_so_many_items_are_under_way() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    crew = Workers(2)
    with closing(results_in_order(items(), job(double_slowly), crew)) as results:
        for done, _ in enumerate(results):
            assert taken <= done + crew.items_at_once
            if done == 20:
                break


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_of_the_user_comes_through_whole(workers: int) -> None:
    with (
        pytest.raises(UserError) as caught,
        closing(results_in_order(range(20), job(fail_at_seven), Workers(workers))) as results,
    ):
        list(results)
    assert (caught.value.where, caught.value.remedy) == ("item 7", "mend it")


def test_a_worker_that_is_killed_is_reported() -> None:
    with (
        pytest.raises(UserError, match="a worker process died; use fewer `workers` if memory ran out"),
        closing(results_in_order(range(1000), job(double_slowly), Workers(2))) as results,
    ):
        next(results)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        list(results)


def test_one_worker_is_this_very_process() -> None:
    assert list(results_in_order([0], job(read_process), Workers(1))) == [os.getpid()]


def test_ray_that_is_not_installed_is_asked_for(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not installed; pip install 'bertsmith\[cluster\]'"):
        list(results_in_order([1], job(double_slowly), Workers(1, "ray")))
