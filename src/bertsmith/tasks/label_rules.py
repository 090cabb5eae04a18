"""Convert the cell of a table to a label: a published class, a word, a number, or several words."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from bertsmith.tasks.example_types import Label

LabelRule = Callable[[Any], Label]
"""Converts a cell to a label, or raises a ValueError with the fault of the cell."""


def one_of(labels: Sequence[str]) -> LabelRule:
    """Return a rule for published classes, written as a word in any case or as the word's index."""
    by_spelling = {str(place): word for place, word in enumerate(labels)}
    by_spelling |= {word.lower(): word for word in labels}

    def rule(cell: Any) -> str:
        spelling = cell_text(cell).lower()
        if spelling not in by_spelling:
            raise ValueError(f"has the unknown label {cell!r}; the labels are {', '.join(by_spelling)}")
        return by_spelling[spelling]

    return rule


def word(cell: Any) -> str:
    """Return the cell itself as a class."""
    return cell_text(cell)


_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+\.\d+|[+-]?\d{1,3}(,\d{3}){2,}")  # 2,040.48 and 1,234,567
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),(\d{1,2}|\d{4,})")  # 2.040,48 and 2,5
_EITHER = re.compile(r"[+-]?\d{1,3},\d{3}")


def number(cell: Any) -> float:
    """Return the number in a cell; 2,040.48 and 2.040,48 are accepted too."""
    written = cell.strip() if isinstance(cell, str) else ""
    if _EITHER.fullmatch(written):
        raise ValueError(f"has {cell!r}: its comma may separate thousands or decimals")
    if _THOUSANDS.fullmatch(written):
        cell = written.replace(",", "")
    elif _DECIMAL_COMMA.fullmatch(written):
        cell = written.replace(".", "").replace(",", ".")
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or isinstance(cell, bool):
        raise ValueError(f"has {cell!r} instead of a number")
    return value


def several(separator: str) -> LabelRule:
    """Return a rule for any number of classes: a JSON list, or words with the separator between them."""

    def rule(cell: Any) -> tuple[str, ...]:
        parts = cell if isinstance(cell, list) else cell_text(cell).split(separator)
        words = (cell_text(part) for part in parts)
        return tuple(dict.fromkeys(each for each in words if each))

    return rule


def cell_text(cell: Any) -> str:
    """Return a cell's content as text without surrounding spaces; a missing cell is empty."""
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if not isinstance(cell, int | float):
        raise ValueError(f"has {cell!r} instead of a text or a number")
    return str(cell)
