"""The engine behind every use of a trained encoder: texts in, packed batches through, results in order.

On a CPU several batches are computed at once, each on one core. Threads that share one product wait for each
other after every step of it: the slowest sets the pace, and any other load of the machine delays all of them.
Threads with separate batches do not wait for each other.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from textwrap import shorten
from threading import Barrier, Lock
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.processes import finished_in_order
from bertsmith.core.progress import progress_bar
from bertsmith.inference.text_reader import Integers, Reader, Sequences, TextInput, as_list
from bertsmith.model.kernels.torch_internals import ON_ARM
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch, copied_to_host, pack
from bertsmith.text.tokenizer import Encoded, Tokenizer

Given = TypeVar("Given")
Done = TypeVar("Done")
Result = TypeVar("Result")
Advance = Callable[[int], None]

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Tokens per batch: few enough for the CPU cache, and enough to fill a GPU."""
USUAL_BATCH_TOKENS = 8192
SPARE_TOKENS = 512
"""Room in a GPU batch for one more sequence, as sequences seldom fit exactly. Otherwise some would be left
over for a last batch, far too small to fill a GPU."""
WINDOW_TEXTS = 4096
"""Texts in a window that is sorted by length: equal lengths share a batch, and memory stays bounded."""
FIRST_WINDOW_TEXTS = 512
"""Texts in the first window on a GPU, which is idle until they are read. Each window is half as large again
as the one before it: reading it takes less time than computing that one."""
WARM_UP_LENGTHS = (32, 64, 128, 512)
"""Tokens of warm-up texts: attention kernels differ by the longest text, up to each of these and beyond."""
MIN_STREAM_TOKENS = 512
"""Minimum tokens of a batch for one core: below it, uneven halves cost more idle time than sharing does."""
MAX_STREAMS = 2 if ON_ARM else sys.maxsize
"""Maximum number of batches at once. On ARM each product uses all cores, whatever a thread sets: two at once
are still a gain on two cores, but many times many threads are not."""

_making = Lock()


# ---- the device


