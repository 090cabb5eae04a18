"""Read the rows of a table in TSV, CSV, JSONL or Parquet; an unusable row becomes a BadLine.

- tsv (and any other name): cells are separated by tabs, and a quote is a character, as in GLUE
- csv, or any table with a given delimiter: RFC 4180, so a quoted cell may have commas, quotes and line ends;
  the header may have semicolons, tabs or bars instead of commas
- jsonl, json: one JSON object per line, or one array of objects
- parquet: each row is a row

All but parquet may be compressed with gzip, bzip2, xz or Zstandard.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES, check_regular, open_text_bytes
from bertsmith.tasks.example_types import (
    BadLabel,
    BadLine,
    Example,
    Reader,
    TextExample,
    Undecided,
)
from bertsmith.tasks.label_rules import LabelRule, cell_text
from bertsmith.tasks.table_format import DELIMITERS, TableFormat, header_delimiter

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MAX_CELL = 1 << 24  # by default Python's csv rejects cells above 128 KiB, and documents are longer
_MAX_LINE = 1 << 25
_MAX_RECORD_LINES = 100_000
_SHOWN_COLUMNS = 20
_SHOWN_CHARACTERS = 60
_ROWS_AT_ONCE = 4096
_TORN = re.compile(r"[\udc80-\udcff]")  # single bytes as decoded by Python (PEP 383)
NOT_UTF8, CONVERT = "is not UTF-8 text", "convert it to UTF-8 (iconv), or name its `encoding`"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the cell of each column."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class Columns:
    """Requirements for the columns of a table."""

    needed: tuple[str, ...] = ()
    headless: tuple[str, ...] = ()
    """Names of the columns if the first line does not name them; such a table does not need a header."""


ANY_COLUMNS, USUAL_FORMAT = Columns(), TableFormat()


def rows_of(
    path: Path, columns: Columns = ANY_COLUMNS, form: TableFormat = USUAL_FORMAT
) -> Iterator[Row | BadLine]:
    """Return the rows of a table in order."""
    suffix = bare_suffix(path)
    if suffix in _SELF_DESCRIBED:
        if form.delimiter or form.columns:
            what, remedy = f"a {suffix} file already names its columns", "remove `delimiter` and `columns`"
            raise UserError(what, where=str(path), remedy=remedy)
        return _SELF_DESCRIBED[suffix](path, columns, form)
    if form.columns:
        columns = replace(columns, headless=form.columns)
    if suffix == ".csv" or form.delimiter not in ("", "\t"):
        return _quoted(path, columns, form)
    return _tab_separated(path, columns, form)


def column_names(path: Path, form: TableFormat = USUAL_FORMAT) -> tuple[str, ...]:
    """Return the columns of a table, from its first row; empty if it is empty."""
    if form.columns:
        return form.columns
    first = next((row for row in rows_of(path, form=form) if isinstance(row, Row)), None)
    return () if first is None else tuple(first.values)


def bare_suffix(path: Path) -> str:
    """Return the suffix of the format: .csv for train.csv and for train.csv.gz."""
    packed = path.suffix.lower() in COMPRESSED_SUFFIXES
    return (path.with_suffix("") if packed else path).suffix.lower()


def _tab_separated(path: Path, columns: Columns, form: TableFormat) -> Iterator[Row | BadLine]:
    names: tuple[str, ...] = ()
    for number, line in numbered_lines(path, form.encoding):
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


def _lines_of_records(path: Path, form: TableFormat, *, begun: Callable[[], int]) -> Iterator[str]:
    """Yield the lines of a table; raise at a record with too many lines, given the lines before it."""
    for number, line in numbered_lines(path, form.encoding):
        if number - begun() > _MAX_RECORD_LINES:  # the largest cell has room for millions
            what, where = f"has a cell of more than {_MAX_RECORD_LINES:,} lines", f"{path}:{begun() + 1}"
            raise UserError(what, where=where, remedy="close its quotes, or split its text")
        yield line.decode("utf-8", errors="surrogateescape")


def _quoted(path: Path, columns: Columns, form: TableFormat) -> Iterator[Row | BadLine]:
    csv.field_size_limit(_MAX_CELL)
    # Bytes that are not UTF-8 become lone surrogates, which never look like a comma, a quote or a line end.
    # So the records around them can still be separated.
    begun = 0
    lines = _lines_of_records(path, form, begun=lambda: begun)
    first = next(lines, "")
    delimiter = form.delimiter or header_delimiter(path, first, columns.needed, headless=columns.headless)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    names: tuple[str, ...] = ()
    while True:
        begun = reader.line_num
        where = f"{path}:{begun + 1}"  # start of the record; a cell may contain line ends
        try:
            cells = next(reader, None)
        except csv.Error as error:
            remedy = 'correct the quotes: write a cell with a quote as "quoted", and double a quote in it'
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


def _json(path: Path, columns: Columns, form: TableFormat) -> Iterator[Row | BadLine]:
    first = True
    for where, values in _json_objects(path, form):
        if isinstance(values, BadLine):
            yield values
            continue
        if first:
            _refuse_missing(tuple(values), columns.needed, where)
        first = False
        lacking = [name for name in columns.needed if name not in values]
        if lacking:
            what = f"lacks {_listed(lacking)}, it has {_listed(values)}"
            yield BadLine(what, where, "write every field in every line")
        else:
            yield Row(values, where)


def _json_objects(path: Path, form: TableFormat) -> Iterator[tuple[str, dict[str, Any] | BadLine]]:
    """Yield each object of a file with its location: a line, or an item of one array."""
    filled = ((number, line) for number, line in numbered_lines(path, form.encoding) if line.strip())
    start = next(filled, None)
    if start is None:
        return
    lines: Iterable[tuple[int, bytes]] = chain([start], filled)
    if start[1].lstrip().startswith(b"["):
        held = list(lines)
        try:
            items = json.loads(b"".join(line for _, line in held))
        except (ValueError, RecursionError) as error:
            if bare_suffix(path) == ".json":
                remedy = "write one array of objects, or one object per line"
                raise UserError(f"is not valid JSON ({error})", where=str(path), remedy=remedy) from error
        else:
            for number, item in enumerate(items, 1):
                where = f"{path} item {number}"
                is_object = isinstance(item, dict)
                yield where, item if is_object else BadLine("is not a JSON object", where, "write objects")
            return
        lines = held  # JSON lines that happen to begin with an array
    for number, line in lines:
        where = f"{path}:{number}"
        yield where, _json_object(line, where)


def _parquet(path: Path, columns: Columns, form: TableFormat) -> Iterator[Row | BadLine]:
    if form.encoding:
        raise UserError("Parquet files are always UTF-8", where=str(path), remedy="remove `encoding`")
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
    except (ArrowException, OSError, ValueError) as error:
        what = f"is not a whole Parquet file ({error})"
        raise UserError(what, where=str(path), remedy="download it again") from error


def numbered_lines(path: Path, encoding: str = "") -> Iterator[tuple[int, bytes]]:
    """Yield the lines in UTF-8 with their numbers, without a byte order mark."""
    if encoding:
        yield from _recoded_lines(path, encoding)
        return
    check_regular(path, remedy="write it to a file first")
    with open_text_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), 1):
            _check_line(line, f"{path}:{number}")
            if number == 1 and line.startswith(_UTF16_MARKS):
                remedy = "convert it: iconv -f UTF-16 -t UTF-8; for your own tables, use `encoding=utf-16`"
                raise UserError("is UTF-16 text", where=str(path), remedy=remedy)
            yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


def _recoded_lines(path: Path, encoding: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    with io.TextIOWrapper(open_text_bytes(path), encoding=encoding, newline="\n") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), 1):
                _check_line(line, f"{path}:{number}")
                yield number, (line.removeprefix("\ufeff") if number == 1 else line).encode("utf-8")
        except UnicodeError as error:
            what = f"is not {encoding} text ({error})"
            remedy = "name another `encoding`, or remove it for UTF-8"
            raise UserError(what, where=f"{path}:{number + 1}", remedy=remedy) from error


def _check_line(line: str | bytes, where: str) -> None:
    """Raise at a very long line: a small compressed file can contain gigabytes without a line end."""
    if len(line) >= _MAX_LINE:
        what = f"has a line of {_MAX_LINE >> 20} MiB or more"
        raise UserError(what, where=where, remedy="split its texts, or check that it is a table")


def is_torn(cells: Sequence[str]) -> bool:
    """True if a cell has bytes that are not UTF-8, read as lone surrogates."""
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
        return BadLine(f"is not valid JSON ({error})", where, "correct it: one object per line")
    if not isinstance(value, dict):
        return BadLine("is not a JSON object", where, "write one object per line")
    return value


def _names(cells: Sequence[str], columns: Columns, where: str) -> tuple[tuple[str, ...], bool]:
    """Return the names of the columns, and True if the first line is a header."""
    if is_torn(cells):
        raise UserError(NOT_UTF8, where=where, remedy=CONVERT)
    names = tuple(cell.strip() for cell in cells)
    is_header = names == columns.headless or (columns.needed and set(columns.needed) <= set(names))
    if columns.headless and not is_header:
        _refuse_missing(columns.headless, columns.needed, where)
        return columns.headless, False
    _refuse_missing(names, columns.needed, where, advice="; for a file without a header, use `columns=a,b,c`")
    twice = sorted(name for name in columns.needed if names.count(name) > 1)
    if twice:
        raise UserError(f"has two columns {twice[0]!r}", where=where, remedy="rename one of them")
    return names, True


def _refuse_missing(names: Sequence[str], needed: Sequence[str], where: str, *, advice: str = "") -> None:
    for name in needed:
        if name not in names:
            remedy = f"its columns are {_listed(names)}{_other_delimiter(names) or advice}"
            raise UserError(f"lacks the column {name!r}", where=where, remedy=remedy)


def _other_delimiter(names: Sequence[str]) -> str:
    """Return advice about the delimiter that a header with a single column seems to have."""
    found = [mark for mark in DELIMITERS if len(names) == 1 and mark in names[0]]
    if not found:
        return ""
    spelled = "tab" if found[0] == "\t" else f"'{found[0]}'"
    return f"; its cells seem to be separated by {DELIMITERS[found[0]]}: use `delimiter={spelled}`"


def _row(names: Sequence[str], cells: Sequence[str], where: str) -> Row | BadLine:
    if len(cells) != len(names):
        what = f"has {len(cells)} columns instead of {len(names)} ({_listed(names)})"
        remedy = "correct the line: a separator is missing, or a text contains one"
        if len(names) == 1:
            remedy = "quote texts that contain the delimiter, or use another `delimiter`"
        return BadLine(what, where, remedy)
    return Row(dict(zip(names, cells, strict=True)), where)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the names for an error message, as many as are readable."""
    shown = ", ".join(repr(name[:_SHOWN_CHARACTERS]) for name in islice(names, _SHOWN_COLUMNS))
    more = len(names) - _SHOWN_COLUMNS
    return f"{shown} and {more} more" if more > 0 else shown


