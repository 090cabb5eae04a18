"""The terminal of a command: progress as a live line, log lines or JSON, and the end by a signal.

Ctrl-C, SIGTERM or a closed terminal end a command with one line.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

from typer import Exit, echo

from bertsmith.cli.presenting import collecting, print_json
from bertsmith.cli.spelling import as_now
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from bertsmith.training.callbacks import ProgressCallback


STOPPED = 130
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that are treated like Ctrl-C, sent by a launcher or a closed terminal."""
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_DRAWINGS = 10.0, 0.1
STDERR = 2
Line = Callable[[dict[str, Any]], str]
"""Function that formats a step's numbers for a person."""


@contextmanager
def reporting_stops() -> Iterator[None]:
    """Inside, a stop ends the command with one line, after cleaning up."""
    with stops_as_interrupt():
        try:
            yield
        except KeyboardInterrupt:
            echo("bertsmith: stopped; nothing was written", err=True)
            raise Exit(STOPPED) from None


@contextmanager
def stops_as_interrupt() -> Iterator[None]:
    """Inside, treat SIGTERM and SIGHUP like Ctrl-C, so that unfinished work is cleaned up.

    A training run or a server replaces this handler by its own. A signal that is ignored from the start stays
    ignored: nohup lets a command outlive its terminal.
    """
    owner = os.getpid()
    before = {number: signal.getsignal(number) for number in STOPS}
    heeded = [number for number in STOPS if before[number] is not signal.SIG_IGN]

    def heard(number: int, frame: FrameType | None) -> None:
        del frame  # an interrupt at any place
        if os.getpid() != owner:  # a forked worker, which its parent ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in heeded:  # launchers repeat the signal, which must not interrupt the clean-up
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, heard)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


@contextmanager
def reporting_output_errors() -> Iterator[None]:
    """Inside, report a failure to print as a user error."""
    if sys.stdout is None:  # the stream was closed before the start
        yield
        return
    plain, named = sys.stdout, cast(TextIO, _NamedWriting(sys.stdout))
    sys.stdout = named
    try:
        yield
    finally:
        # If the reader closed the pipe, Typer has replaced the stream by one that ends without an error.
        if sys.stdout is named:
            sys.stdout = plain


class _NamedWriting:
    """A text stream that names the standard output in its writing errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text and return the number of characters."""
        if text == "":  # Typer probes a stream with an empty text and hides a failure
            return 0
        with self._named_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write the buffer of the stream."""
        with self._named_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # a closed pipe is not an error
            raise
        except OSError as error:
            # Otherwise the stream's buffer would be written, and fail, once more at the very end.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            what = f"cannot be written ({error.strerror or error})"
            remedy = "free disk space, or choose another output"
            raise UserError(what, where="standard output", remedy=remedy) from error


class QuietProgress:
    """Progress that prints messages of signals at once, and nothing between two lines of metrics."""

    def on_progress(self, progress: float) -> None:
        """Do nothing after a step."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """Do nothing for a run with a deadline."""

    def on_signal(self, text: str) -> None:
        """Print a message past all buffers, because the signal may have interrupted a write to them."""
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())


class JsonProgress(QuietProgress):
    """Progress with each message and each line of metrics as one JSON object."""

    def on_message(self, text: str) -> None:
        """Print a message."""
        print_json({"note": as_now(text)})

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics."""
        # As in metrics.jsonl: a value that is not finite (from a broken gradient) is null in JSON.
        broken = [name for name, value in values.items() if isinstance(value, float) and not isfinite(value)]
        print_json({"progress": round(progress, 6), **values, **dict.fromkeys(broken)})


class LogProgress(QuietProgress):
    """Progress for logs: messages, and a line of metrics every few seconds."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.last_line = 0.0

    def on_message(self, text: str) -> None:
        """Print a message."""
        echo(as_now(text))

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics, unless the last one was only seconds ago."""
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES or progress >= 1:
            self.last_line = time.monotonic()
            echo(f"{progress:6.1%}  {self.line(values)}")


class BarProgress(QuietProgress):
    """Progress as one live line on a terminal, with messages above it."""

    def __init__(self, bar: "Progress", line: Line) -> None:
        self.bar, self.line = bar, line
        self.task = bar.add_task("starting", total=1.0)

    def on_message(self, text: str) -> None:
        """Print a message above the line."""
        self.bar.console.print(as_now(text), markup=False, highlight=False)

    def on_progress(self, progress: float) -> None:
        """Move the bar; a bar with a deadline moves by itself."""
        if not self.bar.tasks[0].fields.get("deadline"):
            self.bar.update(self.task, completed=progress)

    def on_deadline(self, seconds: float, total: float) -> None:
        """Let the bar move by the clock from now on, also during a long step or evaluation."""
        self.bar.update(self.task, deadline=time.monotonic() + seconds, seconds=total)

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Update the line."""
        self.bar.update(self.task, description=self.line(values))
        self.on_progress(progress)


class NotebookProgress(LogProgress):
    """Progress as one live line in the output of a notebook's cell, which also has the messages.

    It is drawn with IPython only: rich would need ipywidgets in a notebook, and draws from a thread.
    """

    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self.progress, self.text, self.deadline, self.drawn = 0.0, "starting", (inf, 1.0), 0.0
        shown = import_module("IPython.display")
        self._html = shown.HTML
        self._place = shown.display(self._html(self._drawing()), display_id=True)

    def on_progress(self, progress: float) -> None:
        """Move the bar, but not more often than is visible."""
        self.progress = progress
        if time.monotonic() - self.drawn >= SECONDS_BETWEEN_DRAWINGS:
            self.draw()

    def on_deadline(self, seconds: float, total: float) -> None:
        """Let the bar show the spent time from now on."""
        self.deadline = time.monotonic() + seconds, total

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Update the line."""
        self.text = self.line(values)
        self.on_progress(progress)

    def draw(self) -> None:
        """Draw the current line."""
        self.drawn = time.monotonic()
        self._place.update(self._html(self._drawing()))

    def _drawing(self) -> str:
        end, total = self.deadline
        spent = 1 - max(0.0, end - time.monotonic()) / total
        share = self.progress if end == inf else spent
        bar = f'<progress max="1" value="{share:.4f}" style="width: 12em"></progress>'
        return f"{bar} {share:.0%} {escape(self.text)}"


@contextmanager
def progress_display(line: Line, *, as_json: bool) -> "Iterator[ProgressCallback]":
    """Yield the progress callback for a terminal, a notebook, a log or a program."""
    as_json = as_json and not collecting()
    if not as_json and _in_notebook():
        notebook = NotebookProgress(line)
        try:
            yield notebook
        finally:
            notebook.draw()
        return
    if as_json or not sys.stderr.isatty():
        yield JsonProgress() if as_json else LogProgress(line)
        return
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    class ClockedProgress(Progress):
        """A bar that reads the clock each time it is drawn, if its task has a deadline."""

        def get_renderables(self) -> Iterator[RenderableType]:
            for task in self.tasks:
                if deadline := task.fields.get("deadline"):
                    remaining = max(0.0, deadline - time.monotonic())
                    task.completed = 1 - remaining / task.fields["seconds"]
            yield from super().get_renderables()

    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TextColumn("{task.description}"))
    with ClockedProgress(*columns, console=Console(stderr=True)) as bar:
        yield BarProgress(bar, line)


def _in_notebook() -> bool:
    """True if this runs in a notebook: in Jupyter, Colab or an editor."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
