"""Notice that a process of a run is silent: stopped, or behind a network that went down.

Each process counts up in the store that torchrun opened, and reads the counts of the others. Without this a
collective of torch waits half an hour for a silent process (gloo), or ends in a traceback (NCCL).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

ENDED = "ended"
BEATS = 10
"""Heartbeats per patience period."""


class Store(Protocol):
    """The part of torch's store that is used here."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that exist."""


@dataclass
class Counts:
    """Time of the last change of each other process's count."""

    patience: float
    """Seconds without a change after which a process is silent."""
    heard: dict[int, tuple[str, float]] = field(default_factory=dict)

    def hear(self, counts: Mapping[int, str], now: float) -> None:
        """Update the counts of the other processes."""
        for rank, count in counts.items():
            if rank not in self.heard or self.heard[rank][0] != count:
                self.heard[rank] = count, now

    def silent(self, now: float) -> tuple[list[int], float]:
        """Return the silent processes, and the seconds that all of them have been silent."""
        ages = {rank: now - since for rank, (count, since) in self.heard.items() if count != ENDED}
        late = {rank: age for rank, age in ages.items() if age > self.patience}
        return sorted(late), min(late.values(), default=0.0)


@contextmanager
def heartbeat(
    store: Store, rank: int, size: int, patience: float, *, fail: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Inside, end this process with one line if another one is silent for `patience` seconds."""
    counts, over, fail = Counts(patience), Event(), fail or end_process
    keys = {other: key_of(other) for other in range(size) if other != rank}
    counts.hear(dict.fromkeys(keys, "0"), time.monotonic())

    def beat() -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                store.set(key_of(rank), str(number))
                found = [value.decode() for value in store.multi_get(list(keys.values()))]
                counts.hear(dict(zip(keys, found, strict=True)), time.monotonic())
            except RuntimeError:  # the store cannot be reached: then all others are silent
                pass
            over.wait(patience / BEATS)

    def watch() -> None:  # a separate thread: a store behind a dead network does not answer
        while not over.wait(patience / BEATS):
            ranks, seconds = counts.silent(time.monotonic())
            if ranks:
                fail(silence_text(ranks, seconds))
                return

    threads = [Thread(target=each, daemon=True, name=each.__name__) for each in (beat, watch)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        threads[0].join(timeout=1.0)
        if not threads[0].is_alive():
            with suppress(RuntimeError):  # the process that opened the store has ended
                store.set(key_of(rank), ENDED)


def key_of(rank: int) -> str:
    """Return the key of a process's count."""
    return f"rank {rank}"


def torchrun_store(patience: float) -> TCPStore:
    """Open a second connection to torchrun's store, so that our thread does not block torch's connection."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=patience),
    )


def silence_text(ranks: list[int], seconds: float) -> str:
    """Return a message: which processes are silent since when, and what to do."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    named = ", ".join(map(str, ranks))
    who = f"rank {named} is" if len(ranks) == 1 else f"ranks {named} are"
    return (
        f"{who} silent since {since} ({seconds:.0f} s): stopped, or its network is down; the same command "
        "resumes from the last saved state (run.patience_seconds)"
    )


def end_process(what: str) -> None:
    """End this process at once: its main thread waits in a collective that cannot be interrupted."""
    print(f"bertsmith: {what}", file=sys.stderr, flush=True)
    os._exit(1)
