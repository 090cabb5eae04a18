"""What a command does with its terminal: how it shows progress, and how it ends when it is told to stop.

Progress is a live line, log lines or JSON. Ctrl-C, SIGTERM or a closed terminal end a command with one line.
"""

import json
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

from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from bertsmith.training.callbacks import ProgressCallback


STOPPED = 130
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""What is taken as Ctrl-C: the wish of a launcher, and a terminal that is closed."""
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_DRAWINGS = 10.0, 0.1
STDERR = 2
Line = Callable[[dict[str, Any]], str]
"""From a step's numbers to what a person reads."""


@contextmanager
def reporting_stops() -> Iterator[None]:
    """A stop inside ends the command with one line, once what was begun is cleaned up."""
    with stops_as_interrupt():
        try:
            yield
        except KeyboardInterrupt:
            echo("bertsmith: stopped; nothing was written", err=True)
            raise Exit(STOPPED) from None


@contextmanager
def stops_as_interrupt() -> Iterator[None]:
    """While it is open, SIGTERM and SIGHUP are taken as Ctrl-C, so that what was begun is cleaned up.

    What has a way of its own to stop, such as a training run or a server, puts its handler in place of it.
    One that is ignored from the start stays so: nohup lets a command outlive its terminal.
    """
    owner = os.getpid()
    before = {number: signal.getsignal(number) for number in STOPS}
    heeded = [number for number in STOPS if before[number] is not signal.SIG_IGN]

    def heard(number: int, frame: FrameType | None) -> None:
        del frame  # wherever it is heard, it is an interrupt
        if os.getpid() != owner:  # a forked worker, which nobody but its parent sends home
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in heeded:  # launchers repeat it, and cleaning up is not to be cut short
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
    """While it is open, what cannot be printed is reported as an error that the user can fix."""
    if sys.stdout is None:  # closed before the start: whoever prints knows
        yield
        return
    plain, named = sys.stdout, cast(TextIO, _NamedWriting(sys.stdout))
    sys.stdout = named
    try:
        yield
    finally:
        # Where a reader left early, Typer has put a stream there that ends without an error.
        if sys.stdout is named:
            sys.stdout = plain


class _NamedWriting:
    """A text stream whose writing errors say that it is the standard output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """How many characters were written."""
        if text == "":  # Typer tries a stream with nothing, and where that fails it keeps it to itself
            return 0
        with self._named_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what the stream holds."""
        with self._named_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # a reader who has seen enough, which is no error
            raise
        except OSError as error:
            # What the stream still holds would be tried, and fail, once more at the very end.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            what = f"cannot be written ({error.strerror or error})"
            remedy = "make room where it goes, or send it elsewhere"
            raise UserError(what, where="standard output", remedy=remedy) from error


class QuietProgress:
    """Passes on at once what a signal brings, and says nothing between two lines of metrics."""

    def on_progress(self, progress: float) -> None:
        """A step is done."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """The run goes by the clock."""

    def on_signal(self, text: str) -> None:
        """Print a message past all buffers: their owner may have been interrupted while it filled them."""
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())


class JsonProgress(QuietProgress):
    """Prints each message and each line of metrics as one JSON object."""

    def on_message(self, text: str) -> None:
        """Print a message."""
        echo(json.dumps({"note": text}))

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Print a line of metrics."""
        # As in metrics.jsonl: a number that is none (a gradient that broke) is null, for JSON knows no NaN.
        broken = [name for name, value in values.items() if isinstance(value, float) and not isfinite(value)]
        echo(json.dumps({"progress": round(progress, 6), **values, **dict.fromkeys(broken)}))


class LogProgress(QuietProgress):
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


class BarProgress(QuietProgress):
    """Keeps one live line on a terminal, with messages above it."""

    def __init__(self, bar: "Progress", line: Line) -> None:
        self.bar, self.line = bar, line
        self.task = bar.add_task("starting", total=1.0)

    def on_message(self, text: str) -> None:
        """Print a message above the line."""
        self.bar.console.print(text, markup=False, highlight=False)

    def on_progress(self, progress: float) -> None:
        """Move the bar; one that goes by the clock moves by itself."""
        if not self.bar.tasks[0].fields.get("deadline"):
            self.bar.update(self.task, completed=progress)

    def on_deadline(self, seconds: float, total: float) -> None:
        """Let the bar move by the clock from now on, however long a step or an evaluation takes."""
        self.bar.update(self.task, deadline=time.monotonic() + seconds, seconds=total)

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Renew the line."""
        self.bar.update(self.task, description=self.line(values))
        self.on_progress(progress)


class NotebookProgress(LogProgress):
    """Keeps one live line in the output of a notebook's cell, where messages are printed, too.

    It is drawn by IPython alone: what rich draws in a notebook needs ipywidgets, and comes from a thread.
    """

    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self.progress, self.text, self.deadline, self.drawn = 0.0, "starting", (inf, 1.0), 0.0
        shown = import_module("IPython.display")
        self._html = shown.HTML
        self._place = shown.display(self._html(self._drawing()), display_id=True)

    def on_progress(self, progress: float) -> None:
        """Move the bar, not more often than anybody can see."""
        self.progress = progress
        if time.monotonic() - self.drawn >= SECONDS_BETWEEN_DRAWINGS:
            self.draw()

    def on_deadline(self, seconds: float, total: float) -> None:
        """Let the bar show the time that is spent, whenever it is drawn."""
        self.deadline = time.monotonic() + seconds, total

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Renew the line."""
        self.text = self.line(values)
        self.on_progress(progress)

    def draw(self) -> None:
        """Draw the line as it is now."""
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
    """The progress callback that suits a terminal, a notebook, a log or a machine."""
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
        """A bar that looks at the clock each time it is drawn, where a task has a deadline."""

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
    """Whether this runs in a notebook: Jupyter's, Colab's or an editor's."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
