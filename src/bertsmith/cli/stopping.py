"""How a command ends that is told to stop: by Ctrl-C or SIGTERM, with one line."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from typer import Exit, echo

STOPPED = 130


@contextmanager
def told_if_stopped() -> Iterator[None]:
    """Ctrl-C and SIGTERM inside end the command with one line, once what was begun is cleaned up."""
    with sigterm_as_interrupt():
        try:
            yield
        except KeyboardInterrupt:
            echo("bertsmith: stopped; nothing was written", err=True)
            raise Exit(STOPPED) from None


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """While it is open, SIGTERM is taken as Ctrl-C, so that what was begun is cleaned up.

    What has a way of its own to stop, such as a training run or a server, puts its handler in place of it.
    """
    owner = os.getpid()

    def heard(number: int, frame: FrameType | None) -> None:
        del frame  # wherever it is heard, it is an interrupt
        if os.getpid() != owner:  # a forked worker, which nobody but its parent sends home
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)  # launchers repeat it, and cleaning up is not to be cut short
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
