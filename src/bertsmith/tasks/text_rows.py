"""From rows of a table to text examples."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from bertsmith.tasks.examples import BadLabel, BadLine, Example, TextExample
from bertsmith.tasks.labels import LabelRule, Undecided, cell_text
from bertsmith.tasks.tables import Columns, Row, rows_of
from bertsmith.tasks.task import Reader

_MEND, _FILL = "mend the line", "fill or remove the line"


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """Where the label stands and how it is read."""

    name: str
    rule: LabelRule
    wanted: Literal["always", "if told"] = "always"
    """if told: as in test sets, a file without the column or a row without a label is taken."""
    untold: tuple[str, ...] = ("",)
    """What stands in the place of a label that is kept secret."""
    undecided: tuple[str, ...] = ()
    """What stands there if the annotators disagreed."""


@dataclass(frozen=True, slots=True)
class TextColumns:
    """Which columns of a table make a text example."""

    texts: tuple[str] | tuple[str, str]
    label: LabelColumn
    key: str = ""
    """The column of the ids; where there is none, an example's id is its place, counted from 0."""
    keyed: Literal["always", "if told"] = "if told"
    """Whether a file without the column of the ids is refused."""
    headless: tuple[str, ...] = ()
    """The names of the columns where a file has no header."""
    part: tuple[str, str] | None = None
    """Column and value of the rows that belong to the split, where one file holds all splits."""


def text_reader(columns: TextColumns) -> Reader:
    """A reader of text examples from a table."""
    label = (columns.label.name,) if columns.label.wanted == "always" else ()
    part = columns.part[:1] if columns.part else ()
    key = (columns.key,) if columns.keyed == "always" else ()
    table = Columns((*columns.texts, *label, *part, *key), columns.headless)

    def read(path: Path) -> Iterator[TextExample | BadLine]:
        for place, row in enumerate(rows_of(path, table)):
            if isinstance(row, BadLine):
                yield row
            elif _belongs(row, columns.part):
                yield _example(row, columns, place)

    return read


def every_tenth(reader: Reader) -> Reader:
    """A reader of every tenth line only: the development set of a file that comes without one."""

    def read(path: Path) -> Iterator[Example | BadLine]:
        return islice(reader(path), 9, None, 10)

    return read


def all_but_every_tenth(reader: Reader) -> Reader:
    """A reader of what `every_tenth` leaves."""

    def read(path: Path) -> Iterator[Example | BadLine]:
        return (example for place, example in enumerate(reader(path)) if place % 10 != 9)

    return read


def _belongs(row: Row, part: tuple[str, str] | None) -> bool:
    return part is None or str(row.values[part[0]]).strip() == part[1]


def _example(row: Row, columns: TextColumns, place: int) -> TextExample | BadLine:
    try:
        texts = [_text(row, column) for column in columns.texts]
        if not any(map(str.strip, texts)):
            return BadLine(f"has no text in {' and '.join(columns.texts)}", row.where, _FILL)
        key = cell_text(row.values.get(columns.key)) or str(place)
    except ValueError as error:
        return BadLine(str(error), row.where, _MEND)
    example = TextExample(key, texts[0] if len(texts) == 1 else (texts[0], texts[1]), None, row.where)
    return _labelled(example, row, columns.label)


def _text(row: Row, column: str) -> str:
    cell = row.values[column]
    return cell if isinstance(cell, str) else cell_text(cell)  # a text keeps the spaces around it


def _labelled(example: TextExample, row: Row, column: LabelColumn) -> TextExample | BadLabel:
    if column.wanted == "if told" and column.name not in row.values:
        return example
    cell = row.values.get(column.name)
    try:
        spelling = "" if isinstance(cell, list) else cell_text(cell)
        if spelling in column.undecided:
            what = f"has no gold label ({spelling}): the annotators disagreed"
            return Undecided(what, row.where, "nothing is to be done", example)
        if isinstance(cell, list) or spelling not in column.untold:
            return replace(example, label=column.rule(cell))
    except ValueError as error:
        return BadLabel(str(error), row.where, _MEND, example)
    if column.wanted == "always":
        return BadLabel(f"has no label in {column.name!r}", row.where, _FILL, example)
    return example
