"""Several batches at once on a CPU, each on one core.

The threads that share one product wait for each other after every step of it, the slowest sets the pace, and
whatever else the machine does holds up all of them. Batches of their own have nothing to wait for.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier, Lock
from typing import TypeVar

import torch

from bertsmith.core.processes import finished_in_order

Given = TypeVar("Given")
Done = TypeVar("Done")

LEAST_TOKENS = 512
"""Of a batch for one core: of fewer, uneven halves leave a core idle for longer than sharing costs."""
MOST_STREAMS = 2 if platform.machine().lower() in ("aarch64", "arm64") else sys.maxsize
"""On ARM each product takes all cores whatever a thread sets: two of them side by side are still a gain on
two cores, but many times many threads are none."""

_making = Lock()


def make_ready(device: torch.device) -> None:
    """Start the threads of a CPU.

    While they start, every thread that meets torch for the first time would be left with one core, so it is
    better done when a model is opened than while requests are running.
    """
    if (streams := streams_for(sys.maxsize, device)) > 1:
        _workers_of(streams)


def streams_for(tokens: int, device: torch.device) -> int:
    """How many batches to compute at once; one where there is too little for every core."""
    if device.type != "cpu":
        return 1
    # Not while workers are being made: for that moment torch's own setting is 1, and a thread that reads it
    # for the first time keeps what it read.
    with _making:
        threads = torch.get_num_threads()
    enough = tokens >= threads * LEAST_TOKENS
    return threads if enough and threads <= MOST_STREAMS else 1


def in_streams(work: Callable[[Given], Done], batches: Iterable[Given], *, streams: int) -> Iterator[Done]:
    """What `work` makes of each batch, in their order; no more of them wait than keep all streams at work."""
    if streams == 1:
        yield from map(work, batches)
        return
    workers = _workers_of(streams)
    # Twice as many as there are streams: who finishes early finds the next batch laid out, and of a long
    # input only so many batches are in memory.
    yield from finished_in_order(
        batches,
        lambda batch: workers.submit(work, batch),
        finish=lambda begun: begun.result(),
        at_once=2 * streams,
    )


def _workers_of(streams: int) -> ThreadPoolExecutor:
    with _making:
        return _workers(streams)


@cache
def _workers(streams: int) -> ThreadPoolExecutor:
    """Threads that compute alone, kept for the next time."""
    workers = ThreadPoolExecutor(streams, thread_name_prefix="stream", initializer=_take_one_core)
    # A pool starts a thread only when none is idle: all of them have to wait for the last one.
    all_there = Barrier(streams)
    try:
        for each in [workers.submit(all_there.wait) for _ in range(streams)]:
            each.result()
    except RuntimeError:  # the machine gives no more threads
        all_there.abort()
        workers.shutdown()
        raise
    finally:
        # torch takes what a thread sets for itself as what later threads begin with.
        torch.set_num_threads(streams)
    return workers


def _take_one_core() -> None:
    torch.get_num_threads()  # at the first call a thread takes over what others have set
    torch.set_num_threads(1)


def _forget_workers() -> None:
    """A forked process has none of the threads, and must not wait for them."""
    global _making  # noqa: PLW0603
    _making = Lock()  # whoever held the old one at the fork is not there to release it
    _workers.cache_clear()


os.register_at_fork(after_in_child=_forget_workers)
