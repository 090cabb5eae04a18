"""A wish to stop is kept until the step is done; the second Ctrl-C is not."""

import os
import signal
import subprocess
import sys

import pytest

from bertsmith.training.callbacks import StopRequested
from bertsmith.training.distributed import ALONE

CHILDREN = """
import os, signal, sys, time
from bertsmith.training.callbacks import StopRequested

with StopRequested() as stop:
    child = os.fork()
    if child == 0:
        print("ready", flush=True)
        time.sleep(60)
        os._exit(3)
    sys.stdin.readline()
    os.kill(child, signal.SIGINT)
    time.sleep(0.2)
    alive = os.waitpid(child, os.WNOHANG)[0] == 0
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(alive, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, stop.here)
"""


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_is_a_flag(wish):
    with StopRequested() as stop:
        assert not stop.anywhere(ALONE)
        send(wish)
        assert stop.here
        assert stop.anywhere(ALONE)


def test_each_kind_of_wish_is_acknowledged_once_and_at_once():
    messages = []
    with StopRequested(messages.append):
        send(signal.SIGTERM)
        assert messages == ["stopping after this step"]
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert messages[1:] == ["stopping after this step; Ctrl-C again to stop now"]


def test_a_second_ctrl_c_interrupts_at_once():
    with StopRequested():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_sigterm_and_one_ctrl_c_do_not_interrupt():
    with StopRequested() as stop:
        for wish in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            send(wish)
        assert stop.here


def test_afterwards_ctrl_c_means_what_it_meant_before():
    with StopRequested():
        pass
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_wish_during_a_run_is_one_of_its_study_too():
    messages = []
    with StopRequested(messages.append) as study:
        with StopRequested(messages.append):
            pass
        assert not study.here
        with StopRequested(messages.append) as run:
            send(signal.SIGINT)
        assert run.here and study.here and len(messages) == 1
        with pytest.raises(KeyboardInterrupt):  # the second one
            send(signal.SIGINT)


def test_the_old_meaning_comes_back_after_an_error_too():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequested():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_process_outlives_ctrl_c_and_obeys_sigterm():
    script = subprocess.Popen(
        [sys.executable, "-c", CHILDREN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdout.readline() == "ready\n"
    output, _ = script.communicate("go\n", timeout=30)
    assert output == "True True False\n"
