"""Progress bars that appear only where a person waits: on a terminal, and only once something takes long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PATIENCE_SECONDS = 2.0
_on_screen: list[str] = []
"""What the bar that is drawn now is about: a terminal has room for one."""
_within: list[str] = []
"""What the bars that begin now are a part of."""


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A function to call with how much was done; on a terminal, a bar appears after the first seconds.

    Without a total it only shows that something is running. While one bar is drawn, no other is.
    """
    begin, done = time.monotonic(), 0
    show: Callable[[int], None] | None = None
    with ExitStack() as screen:

        def advance(amount: int) -> None:
            nonlocal done, show
            done += amount
            waits = time.monotonic() - begin > PATIENCE_SECONDS and sys.stderr.isatty()
            if show is None and waits and not _on_screen:
                show = screen.enter_context(_drawn(": ".join((*_within, what)), total))
            if show is not None:
                show(done)

        yield advance


@contextmanager
def progress_within(whole: str) -> Iterator[None]:
    """Bars of a part say so: where one work is done several times, a bar that begins anew would puzzle."""
    _within.append(whole)
    try:
        yield
    finally:
        _within.pop()


@contextmanager
def _drawn(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console  # a quarter of a second that short jobs need not spend
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        _on_screen.append(what)
        try:
            yield lambda done: bar.update(task, completed=done)
        finally:
            _on_screen.remove(what)
