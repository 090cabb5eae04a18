"""Files of texts, one per line or per row of a table, read piece by piece, and the options of tables."""

import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from typer import echo

from bertsmith.cli.predicting import naming_inputs
from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES, compression_of, open_text_bytes
from bertsmith.core.progress import progress_bar
from bertsmith.tasks.table_format import TableFormat

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.inference.text_reader import TextOrPair
    from bertsmith.tasks.tables import Row


STANDARD_INPUT = Path("-")
MAX_LINES, MAX_BYTES = 2048, 1 << 22
"""Maximum lines and bytes of a piece: enough to sort by length, small enough for any machine."""
MAX_LINE_BYTES = 1 << 24
CHUNK_BYTES = 1 << 17
PATIENCE_SECONDS = 0.1
"""Seconds to wait for more lines before processing those that have arrived."""
UNPACKERS = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}
"""Program that prints the text of a compressed file, by its suffix."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """A file of texts: lines, or a table with a column of texts."""

    path: Path
    text: str = ""
    """Column of the texts; empty if each line is a text."""
    text2: str = ""
    """Column of the second texts of pairs."""
    form: TableFormat = TableFormat()
    skip_bad: bool = False

    @property
    def is_table(self) -> bool:
        """True if the source is a table."""
        return bool(self.text)

    @property
    def lacks_column(self) -> bool:
        """True for a table whose column of texts is not named."""
        from bertsmith.tasks.tables import TABLE_SUFFIXES, bare_suffix

        return not self.text and bare_suffix(self.path) in set(TABLE_SUFFIXES) - {".txt"}

    def as_trained(self, bert: "Bert") -> "TextSource":
        """Return a table without named columns with those that the model was fine-tuned on."""
        custom = {} if bert.finetuned is None else bert.finetuned.config.custom
        if not (custom and self.lacks_column):
            return self
        return replace(self, text=str(custom["text"]), text2=str(custom["second"]))

    def check(self, *, before_opening: bool = False) -> None:
        """Raise if the options do not fit the file: a table needs a column, other files must not have one.

        Before the model is opened, its columns may still be those of a table.
        """
        from bertsmith.tasks.tables import column_names

        form = self.form
        options = {"column2": self.text2, "delimiter": form.delimiter, "encoding": form.encoding}
        given = [name for name, value in {**options, "columns": form.columns}.items() if value]
        where = name_of(self.path)
        if self.path == STANDARD_INPUT:
            if self.text or given:
                remedy = "remove `column` and its related options, or save it as a file"
                raise UserError("is read line by line, without columns", where=where, remedy=remedy)
        elif self.lacks_column:
            if before_opening:
                return
            names = ", ".join(map(repr, column_names(self.path, self.form)))
            columns = f"its columns are {names}" if names else "it is empty"
            remedy = f"give the column of the texts with `column=COLUMN` ({columns})"
            raise UserError("is a table", where=where, remedy=remedy)
        elif given and not self.text:
            remedy = "give the column of the texts with `column=COLUMN`, or remove it"
            raise UserError("is for tables", key=given[0], remedy=remedy)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some texts of a file, with their places and errors."""

    texts: "list[TextOrPair]"
    numbers: list[int]
    """Number of each text's line, or row of a table, counted from 1."""
    wheres: list[str]
    """Place of each text, for error messages."""
    size: int
    """Number of bytes read; for a table, rows."""
    bad: list[UserError] = field(default_factory=list)
    """Errors of the lines that were skipped as bad."""


Result = TypeVar("Result")
LineReader = Callable[[str], "TextOrPair"]
"""Function that parses a line into a text or pair, or raises a UserError."""


def pieces_of(
    source: TextSource | Path, read_line: LineReader = str, *, patience: float = math.inf
) -> Iterator[Piece]:
    """Yield the texts of a file, or of the standard input if it is called -, in pieces of bounded size.

    If lines arrive slowly, a piece is yielded `patience` seconds after its first line.
    """
    source = TextSource(source) if isinstance(source, Path) else source
    source.check()
    found, bad = 0, None
    for piece in _table_pieces(source) if source.is_table else _line_pieces(source, read_line, patience):
        found += len(piece.texts)
        bad = bad or next(iter(piece.bad), None)
        yield piece
    if bad and not found:
        raise replace(bad, what=f"{bad.what}, and all other lines are bad, too")
    if not found:
        raise UserError(
            "does not contain a text", where=name_of(source.path), remedy="write one text per line"
        )


