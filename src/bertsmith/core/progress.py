"""Progress bars, which appear only on a terminal, and only for work that takes long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PATIENCE_SECONDS = 2.0
_on_screen: list[str] = []
"""Title of the bar that is drawn now; at most one, since a terminal has room for one."""
_within: list[str] = []
"""Names of the larger pieces of work that new bars belong to, outermost first."""


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the amount of work done; on a terminal, show a bar after some seconds.

    Without a total, the bar only shows that something is running. Only one bar is drawn at a time.
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
    """Put `whole` before the titles of bars inside, so that repeated bars of one job can be told apart."""
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
