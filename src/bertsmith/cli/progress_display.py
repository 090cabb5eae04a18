"""How commands that run for long show their progress: a live line, log lines, or JSON."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from typing import TYPE_CHECKING, Any

from typer import echo

if TYPE_CHECKING:
    from rich.progress import Progress

    from bertsmith.training.callbacks import ProgressCallback

SECONDS_BETWEEN_LINES = 10.0
STDERR = 2

Line = Callable[[dict[str, Any]], str]
"""From a step's numbers to what a person reads."""


class SignalMessages:
    """Passes on at once what a signal brings."""

    def on_signal(self, text: str) -> None:
        """Print a message past all buffers: their owner may have been interrupted while it filled them."""
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())


class JsonProgress(SignalMessages):
    """Prints each message and each line of metrics as one JSON object."""

    def on_message(self, text: str) -> None:
        """Print a message."""
        echo(json.dumps({"note": text}))

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics."""
        # As in metrics.jsonl: a number that is none (a gradient that broke) is null, for JSON knows no NaN.
        broken = [name for name, value in values.items() if isinstance(value, float) and not isfinite(value)]
        echo(json.dumps({"progress": round(progress, 6), **values, **dict.fromkeys(broken)}))


class LogProgress(SignalMessages):
    """Prints messages, and now and then a line of metrics, for logs."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.last_line = 0.0

    def on_message(self, text: str) -> None:
        """Print a message."""
        echo(text)

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics, unless the last one is only seconds old."""
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES or progress >= 1:
            self.last_line = time.monotonic()
            echo(f"{progress:6.1%}  {self.line(values)}")


class BarProgress(SignalMessages):
    """Keeps one live line on a terminal, with messages above it."""

    def __init__(self, bar: "Progress", line: Line) -> None:
        self.bar, self.line = bar, line
        self.task = bar.add_task("starting", total=1.0)

    def on_message(self, text: str) -> None:
        """Print a message above the line."""
        self.bar.console.print(text, markup=False, highlight=False)

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Renew the line."""
        self.bar.update(self.task, completed=progress, description=self.line(values))


@contextmanager
def progress_display(line: Line, *, as_json: bool) -> "Iterator[ProgressCallback]":
    """The progress callback that suits a terminal, a log or a machine."""
    if as_json or not sys.stderr.isatty():
        yield JsonProgress() if as_json else LogProgress(line)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield BarProgress(bar, line)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
