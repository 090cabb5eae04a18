"""Files of texts, one a line, read piece by piece."""

import io
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import BinaryIO, cast

from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES, compression_of, open_text_bytes
from bertsmith.core.progress import progress_bar

STANDARD_INPUT = Path("-")
MAX_LINES, MAX_BYTES = 2048, 1 << 22
"""Of one piece: enough to sort by length, little enough for any memory."""
LONGEST_LINE = 1 << 24
CHUNK_BYTES = 1 << 17
UNPACKERS = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}
"""What prints the text of a packed file, by its suffix."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines of a file."""

    texts: list[str]
    first: int
    """The number of the first line, counted from 1."""
    size: int
    """In bytes."""


def pieces_of(source: Path, *, patience: float = math.inf) -> Iterator[Piece]:
    """The lines of a file, or of the standard input where it is called -, in pieces of bounded size.

    A piece is given `patience` seconds after its first line came, which matters where lines come slowly.
    """
    opened = nullcontext(standard_input()) if source == STANDARD_INPUT else open_text_bytes(source)
    with opened as stream:
        lines, first = _Lines(stream), 1
        while (piece := _read(lines, source, first, patience)).texts:
            yield piece
            first += len(piece.texts)
    if first == 1:
        raise UserError("holds no text", where=name_of(source), remedy="write one text a line")


def standard_input() -> BinaryIO:
    """The bytes of the standard input, where it is open."""
    if sys.stdin is None:
        raise UserError("is closed", where=name_of(STANDARD_INPUT), remedy="pipe the text in, or name a file")
    return sys.stdin.buffer


def check_unpacked(start: bytes, *, where: str) -> None:
    """Stop at bytes that begin as those of a packed file do."""
    if suffix := compression_of(start):
        remedy = f"unpack it: {UNPACKERS[suffix]} FILE{suffix} | bertsmith ..."
        raise UserError("is compressed", where=where, remedy=remedy)


def text_of(written: bytes, *, where: str, encoding: str = "utf-8-sig") -> str:
    """The text of UTF-8 bytes; some editors put a mark at the very start of a file, which is no text."""
    try:
        return written.decode(encoding)
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start})"
        raise UserError(what, where=where, remedy="convert the file to UTF-8") from error


def reading_bar(source: Path) -> AbstractContextManager[Callable[[int], None]]:
    """A bar to advance by the bytes of each piece, whose end is known where the file's size says it."""
    measurable = source.is_file() and source.suffix.lower() not in COMPRESSED_SUFFIXES
    return progress_bar("reading texts", source.stat().st_size if measurable else None)


def name_of(source: Path) -> str:
    """The file as it is called in errors."""
    return "standard input" if source == STANDARD_INPUT else str(source)


def line_name(source: Path, first: int, number: int) -> str:
    """The line of a file on which the text of this index in a piece stands."""
    return f"{name_of(source)}:{first + number}"


class _Lines:
    """The lines of a stream as they come: unlike its own `readline`, it knows whether one is here."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._held = bytearray()
        self._searched = 0
        self._is_over = False

    def next(self) -> bytes:
        """The next line with its end, or all of it that is not too long; nothing at the end."""
        while not self._is_here():
            self._receive()
        end = self._held.find(b"\n", self._searched) + 1 or min(len(self._held), LONGEST_LINE + 1)
        line = bytes(self._held[:end])
        del self._held[:end]
        self._searched = 0
        return line

    def is_soon(self, end: float) -> bool:
        """Whether the next line, or the end of all, is here before that moment."""
        while not self._is_here():
            # Where the wait has no limit, `_receive` does the waiting.
            if not math.isinf(end):
                ready, _, _ = select([self._stream], [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    return False
            self._receive()
        return True

    def _is_here(self) -> bool:
        if self._is_over or self._held.find(b"\n", self._searched) >= 0:
            return True
        self._searched = len(self._held)  # what has no line end now is not searched again
        return len(self._held) > LONGEST_LINE

    def _receive(self) -> None:
        # As much as a stream holds for itself, or more: then `select` sees all that is still to come.
        chunk = cast(io.BufferedIOBase, self._stream).read1(CHUNK_BYTES)
        self._held += chunk
        self._is_over = not chunk


def _read(lines: _Lines, source: Path, first: int, patience: float) -> Piece:
    """The next piece, whose first line has this number; without texts at the end of the file."""
    texts: list[str] = []
    size, end = 0, math.inf
    while len(texts) < MAX_LINES and size < MAX_BYTES and (not texts or lines.is_soon(end)):
        line = lines.next()
        if not line:
            break
        end = end if texts else time.monotonic() + patience  # from the first line on, however long that took
        size += len(line)
        texts.append(_decoded(line, number=first + len(texts), source=source))
    return Piece(texts, first, size)


def _decoded(line: bytes, *, number: int, source: Path) -> str:
    where = f"{name_of(source)}:{number}"
    if len(line) > LONGEST_LINE:
        raise UserError(f"is over {LONGEST_LINE:,} bytes long", where=where, remedy="write one text a line")
    if number == 1:
        check_unpacked(line, where=name_of(source))
    text = text_of(line, where=where, encoding="utf-8-sig" if number == 1 else "utf-8")
    return text.removesuffix("\n").removesuffix("\r")
