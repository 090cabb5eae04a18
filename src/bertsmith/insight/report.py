"""The report of a study or an analysis: tables as text, all numbers as JSON, a picture and a view."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertsmith.core.files import atomic_folder, write_text
from bertsmith.insight.html_view import write_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | None
Draw = Callable[["Figure"], None]
UNTRAINED_TOO = "*"
"""Mark of a finding that random weights also show."""

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns, with a title above and notes below."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Format the table for a person: the first column flush left, the others flush right."""
        lines = [list(self.columns), *self.shown_rows()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        written = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in lines
        ]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, "", written[0], rule, *written[1:], *(f"  {n}" for n in self.notes)])

    def markdown(self) -> str:
        """Format the table as Markdown."""
        lines = [list(self.columns), ["---"] * len(self.columns), *self.shown_rows()]
        rows = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return "\n".join([f"## {self.title}", "", *rows, "", *(f"- {note}" for note in self.notes)])

    def shown_rows(self) -> list[list[str]]:
        """Return the cells as text."""
        return [[_shown(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True, slots=True)
class View:
    """A script of `insight/page`, and the data that it shows above the tables."""

    script: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Tables, their numbers, a function that draws the picture, and an optional view."""

    name: str
    """Name of the report's files: name.txt, name.json, name.png, name.html."""
    tables: tuple[Table, ...]
    values: Mapping[str, Any]
    draw: Draw
    size: tuple[float, float] = (12, 7)
    """Width and height of the picture, in inches."""
    view: View | None = None

    def text(self) -> str:
        """Format all tables."""
        return "\n\n".join(table.text() for table in self.tables) + "\n"

    def markdown(self) -> str:
        """Format all tables as Markdown."""
        return "\n\n".join(table.markdown() for table in self.tables) + "\n"


def write_report(report: Report, out: Path) -> None:
    """Write a report into a folder, which may contain others: the tables, then the picture and the view.

    The numbers may have taken minutes: they are kept even if a picture or a view fails.
    """
    values = json.dumps(plain(report.values), ensure_ascii=False, allow_nan=False)
    with atomic_folder(out) as folder:
        write_text(folder / f"{report.name}.txt", report.text())
        write_text(folder / f"{report.name}.json", values + "\n")
    with atomic_folder(out) as folder:
        _draw(report, folder / f"{report.name}.png")
        if (view := report.view) is not None:
            data, title = view_data(report, view), report.tables[0].title
            write_view(folder / f"{report.name}.html", view.script, data, title=title)


def view_data(report: Report, view: View) -> dict[str, Any]:
    """Return the data of a view's page: the view's data, and the tables below."""
    tables = [
        {"title": each.title, "columns": each.columns, "rows": each.shown_rows(), "notes": each.notes}
        for each in report.tables
    ]
    return {**plain(view.data), "tables": tables}


def head_name(layer: int, head: int) -> str:
    """Name a head as the paper does, with layer and head counted from 1: 7-6."""
    return f"{layer + 1}-{head + 1}"


def plain(value: Any) -> Any:
    """Convert a value for JSON: arrays become lists; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return round(value, 7) if math.isfinite(value) else None
    return value


def _draw(report: Report, file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("the picture is not drawn: pip install bertsmith[plots]")
        return
    figure = Figure(figsize=report.size)
    report.draw(figure)
    figure.savefig(file, format="png", dpi=90)


def _shown(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