_SELF_DESCRIBED: dict[str, Callable[[Path, Columns, TableFormat], Iterator[Row | BadLine]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".parquet": _parquet,
    ".pq": _parquet,
}
"""Formats that name the column of every cell."""
TABLE_SUFFIXES = (".tsv", ".txt", ".csv", *_SELF_DESCRIBED)


_MEND, _FILL = "correct the line", "fill or remove the line"


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """The column of the label, and the rule for reading it."""

    name: str
    rule: LabelRule
    wanted: Literal["always", "if given"] = "always"
    """if given: as in test sets, a missing column or a row without a label is accepted."""
    unlabelled: tuple[str, ...] = ("",)
    """Cells that mean a withheld label."""
    undecided: tuple[str, ...] = ()
    """Cells that mean that the annotators disagreed."""


@dataclass(frozen=True, slots=True)
class TextColumns:
    """The columns of a table that make a text example."""

    texts: tuple[str] | tuple[str, str]
    label: LabelColumn
    key: str = ""
    """Column of the ids; without one, an example's id is its row number from 0."""
    keyed: Literal["always", "if given"] = "if given"
    """always: reject a file without the column of the ids."""
    headless: tuple[str, ...] = ()
    """Names of the columns in a file without a header."""
    part: tuple[str, str] | None = None
    """Column and value of the rows that belong to the split, if one file has all splits."""


def text_reader(columns: TextColumns, form: TableFormat = USUAL_FORMAT) -> Reader:
    """Return a reader of text examples from a table."""
    label = (columns.label.name,) if columns.label.wanted == "always" else ()
    part = columns.part[:1] if columns.part else ()
    key = (columns.key,) if columns.keyed == "always" else ()
    table = Columns((*columns.texts, *label, *part, *key), columns.headless)

    def read(path: Path) -> Iterator[TextExample | BadLine]:
        for place, row in enumerate(rows_of(path, table, form)):
            if isinstance(row, BadLine):
                yield row
            elif columns.part is None or str(row.values[columns.part[0]]).strip() == columns.part[1]:
                yield _example(row, columns, place)

    return read


def every_tenth(reader: Reader) -> Reader:
    """Return a reader of every tenth line only, a development set for files without one."""

    def read(path: Path) -> Iterator[Example | BadLine]:
        return islice(reader(path), 9, None, 10)

    return read


def all_but_every_tenth(reader: Reader) -> Reader:
    """Return a reader of the lines that `every_tenth` omits."""

    def read(path: Path) -> Iterator[Example | BadLine]:
        return (example for place, example in enumerate(reader(path)) if place % 10 != 9)

    return read


def _example(row: Row, columns: TextColumns, place: int) -> TextExample | BadLine:
    try:
        texts = [_text(row, column) for column in columns.texts]
        if not any(map(str.strip, texts)):
            return BadLine(f"lacks a text in {' and '.join(columns.texts)}", row.where, _FILL)
        key = cell_text(row.values.get(columns.key)) or str(place)
    except ValueError as error:
        return BadLine(str(error), row.where, _MEND)
    example = TextExample(key, texts[0] if len(texts) == 1 else (texts[0], texts[1]), None, row.where)
    return _labelled(example, row, columns.label)


def _text(row: Row, column: str) -> str:
    cell = row.values[column]
    return cell if isinstance(cell, str) else cell_text(cell)  # a text keeps its surrounding spaces


def _labelled(example: TextExample, row: Row, column: LabelColumn) -> TextExample | BadLabel:
    if column.wanted == "if given" and column.name not in row.values:
        return example
    cell = row.values.get(column.name)
    try:
        spelling = "" if isinstance(cell, list) else cell_text(cell)
        if spelling in column.undecided:
            what = f"lacks a gold label ({spelling}): the annotators disagreed"
            return Undecided(what, row.where, "nothing needs to be done", example)
        if isinstance(cell, list) or spelling not in column.unlabelled:
            return replace(example, label=column.rule(cell))
    except ValueError as error:
        return BadLabel(str(error), row.where, _MEND, example)
    if column.wanted == "always":
        return BadLabel(f"lacks a label in {column.name!r}", row.where, _FILL, example)
    return example
