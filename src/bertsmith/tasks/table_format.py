"""The format of a table: the delimiter of its cells, its encoding, and its columns if it lacks a header."""

import csv
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bertsmith.core.errors import UserError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""Delimiters to look for in a header, most likely first, with their names."""
_SPELLED = {"tab": "\t", "\\t": "\t"}

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class TableFormat:
    """Properties of a table that the file itself does not state."""

    delimiter: str = ""
    """Delimiter of the cells; empty: a tab, or for a .csv the one found in its header."""
    encoding: str = ""
    """Encoding, as Python names it; empty: UTF-8."""
    columns: tuple[str, ...] = ()
    """Names of the columns, for a file without a header."""

    @classmethod
    def parse(
        cls, *, delimiter: str = "", encoding: str = "", columns: str | Sequence[str] = ""
    ) -> "TableFormat":
        """Parse the options of the command line: a character or `tab`, column names with commas between."""
        mark = _SPELLED.get(delimiter, delimiter)
        if len(mark) > 1 or mark in ('"', "\n", "\r"):
            remedy = "give one character, for example ';', or tab"
            raise UserError(f"{delimiter!r} cannot separate cells", key="delimiter", remedy=remedy)
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")
        except LookupError as error:
            remedy = "name one of Python's, for example cp1252, latin-1 or utf-16"
            raise UserError(f"unknown encoding {encoding!r}", key="encoding", remedy=remedy) from error
        parts = columns.split(",") if isinstance(columns, str) and columns else columns
        names = tuple(name.strip() for name in parts)
        if not all(names) or len(set(names)) < len(names):
            remedy = "name every column once, in the order of the file: `columns=text,label`"
            raise UserError(f"{columns!r} does not name columns", key="columns", remedy=remedy)
        return cls(mark, encoding, names)


def header_delimiter(path: Path, line: str, needed: Sequence[str], *, headless: Sequence[str]) -> str:
    """Detect the delimiter in a first line: it must yield the needed columns, or as many as `headless`.

    A delimiter other than a comma is reported.
    """
    parsed = {mark: next(csv.reader([line], delimiter=mark), []) for mark in DELIMITERS}
    cells = {mark: [cell.strip() for cell in row] for mark, row in parsed.items()}
    if needed:
        fitting = [mark for mark, names in cells.items() if set(needed) <= set(names)]
    else:
        fitting = [mark for mark, names in cells.items() if len(names) > 1]
    if not fitting and headless:
        fitting = [mark for mark, values in cells.items() if len(values) == len(headless)]
    if not fitting and not headless:  # the error about a missing column should list the others
        fitting = [max(cells, key=lambda mark: (len(set(needed) & set(cells[mark])), len(cells[mark])))]
    if not fitting or fitting[0] == ",":
        return ","
    _report_once(
        f"{path}: its first line has {DELIMITERS[fitting[0]]} between its cells, the detected delimiter"
    )
    return fitting[0]


@cache
def _report_once(message: str) -> None:
    log.warning("%s", message)
