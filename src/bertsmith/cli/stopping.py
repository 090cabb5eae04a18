"""How a command ends that is told to stop: by Ctrl-C, SIGTERM or a closed terminal, with one line."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from typer import Exit, echo

STOPPED = 130
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""What is taken as Ctrl-C: the wish of a launcher, and a terminal that is closed."""


@contextmanager
def told_if_stopped() -> Iterator[None]:
    """A stop inside ends the command with one line, once what was begun is cleaned up."""
    with stops_as_interrupt():
        try:
            yield
        except KeyboardInterrupt:
            echo("bertsmith: stopped; nothing was written", err=True)
            raise Exit(STOPPED) from None


@contextmanager
def stops_as_interrupt() -> Iterator[None]:
    """While it is open, SIGTERM and SIGHUP are taken as Ctrl-C, so that what was begun is cleaned up.

    What has a way of its own to stop, such as a training run or a server, puts its handler in place of it.
    One that is ignored from the start stays so: nohup lets a command outlive its terminal.
    """
    owner = os.getpid()
    before = {number: signal.getsignal(number) for number in STOPS}
    heeded = [number for number in STOPS if before[number] is not signal.SIG_IGN]

    def heard(number: int, frame: FrameType | None) -> None:
        del frame  # wherever it is heard, it is an interrupt
        if os.getpid() != owner:  # a forked worker, which nobody but its parent sends home
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in heeded:  # launchers repeat it, and cleaning up is not to be cut short
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, heard)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
