"""How a command ends that is told to stop: by Ctrl-C, SIGTERM or a closed terminal, with one line."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from typer import Exit, echo

from bertsmith.core.errors import UserError

STOPPED = 130
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""What is taken as Ctrl-C: the wish of a launcher, and a terminal that is closed."""


@contextmanager
def reporting_stops() -> Iterator[None]:
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


@contextmanager
def reporting_output_errors() -> Iterator[None]:
    """While it is open, what cannot be printed is reported as an error that the user can fix."""
    if sys.stdout is None:  # closed before the start: whoever prints knows
        yield
        return
    plain, named = sys.stdout, cast(TextIO, _NamedWriting(sys.stdout))
    sys.stdout = named
    try:
        yield
    finally:
        # Where a reader left early, Typer has put a stream there that ends without an error.
        if sys.stdout is named:
            sys.stdout = plain


class _NamedWriting:
    """A text stream whose writing errors say that it is the standard output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """How many characters were written."""
        if text == "":  # Typer tries a stream with nothing, and where that fails it keeps it to itself
            return 0
        with self._named_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what the stream holds."""
        with self._named_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # a reader who has seen enough, which is no error
            raise
        except OSError as error:
            # What the stream still holds would be tried, and fail, once more at the very end.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            what = f"cannot be written ({error.strerror or error})"
            remedy = "make room where it goes, or send it elsewhere"
            raise UserError(what, where="standard output", remedy=remedy) from error
