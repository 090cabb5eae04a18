"""Every text in a task's file, whatever its format: cells of a table, strings of JSON, lines of text."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertsmith.corpus.parquet import parquet_strings
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import COMPRESSED_SUFFIXES, open_text_bytes

_LETTER = re.compile(r"[^\W\d_]")
_NOT_SPACE = re.compile(r"\S")


def task_strings(path: Path) -> list[str]:
    """The different strings of a task's file that hold a letter, in the order of their first appearance."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path
    suffix = name.suffix.lower()
    if suffix in (".parquet", ".pq"):
        strings = parquet_strings(path)
    else:
        strings = _BY_SUFFIX.get(suffix, _cells)(_decoded(path), str(path))
    return list(dict.fromkeys(string for string in strings if _LETTER.search(string)))


def _decoded(path: Path) -> str:
    with open_text_bytes(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8 text (byte {error.start})"
        raise UserError(what, where=f"{path}:{line}", remedy="convert it to UTF-8 (iconv)") from error


def _cells(text: str, where: str) -> Iterator[str]:
    """Lines of plain text, and cells where tabs part a line; in GLUE's tables a quote is a character."""
    del where  # any text is a table of one column
    for line in text.split("\n"):
        yield from line.split("\t")


def _quoted_cells(text: str, where: str) -> Iterator[str]:
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            yield from row
    except csv.Error as error:
        remedy = "mend the line, or save the table as TSV"
        raise UserError(f"is not CSV ({error})", where=f"{where}:{rows.line_num}", remedy=remedy) from error


def _json_strings(text: str, where: str) -> Iterator[str]:
    """Strings of one JSON value or of many, one a line."""
    decoder, start = json.JSONDecoder(), 0
    while (found := _NOT_SPACE.search(text, start)) is not None:
        start = found.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, start) + 1
            what, remedy = f"is not valid JSON ({error})", "mend the file or leave it out"
            raise UserError(what, where=f"{where}:{line}", remedy=remedy) from error
        yield from _leaves(value)
        start = end


def _leaves(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting.extend(reversed(value.values() if isinstance(value, dict) else value))


_BY_SUFFIX: dict[str, Callable[[str, str], Iterator[str]]] = {
    ".csv": _quoted_cells,
    ".json": _json_strings,
    ".jsonl": _json_strings,
    ".ndjson": _json_strings,
}
