"""How a table is written: what parts its cells, its encoding, its columns where no header names them."""

import csv
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bertsmith.core.errors import UserError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""What a header may show between its cells, likeliest first, and how it is called."""
_SPELLED = {"tab": "\t", "\\t": "\t"}

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class TableFormat:
    """What a table does not say of itself."""

    delimiter: str = ""
    """What parts the cells; nothing: a tab, or in a .csv what its header shows."""
    encoding: str = ""
    """A name that Python knows; nothing: UTF-8."""
    columns: tuple[str, ...] = ()
    """The names of the columns, where no header tells them."""

    @classmethod
    def parse(cls, *, delimiter: str = "", encoding: str = "", columns: str = "") -> "TableFormat":
        """The format in the words of the command line: a character or `tab`, names with commas between."""
        mark = _SPELLED.get(delimiter, delimiter)
        if len(mark) > 1 or mark in ('"', "\n", "\r"):
            remedy = "give one character, such as ';', or tab"
            raise UserError(f"{delimiter!r} cannot part cells", where="--delimiter", remedy=remedy)
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")
        except LookupError as error:
            remedy = "name one such as cp1252, latin-1 or utf-16"
            raise UserError(f"unknown encoding {encoding!r}", where="--encoding", remedy=remedy) from error
        names = tuple(name.strip() for name in columns.split(",")) if columns else ()
        if not all(names) or len(set(names)) < len(names):
            remedy = "name every column once, in the order of the file: --columns text,label"
            raise UserError(f"{columns!r} does not name columns", where="--columns", remedy=remedy)
        return cls(mark, encoding, names)


def header_delimiter(path: Path, line: str, needed: Sequence[str], *, headless: Sequence[str]) -> str:
    """What parts the cells of a first line: what gives the needed columns, or as many as are named.

    Whatever is not a comma is reported.
    """
    parsed = {mark: next(csv.reader([line], delimiter=mark), []) for mark in DELIMITERS}
    cells = {mark: [cell.strip() for cell in row] for mark, row in parsed.items()}
    if needed:
        fitting = [mark for mark, names in cells.items() if set(needed) <= set(names)]
    else:
        fitting = [mark for mark, names in cells.items() if len(names) > 1]
    if not fitting and headless:
        fitting = [mark for mark, values in cells.items() if len(values) == len(headless)]
    if not fitting and not headless:  # a column that is missing is best told beside those that are there
        fitting = [max(cells, key=lambda mark: (len(set(needed) & set(cells[mark])), len(cells[mark])))]
    if not fitting or fitting[0] == ",":
        return ","
    _report_once(f"{path}: its first line shows {DELIMITERS[fitting[0]]} between its cells, and is read so")
    return fitting[0]


@cache
def _report_once(message: str) -> None:
    log.warning("%s", message)