def usable_device(device: str) -> torch.device:
    """Return the device of this name; raise an error if this machine does not have it."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = shorten(str(error).splitlines()[0], 80, placeholder=" ...")
        remedy = "choose auto or cpu, or cuda on a machine with a GPU"
        raise UserError(f"cannot use the device {device!r} ({reason})", remedy=remedy) from error
    if chosen.type == "meta":
        raise UserError("the meta device cannot compute", remedy="choose auto, cpu or cuda")
    return chosen


# ---- several batches at once on a CPU


def make_ready(device: torch.device) -> None:
    """Start the threads of a CPU.

    While they start, any thread that calls torch for the first time would be limited to one core. So call
    this when a model is opened, not while requests are running.
    """
    if (streams := streams_for(sys.maxsize, device)) > 1:
        _workers_of(streams)


def streams_for(tokens: int, device: torch.device) -> int:
    """Return the number of batches to compute at once; 1 if there are too few tokens for every core."""
    if device.type != "cpu":
        return 1
    # Not while workers start: for that moment torch's own setting is 1, and a thread that reads it for the
    # first time keeps what it read.
    with _making:
        threads = torch.get_num_threads()
    enough = tokens >= threads * MIN_STREAM_TOKENS
    return threads if enough and threads <= MAX_STREAMS else 1


def in_streams(work: Callable[[Given], Done], batches: Iterable[Given], *, streams: int) -> Iterator[Done]:
    """Yield `work` of each batch in order; queue no more batches than keep all streams busy."""
    if streams == 1:
        yield from map(work, batches)
        return
    workers = _workers_of(streams)
    # Twice the number of streams: a stream that finishes early finds the next batch ready, and only this many
    # batches of a long input are in memory.
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
    """Start threads that compute on one core each, and keep them for the next call."""
    workers = ThreadPoolExecutor(streams, thread_name_prefix="stream", initializer=_take_one_core)
    # A pool starts a thread only if none is idle: let all of them wait for the last one.
    all_there = Barrier(streams)
    try:
        for each in [workers.submit(all_there.wait) for _ in range(streams)]:
            each.result()
    except RuntimeError:  # the machine cannot create more threads
        all_there.abort()
        workers.shutdown()
        raise
    finally:
        # The number that a thread sets becomes torch's default for later threads.
        torch.set_num_threads(streams)
    return workers


def _take_one_core() -> None:
    torch.get_num_threads()  # at its first call a thread inherits the number that others have set
    torch.set_num_threads(1)


def _forget_workers() -> None:
    """Forget the threads in a forked process: they do not exist there, so it must not wait for them."""
    global _making  # noqa: PLW0603
    _making = Lock()  # the thread that held the old lock does not exist after the fork
    _workers.cache_clear()


os.register_at_fork(after_in_child=_forget_workers)


# ---- from texts to results


@dataclass(frozen=True, slots=True)
class Engine:
    """A network and its reader on one device."""

    network: Network
    reader: Reader
    device: torch.device

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the reader."""
        return self.reader.tokenizer

    def warm_up(self) -> None:
        """Compile the GPU kernels for all text lengths now, so that the first request does not wait."""
        for length in sorted({min(each, self.reader.longest) for each in WARM_UP_LENGTHS}):
            for short in (0, 2):  # kernels also differ if texts are short on average
                with torch.no_grad():
                    self.network(pack([[0] * length, *[[0]] * short]).to(self.device))

    def predict_each(
        self,
        texts: Iterable[TextInput],
        compute: Callable[[PackedBatch], Sequence[Result]],
        *,
        truncate: bool,
    ) -> Iterator[Result]:
        """Yield the result of `compute` for each text, in input order."""
        for sequences, advance in self._windows(texts, truncate=truncate):
            yield from self._in_order(sequences, compute, advance)

    def predict_encoded(
        self,
        encoded: Sequence[Encoded],
        compute: Callable[[PackedBatch], Sequence[Result]],
        advance: Advance = lambda _texts: None,
    ) -> list[Result]:
        """Return the result of `compute` for each encoded text, in input order."""
        return self._in_order(Sequences.of(encoded), compute, advance) if encoded else []

    def vectors(
        self,
        texts: Iterable[TextInput],
        compute: Callable[[PackedBatch], Tensor],
        *,
        truncate: bool,
    ) -> list[Tensor]:
        """Return the rows that `compute` gives for the texts, on the CPU, one tensor for each window."""
        found: list[Tensor] = []
        launched: _LaunchedRows | None = None
        for sequences, advance in self._windows(texts, truncate=truncate):
            numbers, rows = zip(*self._each_batch(sequences, compute, advance), strict=True)
            # A GPU computes a window while the next one is read; only then copy its results.
            before, launched = launched, _LaunchedRows(numbers, *copied_to_host(torch.cat(rows).float()))
            found += [before.in_order()] if before else []
        return found + ([launched.in_order()] if launched else [])

    def _windows(self, texts: Iterable[TextInput], *, truncate: bool) -> Iterator[tuple[Sequences, Advance]]:
        """Yield the sequences of each window of texts, and a function that advances the one progress bar."""
        several = as_list(texts)
        first, size = 0, FIRST_WINDOW_TEXTS if self.device.type == "cuda" else WINDOW_TEXTS
        with progress_bar("reading texts", len(several)) as advance:
            while window := several[first : first + size]:
                yield self.reader.read(window, truncate=truncate, first=first), advance
                first, size = first + size, min(WINDOW_TEXTS, size + (size + 1) // 2)

    def _in_order(
        self, sequences: Sequences, compute: Callable[[PackedBatch], Sequence[Result]], advance: Advance
    ) -> list[Result]:
        """Return the results of `compute` in input order, not in batch order."""
        results: dict[int, Result] = {}
        for numbers, found in self._each_batch(sequences, compute, advance):
            results |= dict(zip(numbers.tolist(), found, strict=True))
        return [results[number] for number in range(len(results))]

    def _each_batch(
        self, sequences: Sequences, compute: Callable[[PackedBatch], Result], advance: Advance
    ) -> Iterator[tuple[Integers, Result]]:
        """Yield the result of `compute` for each batch, with the numbers of its sequences."""

        def computed(numbered: tuple[Integers, PackedBatch]) -> tuple[Integers, Result]:
            numbers, batch = numbered
            with torch.no_grad():  # not inference_mode: users train probes on the results
                return numbers, compute(batch.to(self.device))

        cut = batching_for(sequences.tokens, self.device)
        for numbers, found in in_streams(computed, sequences.batches(cut.tokens), streams=cut.streams):
            yield numbers, found
            advance(len(numbers))


@dataclass(frozen=True, slots=True)
class _LaunchedRows:
    """Rows of a window of texts, in batch order, that a GPU may still be computing."""

    numbers: tuple[Integers, ...]
    rows: Tensor
    arrival: torch.cuda.Event | None

    def in_order(self) -> Tensor:
        """Return the rows in the order of the texts, once they have arrived."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.rows[torch.from_numpy(np.concatenate(self.numbers)).argsort()]


@dataclass(frozen=True, slots=True)
class Batching:
    """Number of tokens in a batch, and number of batches to compute at once."""

    tokens: int
    streams: int


def batching_for(tokens: int, device: torch.device) -> Batching:
    """Return the batching for this many tokens: batches that fill the device, and equally busy streams."""
    most = BATCH_TOKENS.get(device.type, USUAL_BATCH_TOKENS)
    streams = streams_for(tokens, device)
    if device.type == "cuda" and most > SPARE_TOKENS:
        rounds = max(1, math.ceil(tokens / (most - SPARE_TOKENS)))
        return Batching(math.ceil(tokens / rounds) + SPARE_TOKENS, 1)
    if streams == 1:
        return Batching(most, 1)
    # As few rounds as the largest batch allows, then batches of equal size: a smaller last round would leave
    # cores idle while one of them still works.
    rounds = math.ceil(tokens / (streams * most))
    return Batching(math.ceil(tokens / (streams * rounds)), streams)
