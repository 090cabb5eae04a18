"""`--jitter` and the marker `clocks`: what they promise to whoever hunts a test that fails now and then."""

import subprocess
import time

from tests.jitter.sitecustomize import Jumps
from tests.touched import _touches
from tests.unit.core import test_locks
from tests.unit.tasks import test_metrics


def watched_by_time():
    return time


def watched_in_a_loop():
    return [subprocess.run for _ in range(2)]


def watched_inside():
    import socket

    return socket


def through_a_helper():
    return watched_inside()


def of_numbers():
    return sum(range(3))


def test_a_test_that_names_a_clock_a_process_or_a_socket_is_marked_also_through_a_helper():
    assert all(map(_touches, (watched_by_time, watched_in_a_loop, watched_inside, through_a_helper)))
    assert not _touches(of_numbers)


def test_processes_are_found_in_tests_and_absent_from_tests_of_numbers():
    marked = {
        name: {_touches(test) for key, test in vars(module).items() if key.startswith("test_")}
        for name, module in (("locks", test_locks), ("metrics", test_metrics))
    }
    assert True in marked["locks"] and marked["metrics"] == {False}


def test_the_clocks_jump_forwards_alone_and_as_the_seed_says():
    moments = [1000 + step / 10 for step in range(3000)]
    one, other, third = (Jumps(seed, 1000.0) for seed in ("1", "1", "2"))
    shifts = [one.at(moment) for moment in moments]
    assert shifts == sorted(shifts) and shifts[-1] > 1
    # Asked at other moments, as by another process.
    assert [other.at(moment) for moment in moments[::7]] == shifts[::7]
    assert third.at(moments[-1]) != shifts[-1]
    assert min(map(one.wrong, moments)) < -0.5 and max(map(one.wrong, moments)) > 0.5
