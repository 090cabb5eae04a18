"""Progress bars that appear only where a person waits: on a terminal, and only once something takes long."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

PATIENCE_SECONDS = 2.0


def progress(items: Iterable[Item], what: str, *, total: int) -> Iterator[Item]:
    """The same items; on a terminal, a bar with the time left appears after the first seconds."""
    begin = time.monotonic()
    source = iter(items)
    for done, item in enumerate(source, start=1):
        yield item
        if time.monotonic() - begin > PATIENCE_SECONDS and sys.stderr.isatty():
            yield from _with_bar(source, what, done, total)


def _with_bar(items: Iterator[Item], what: str, done: int, total: int) -> Iterator[Item]:
    from rich.console import Console  # a quarter of a second that short jobs need not spend
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done)
        for item in items:
            yield item
            bar.advance(task)
