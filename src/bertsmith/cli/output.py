"""A standard output that cannot be written, such as a file on a full disk, ends a command with one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from bertsmith.ground.errors import UserError


@contextmanager
def told_if_output_fails() -> Iterator[None]:
    """While it is open, what cannot be printed is told as a mistake that the user can mend."""
    if sys.stdout is None:  # closed before the start: whoever prints knows
        yield
        return
    plain, named = sys.stdout, cast(TextIO, _NamedWriting(sys.stdout))
    sys.stdout = named
    try:
        yield
    finally:
        # Where a reader left early, Typer has put a stream there that ends without a complaint.
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
        except BrokenPipeError:  # a reader who has seen enough, which is no mistake
            raise
        except OSError as error:
            # What the stream still holds would be tried, and complained about, once more at the very end.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            what = f"cannot be written ({error.strerror or error})"
            remedy = "make room where it goes, or send it elsewhere"
            raise UserError(what, where="standard output", remedy=remedy) from error
