"""Progress bars that appear only where a person waits: on a terminal, and only once something takes long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PATIENCE_SECONDS = 2.0


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with how much was done; on a terminal, a bar appears after the first seconds."""
    begin, done = time.monotonic(), 0
    show: Callable[[int], None] | None = None
    with ExitStack() as screen:

        def advance(amount: int) -> None:
            nonlocal done, show
            done += amount
            if show is None and time.monotonic() - begin > PATIENCE_SECONDS and sys.stderr.isatty():
                show = screen.enter_context(_drawn(what, total))
            if show is not None:
                show(done)

        yield advance


@contextmanager
def _drawn(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console  # a quarter of a second that short jobs need not spend
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