def lines_of(source: Path) -> list[str]:
    """Return all lines of a file, or of the standard input if it is called -."""
    return [cast(str, text) for piece in pieces_of(source) for text in piece.texts]


def texts_of(given: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the text and its name for errors; if the text is -, each line of the standard input instead."""
    if given != str(STANDARD_INPUT):
        yield name, given
        return
    for piece in pieces_of(STANDARD_INPUT, patience=PATIENCE_SECONDS):
        yield from zip(piece.wheres, map(str, piece.texts), strict=True)


def computed_pieces(
    bert: "Bert",
    source: TextSource,
    compute: Callable[[Piece], Result],
    *,
    read_line: LineReader = str,
    truncate: bool = True,
    patience: float = math.inf,
    bad: list[UserError] | None = None,
) -> Iterator[tuple[Piece, Result]]:
    """Yield the pieces of a file, each with its result; at the end, report the lines that were skipped.

    A source that skips bad lines also skips the texts that the model rejects; all of them are added to `bad`.
    """
    bad = [] if bad is None else bad
    # A bar would disturb the lines of a verb that prints results as texts arrive.
    quiet = patience < math.inf and sys.stdout.isatty()
    with nullcontext(lambda _size: None) if quiet else reading_bar(source) as advance:
        for piece in pieces_of(source, read_line, patience=patience):
            if source.skip_bad:
                piece = without_unreadable(bert, piece, truncate=truncate)
            bad += piece.bad
            with naming_inputs(piece.wheres.__getitem__):
                result = compute(piece)
            yield piece, result
            advance(piece.size)
    report_skipped(bad)


def without_unreadable(bert: "Bert", piece: Piece, *, truncate: bool) -> Piece:
    """Return a piece without the texts that a model rejects: empty ones, and long ones unless `truncate`."""
    kept, bad = [], list(piece.bad)
    for index, text in enumerate(piece.texts):
        try:
            bert.reader.check(bert.reader.tokenize([text]), truncate=truncate)
            kept.append(index)
        except UserError as error:
            bad.append(replace(error, where=piece.wheres[index]))
    return Piece(
        [piece.texts[index] for index in kept],
        [piece.numbers[index] for index in kept],
        [piece.wheres[index] for index in kept],
        piece.size,
        bad,
    )


def report_skipped(bad: Sequence[UserError]) -> None:
    """Print the number of skipped lines and the first error, if any line was skipped."""
    if bad:
        echo(f"{len(bad):,} bad lines were skipped, first: {bad[0].line()}", err=True)


def standard_input() -> BinaryIO:
    """Return the binary standard input; raise if it is closed."""
    if sys.stdin is None:
        raise UserError("is closed", where=name_of(STANDARD_INPUT), remedy="pipe the text in, or give a file")
    return sys.stdin.buffer


def check_unpacked(start: bytes, *, where: str) -> None:
    """Raise if bytes begin like a compressed file."""
    if suffix := compression_of(start):
        remedy = f"unpack it: {UNPACKERS[suffix]} FILE{suffix} | bertsmith ..."
        raise UserError("is compressed", where=where, remedy=remedy)


def text_of(written: bytes, *, where: str, encoding: str = "utf-8-sig") -> str:
    """Decode UTF-8 bytes, by default without the byte order mark that some editors write."""
    try:
        return written.decode(encoding)
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start})"
        raise UserError(what, where=where, remedy="convert the file to UTF-8") from error


def reading_bar(source: TextSource) -> AbstractContextManager[Callable[[int], None]]:
    """Return a bar to advance by the size of each piece; its end is known if the file's size gives it."""
    path = source.path
    measurable = path.is_file() and path.suffix.lower() not in COMPRESSED_SUFFIXES and not source.is_table
    return progress_bar("reading texts", path.stat().st_size if measurable else None)


def name_of(source: Path) -> str:
    """Return the name of the file in errors."""
    return "standard input" if source == STANDARD_INPUT else str(source)


class _Lines:
    """The lines of a stream as they arrive; unlike `readline`, it can check if a line has arrived."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._held = bytearray()
        self._searched = 0
        self._is_over = False

    def next(self) -> bytes:
        """Return the next line with its end, cut if it is too long; empty at the end of the stream."""
        while not self._is_here():
            self._receive()
        end = self._held.find(b"\n", self._searched) + 1 or min(len(self._held), MAX_LINE_BYTES + 1)
        line = bytes(self._held[:end])
        del self._held[:end]
        self._searched = 0
        return line

    def is_soon(self, end: float) -> bool:
        """True if the next line, or the end of the stream, arrives before this time."""
        while not self._is_here():
            # Without a limit, `_receive` waits.
            if not math.isinf(end):
                ready, _, _ = select([self._stream], [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    return False
            self._receive()
        return True

    def _is_here(self) -> bool:
        if self._is_over or self._held.find(b"\n", self._searched) >= 0:
            return True
        self._searched = len(self._held)  # do not search these bytes again
        return len(self._held) > MAX_LINE_BYTES

    def _receive(self) -> None:
        # At least the stream's whole buffer, so that `select` sees all remaining bytes.
        chunk = cast(io.BufferedIOBase, self._stream).read1(CHUNK_BYTES)
        self._held += chunk
        self._is_over = not chunk


def _line_pieces(source: TextSource, read_line: LineReader, patience: float) -> Iterator[Piece]:
    path = source.path
    opened = nullcontext(standard_input()) if path == STANDARD_INPUT else open_text_bytes(path)
    with opened as stream:
        lines, first = _Lines(stream), 1
        while (written := _read(lines, patience))[0]:
            texts, numbers, wheres, bad = [], [], [], []
            for number, line in enumerate(written[0], first):
                where = f"{name_of(path)}:{number}"
                if number == 1:
                    check_unpacked(line, where=name_of(path))
                if len(line) > MAX_LINE_BYTES:  # its end is unknown, so later lines cannot be read
                    what = f"is over {MAX_LINE_BYTES:,} bytes long"
                    raise UserError(what, where=where, remedy="write one text per line")
                try:
                    encoding = "utf-8-sig" if number == 1 else "utf-8"
                    text = text_of(line, where=where, encoding=encoding)
                    texts.append(read_line(text.removesuffix("\n").removesuffix("\r")))
                except UserError as error:
                    if not source.skip_bad:
                        raise replace(error, where=where) from None
                    bad.append(replace(error, where=where))
                    continue
                numbers.append(number)
                wheres.append(where)
            yield Piece(texts, numbers, wheres, written[1], bad)
            first += len(written[0])


def _table_pieces(source: TextSource) -> Iterator[Piece]:
    from bertsmith.tasks.example_types import BadLine
    from bertsmith.tasks.tables import Columns, rows_of

    needed = (source.text, source.text2) if source.text2 else (source.text,)
    rows = enumerate(rows_of(source.path, Columns(needed), source.form), 1)
    while some := list(islice(rows, MAX_LINES)):
        piece = Piece([], [], [], len(some))
        for number, row in some:
            try:
                if isinstance(row, BadLine):
                    raise UserError(row.what, remedy=row.remedy)
                piece.texts.append(_text_of_row(row, needed))
            except UserError as error:
                named = replace(error, where=row.where)
                if not source.skip_bad:
                    remedy = f"{error.remedy}, or skip such lines with `skip_bad=True`"
                    raise replace(named, remedy=remedy) from None
                piece.bad.append(named)
                continue
            piece.numbers.append(number)
            piece.wheres.append(row.where)
        yield piece


def _text_of_row(row: "Row", columns: tuple[str, ...]) -> "TextOrPair":
    from bertsmith.tasks.label_rules import cell_text

    try:
        texts = [cell if isinstance(cell := row.values[name], str) else cell_text(cell) for name in columns]
    except ValueError as error:
        raise UserError(str(error), remedy="correct the line") from error
    if not all(map(str.strip, texts)):
        raise UserError(f"lacks a text in {' and '.join(columns)}", remedy="fill or remove the line")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _read(lines: _Lines, patience: float) -> tuple[list[bytes], int]:
    """Read the next lines, and return them with their total bytes; empty at the end of the file."""
    found: list[bytes] = []
    size, end = 0, math.inf
    while len(found) < MAX_LINES and size < MAX_BYTES and (not found or lines.is_soon(end)):
        line = lines.next()
        if not line:
            break
        end = end if found else time.monotonic() + patience  # counted from the first line
        size += len(line)
        found.append(line)
        if len(line) > MAX_LINE_BYTES:  # it will be rejected: do not read its rest
            break
    return found, size
