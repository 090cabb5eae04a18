"""How a command ends that is stopped before it has written anything."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from typer import Exit, echo

STOPPED = 130


@contextmanager
def told_if_stopped() -> Iterator[None]:
    """Ctrl-C and SIGTERM inside end the command with one line, once what was begun is cleaned up."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        echo("bertsmith: stopped; nothing was written", err=True)
        raise Exit(STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame  # any such signal is an interrupt
    raise KeyboardInterrupt
