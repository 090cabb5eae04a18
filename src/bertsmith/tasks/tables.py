"""Rows of a table, whatever its format: TSV, CSV, JSONL or Parquet; a row that cannot be taken is a BadLine.

- tsv (and any other name): tabs part the cells and a quote is a character, as in GLUE
- csv: RFC 4180, so a quoted cell may hold commas, quotes and line ends
- jsonl: one JSON object a line
- parquet: a row a row

All but parquet may be packed with gzip, bzip2, xz or Zstandard.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import COMPRESSED_SUFFIXES, open_text_bytes
from bertsmith.tasks.examples import BadLine

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LONGEST_CELL = 1 << 30  # Python's csv refuses cells above 128 KiB otherwise, and documents are longer
_ROWS_AT_ONCE = 4096
_TORN = re.compile(r"[\udc80-\udcff]")  # as Python decodes single bytes (PEP 383)
NOT_UTF8, CONVERT = "is not UTF-8 text", "convert it to UTF-8 (iconv)"
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the cell of each column."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class Columns:
    """What a table must have."""

    needed: tuple[str, ...] = ()
    headless: tuple[str, ...] = ()
    """The names of the columns where the first line does not name them; a table may then have no header."""


ANY_COLUMNS = Columns()


def rows_of(path: Path, columns: Columns = ANY_COLUMNS) -> Iterator[Row | BadLine]:
    """The rows of a table in order."""
    return _BY_SUFFIX.get(bare_suffix(path), _tab_separated)(path, columns)


def bare_suffix(path: Path) -> str:
    """The suffix that tells the format: .csv for train.csv and for train.csv.gz."""
    packed = path.suffix.lower() in COMPRESSED_SUFFIXES
    return (path.with_suffix("") if packed else path).suffix.lower()


def _tab_separated(path: Path, columns: Columns) -> Iterator[Row | BadLine]:
    names: tuple[str, ...] = ()
    for number, line in numbered_lines(path):
        if not line.strip(b"\r\n"):
            continue
        where = f"{path}:{number}"
        text = _decoded(line, where)
        if isinstance(text, BadLine):
            yield text
            continue
        cells = text.rstrip("\r\n").split("\t")
        if not names:
            names, is_header = _names(cells, columns, where)
            if is_header:
                continue
        yield _row(names, cells, where)


def _comma_separated(path: Path, columns: Columns) -> Iterator[Row | BadLine]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(_torn_lines(path), strict=True)
    names: tuple[str, ...] = ()
    while True:
        where = f"{path}:{reader.line_num + 1}"  # where the record begins; a cell may hold line ends
        try:
            cells = next(reader, None)
        except csv.Error as error:
            remedy = 'mend the quotes: a cell with a quote is "quoted", and a quote in it is doubled'
            raise UserError(f"is not CSV ({error})", where=where, remedy=remedy) from error
        if cells is None:
            return
        if not cells:
            continue
        is_header = False
        if not names:
            names, is_header = _names(cells, columns, where)
        if not is_header:
            yield BadLine(NOT_UTF8, where, CONVERT) if is_torn(cells) else _row(names, cells, where)


def _json_lines(path: Path, columns: Columns) -> Iterator[Row | BadLine]:
    first = True
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        values = _json_object(line, where)
        if isinstance(values, BadLine):
            yield values
            continue
        if first:
            _refuse_missing(tuple(values), columns.needed, where)
        first = False
        lacking = [name for name in columns.needed if name not in values]
        if lacking:
            what = f"has no {_quoted(lacking)}, only {_quoted(values)}"
            yield BadLine(what, where, "write every field in every line")
        else:
            yield Row(values, where)


def _parquet(path: Path, columns: Columns) -> Iterator[Row | BadLine]:
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        remedy = "pip install 'bertsmith[data]'"
        raise UserError("reading Parquet needs pyarrow", where=str(path), remedy=remedy) from error
    number = 0
    try:
        with ParquetFile(path) as file:
            _refuse_missing(tuple(file.schema_arrow.names), columns.needed, str(path))
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path}:{number}")
    except (ArrowException, OSError) as error:
        what = f"is not a whole Parquet file ({error})"
        raise UserError(what, where=str(path), remedy="fetch it again") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers; a mark at the very start is left out."""
    with open_text_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(_UTF16_MARKS):
                remedy = "convert it: iconv -f UTF-16 -t UTF-8"
                raise UserError("is UTF-16 text", where=str(path), remedy=remedy)
            yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


def _torn_lines(path: Path) -> Iterator[str]:
    """The lines, with halves of characters in the place of bytes that are not UTF-8.

    No such byte looks like a comma, a quote or a line end, so the records around it can still be told apart.
    """
    for _, line in numbered_lines(path):
        yield line.decode("utf-8", errors="surrogateescape")


def is_torn(cells: Sequence[str]) -> bool:
    """Whether there are bytes that are not UTF-8, read as halves of characters."""
    return any(not cell.isascii() and _TORN.search(cell) for cell in cells)


def _decoded(line: bytes, where: str) -> str | BadLine:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{NOT_UTF8} (byte {error.start} of the line)"
        return BadLine(what, where, CONVERT)


def _json_object(line: bytes, where: str) -> dict[str, Any] | BadLine:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadLine(f"is not valid JSON ({error})", where, "mend it: one object a line")
    if not isinstance(value, dict):
        return BadLine("is not a JSON object", where, "write one object a line")
    return value


def _names(cells: Sequence[str], columns: Columns, where: str) -> tuple[tuple[str, ...], bool]:
    """The names of the columns, and whether the first line told them."""
    if is_torn(cells):
        raise UserError(NOT_UTF8, where=where, remedy=CONVERT)
    names = tuple(cell.strip() for cell in cells)
    if columns.headless and not set(columns.needed) <= set(names):
        return columns.headless, False
    _refuse_missing(names, columns.needed, where)
    twice = sorted({name for name in names if name in columns.needed and names.count(name) > 1})
    if twice:
        raise UserError(f"has two columns {twice[0]!r}", where=where, remedy="rename one of them")
    return names, True


def _refuse_missing(names: Sequence[str], needed: Sequence[str], where: str) -> None:
    for name in needed:
        if name not in names:
            remedy = f"its columns are {_quoted(names)}{_other_separator(names)}"
            raise UserError(f"has no column {name!r}", where=where, remedy=remedy)


def _other_separator(names: Sequence[str]) -> str:
    """What seems to part the cells of a header that has one column only."""
    found = [word for mark, word in _OTHER_SEPARATORS.items() if len(names) == 1 and mark in names[0]]
    if not found:
        return ""
    return f"; its cells seem to be parted by {found[0]}: write commas into a .csv, tabs into a .tsv"


def _row(names: Sequence[str], cells: Sequence[str], where: str) -> Row | BadLine:
    if len(cells) != len(names):
        what = f"has {len(cells)} columns where {len(names)} are expected ({_quoted(names)})"
        return BadLine(what, where, "mend the line: a separator is missing or stands inside of a text")
    return Row(dict(zip(names, cells, strict=True)), where)


def _quoted(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))


_BY_SUFFIX: dict[str, Callable[[Path, Columns], Iterator[Row | BadLine]]] = {
    ".csv": _comma_separated,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet,
    ".pq": _parquet,
}
TABLE_SUFFIXES = (".tsv", ".txt", *_BY_SUFFIX)
