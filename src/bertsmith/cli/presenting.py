"""Results on the terminal: JSON for machines; bars, highlighted texts and columns for people."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from typer import echo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

BAR_WIDTH = 30
EIGHTHS = " ▏▎▍▌▋▊▉"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


_COLLECTED: ContextVar[list[Any] | None] = ContextVar("collected", default=None)


@contextmanager
def collected() -> Iterator[list[Any]]:
    """Yield the list in which values are collected, inside, that would be printed as JSON."""
    values: list[Any] = []
    before = _COLLECTED.set(values)
    try:
        yield values
    finally:
        _COLLECTED.reset(before)


def collecting() -> bool:
    """True if values are collected: a Python function was called, and not a command."""
    return _COLLECTED.get() is not None


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, or collect it for a Python function."""
    if (values := _COLLECTED.get()) is not None:
        values.append(value)
    else:
        echo(json.dumps(value, ensure_ascii=False))


def console() -> "Console":
    """Return the console for bars and tables, which prints text without markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def bar(fraction: float) -> str:
    """Draw a fraction from 0 to 1 as a bar of fixed width, to an eighth of a character."""
    eighths = round(8 * BAR_WIDTH * min(max(fraction, 0.0), 1.0))
    drawn = "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return drawn.ljust(BAR_WIDTH)


def bars(probabilities: Iterable[tuple[float, str]]) -> "list[Text]":
    """Return a line with a bar for each probability and its text; the first line is highlighted."""
    from rich.text import Text

    lines = []
    for number, (value, what) in enumerate(probabilities):
        style = "bold green" if number == 0 else ""
        bar_style = "green" if number == 0 else "cyan"
        lines.append(
            Text.assemble((f"  {value:6.1%} ", style), (bar(value), bar_style), ("  ", ""), (what, style))
        )
    return lines


def highlighted(text: str, stretches: Sequence[tuple[int, int, str]]) -> "Text":
    """Return the text with styled spans, each given as start, end and style."""
    from rich.text import Text

    drawn = Text(text)
    for start, end, style in stretches:
        drawn.stylize(style, start, end)
    return drawn


def print_facts(facts: "Iterable[tuple[str, str]]") -> None:
    """Print a line for each fact: its name and, in a second column, the fact."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, fact in facts:
        table.add_row(name, fact)
    Console(highlight=False, markup=False, emoji=False).print(table)
