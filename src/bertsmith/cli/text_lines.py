"""Files of texts, one a line, read piece by piece."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import COMPRESSED_SUFFIXES, open_text_bytes
from bertsmith.ground.progress import progress_bar

STANDARD_INPUT = Path("-")
MOST_LINES, MOST_BYTES = 2048, 1 << 22
"""Of one piece: enough to sort by length, little enough for any memory."""
LONGEST_LINE = 1 << 24


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines of a file."""

    texts: list[str]
    first: int
    """The number of the first line, counted from 1."""
    size: int
    """In bytes."""


def pieces_of(source: Path) -> Iterator[Piece]:
    """The lines of a file, or of the standard input where it is called -, in pieces of bounded size."""
    with _opened(source) as stream:
        first = 1
        while (piece := _read(stream, source, first)).texts:
            yield piece
            first += len(piece.texts)


def reading_bar(source: Path) -> AbstractContextManager[Callable[[int], None]]:
    """A bar to advance by the bytes of each piece, whose end is known where the file's size says it."""
    measurable = source.is_file() and source.suffix.lower() not in COMPRESSED_SUFFIXES
    return progress_bar("reading texts", source.stat().st_size if measurable else None)


def name_of(source: Path) -> str:
    """The file as it is called in complaints."""
    return "standard input" if source == STANDARD_INPUT else str(source)


def line_name(source: Path, first: int, number: int) -> str:
    """The place of a text that has this number in a piece of a file."""
    return f"{name_of(source)}:{first + number}"


def _opened(source: Path) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if source == STANDARD_INPUT else open_text_bytes(source)


def _read(stream: BinaryIO, source: Path, first: int) -> Piece:
    texts: list[str] = []
    size = 0
    while len(texts) < MOST_LINES and size < MOST_BYTES:
        line = stream.readline(LONGEST_LINE + 1)
        if not line:
            break
        size += len(line)
        texts.append(_decoded(line, number=first + len(texts), source=source))
    return Piece(texts, first, size)


def _decoded(line: bytes, *, number: int, source: Path) -> str:
    where = f"{name_of(source)}:{number}"
    if len(line) > LONGEST_LINE:
        raise UserError(f"is over {LONGEST_LINE:,} bytes long", where=where, remedy="write one text a line")
    try:
        # Some editors put a mark at the very start of a file.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start})"
        raise UserError(what, where=where, remedy="convert the file to UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")
