"""What makes a process a good worker: its parent decides when it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started inside never hear Ctrl-C, not even before their first line of Python."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_with_the_parent() -> None:
    """End this process when its parent ends; one that was killed cannot send its workers home."""
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
