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
from bertsmith.training import callbacks

def is_alive(child):
    time.sleep(0.3)
    return os.waitpid(child, os.WNOHANG)[0] == 0

def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with callbacks.StopRequested() as stop:
    child = os.fork()
    if child == 0:
        callbacks.PARENT_SECONDS = float(sys.argv[1])
        print("ready", flush=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(1)
        os._exit(3)
    sys.stdin.readline()
    {inside}
{afterwards}
"""
ALONE_OBEYS = """
    os.kill(child, signal.SIGINT)
    alive = is_alive(child)
    os.kill(child, signal.SIGTERM)
    print(alive, exit_code(child), stop.here)
"""
TOLD_FIRST = """
    os.kill(child, signal.SIGTERM)
    alive = is_alive(child)
    os.kill(os.getpid(), signal.SIGTERM)
    alive = alive and is_alive(child)
    os.kill(child, signal.SIGTERM)
    alive = alive and is_alive(child)
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


class LateSignal(StopRequested):
    """Gets a signal while it hands on that it had none."""

    armed = False

    @property
    def here(self):
        if self.armed:
            self.armed = False
            send(signal.SIGTERM)
        return False

    @here.setter
    def here(self, value):
        pass


def test_a_wish_that_comes_while_a_run_ends_is_kept_by_its_study():
    with StopRequested() as study:
        with LateSignal() as run:
            run.armed = True
        assert study.here


def test_the_old_meaning_comes_back_after_an_error_too():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequested():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def printed(inside: str, afterwards: str = "", *, patience: float) -> str:
    code = CHILDREN.replace("{inside}", inside.strip()).replace("{afterwards}", afterwards)
    script = subprocess.Popen(
        [sys.executable, "-c", code, str(patience)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdout.readline() == "ready\n"
    output, _ = script.communicate("go\n", timeout=60)
    return output


def test_a_forked_process_outlives_ctrl_c_and_obeys_a_sigterm_of_its_own():
    assert printed(ALONE_OBEYS, patience=0.1) == f"True {-signal.SIGTERM} False\n"


def test_a_forked_process_outlives_a_sigterm_that_its_parent_gets_too_until_all_is_done():
    afterwards = "os.kill(child, signal.SIGTERM)\nprint(alive, exit_code(child), stop.here)"
    assert printed(TOLD_FIRST, afterwards, patience=60) == "True 0 True\n"


LOADER = """
import os, signal
from torch.utils.data import DataLoader
from bertsmith.training.callbacks import StopRequested, outlive_sigterm

with StopRequested() as stop:
    items = iter(DataLoader(range(50), num_workers=1, prefetch_factor=1, worker_init_fn=outlive_sigterm))
    next(items)
    os.killpg(0, signal.SIGTERM)
    print(len(list(items)), stop.here)
"""


def test_a_worker_of_a_loader_outlives_the_sigterm_of_its_whole_group():
    command = [sys.executable, "-c", LOADER]
    ended = subprocess.run(
        command, capture_output=True, text=True, start_new_session=True, timeout=120, check=False
    )
    assert ended.stdout == "49 True\n", ended.stderr
