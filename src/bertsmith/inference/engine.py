"""The engine behind every use of a trained encoder: texts in, packed batches through, results in order.

On a CPU several batches are computed at once, each on one core: the threads that share one product wait for
each other after every step of it, the slowest sets the pace, and whatever else the machine does holds up all
of them. Batches of their own have nothing to wait for.
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
from bertsmith.model.network import Network
from bertsmith.model.torch_internals import ON_ARM
from bertsmith.packed import PackedBatch, copied_to_host, pack
from bertsmith.text.tokenizer import Encoded, Tokenizer

Given = TypeVar("Given")
Done = TypeVar("Done")
Result = TypeVar("Result")
Advance = Callable[[int], None]

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""A CPU wants the states of a batch to stay in its cache; a GPU wants to be filled."""
USUAL_BATCH_TOKENS = 8192
SPARE_TOKENS = 512
"""A sequence seldom fits exactly into a batch. With room for one more, none is left over at the end for a
batch of its own, of which a GPU would be far from full."""
WINDOW_TEXTS = 4096
"""Texts are sorted by length within such a window: equal lengths meet in one batch, memory stays bounded."""
FIRST_WINDOW_TEXTS = 512
"""The first window of a GPU: it has nothing to do until that is read. Each window is half as large again as
the one before it: to read it takes less time than to compute that one."""
WARM_UP_LENGTHS = (32, 64, 128, 512)
"""The kernels of attention differ by the longest text of a batch: up to each of these, and beyond."""
MIN_STREAM_TOKENS = 512
"""Of a batch for one core: of fewer, uneven halves leave a core idle for longer than sharing costs."""
MAX_STREAMS = 2 if ON_ARM else sys.maxsize
"""On ARM each product takes all cores whatever a thread sets: two of them side by side are still a gain on
two cores, but many times many threads are none."""

_making = Lock()


# ---- the device


def usable_device(device: str) -> torch.device:
    """The device of this name, if this machine has it."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = shorten(str(error).splitlines()[0], 80, placeholder=" ...")
        remedy = "choose auto, cpu, or cuda where there is a GPU"
        raise UserError(f"cannot use the device {device!r} ({reason})", remedy=remedy) from error
    if chosen.type == "meta":
        raise UserError("the meta device computes nothing", remedy="choose auto, cpu or cuda")
    return chosen


# ---- several batches at once on a CPU


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
    enough = tokens >= threads * MIN_STREAM_TOKENS
    return threads if enough and threads <= MAX_STREAMS else 1


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


# ---- from texts to results


@dataclass(frozen=True, slots=True)
class Engine:
    """A network and what reads texts for it, on one device."""

    network: Network
    reader: Reader
    device: torch.device

    @property
    def tokenizer(self) -> Tokenizer:
        """What cuts texts into tokens."""
        return self.reader.tokenizer

    def warm_up(self) -> None:
        """Let a GPU compile its kernels for texts of any length, which whoever asks first would wait for."""
        for length in sorted({min(each, self.reader.longest) for each in WARM_UP_LENGTHS}):
            for short in (0, 2):  # where texts are short on average, kernels differ as well
                with torch.no_grad():
                    self.network(pack([[0] * length, *[[0]] * short]).to(self.device))

    def predict_each(
        self,
        texts: Iterable[TextInput],
        compute: Callable[[PackedBatch], Sequence[Result]],
        *,
        truncate: bool,
    ) -> Iterator[Result]:
        """What `compute` gives for each text of a packed batch, in the order of the texts."""
        for sequences, advance in self._windows(texts, truncate=truncate):
            yield from self._in_order(sequences, compute, advance)

    def predict_encoded(
        self,
        encoded: Sequence[Encoded],
        compute: Callable[[PackedBatch], Sequence[Result]],
        advance: Advance = lambda _texts: None,
    ) -> list[Result]:
        """What `compute` gives for each encoded text, in their order."""
        return self._in_order(Sequences.of(encoded), compute, advance) if encoded else []

    def vectors(
        self,
        texts: Iterable[TextInput],
        compute: Callable[[PackedBatch], Tensor],
        *,
        truncate: bool,
    ) -> list[Tensor]:
        """A row for each text of what `compute` gives for packed batches, on the CPU, by windows of texts."""
        found: list[Tensor] = []
        launched: _LaunchedRows | None = None
        for sequences, advance in self._windows(texts, truncate=truncate):
            numbers, rows = zip(*self._each_batch(sequences, compute, advance), strict=True)
            # A GPU computes a window while the next one is read: what it gave is asked for only then.
            before, launched = launched, _LaunchedRows(numbers, *copied_to_host(torch.cat(rows).float()))
            found += [before.in_order()] if before else []
        return found + ([launched.in_order()] if launched else [])

    def _windows(self, texts: Iterable[TextInput], *, truncate: bool) -> Iterator[tuple[Sequences, Advance]]:
        """The sequences of each window of texts, with what advances the one bar over all of them."""
        several = as_list(texts)
        first, size = 0, FIRST_WINDOW_TEXTS if self.device.type == "cuda" else WINDOW_TEXTS
        with progress_bar("reading texts", len(several)) as advance:
            while window := several[first : first + size]:
                yield self.reader.read(window, truncate=truncate, first=first), advance
                first, size = first + size, min(WINDOW_TEXTS, size + (size + 1) // 2)

    def _in_order(
        self, sequences: Sequences, compute: Callable[[PackedBatch], Sequence[Result]], advance: Advance
    ) -> list[Result]:
        """What `compute` gives for each sequence, in the order they were given, not that of the batches."""
        results: dict[int, Result] = {}
        for numbers, found in self._each_batch(sequences, compute, advance):
            results |= dict(zip(numbers.tolist(), found, strict=True))
        return [results[number] for number in range(len(results))]

    def _each_batch(
        self, sequences: Sequences, compute: Callable[[PackedBatch], Result], advance: Advance
    ) -> Iterator[tuple[Integers, Result]]:
        """What `compute` gives for each batch, with the numbers of its sequences."""

        def computed(numbered: tuple[Integers, PackedBatch]) -> tuple[Integers, Result]:
            numbers, batch = numbered
            with torch.no_grad():  # not inference_mode: people train probes on what comes out
                return numbers, compute(batch.to(self.device))

        cut = batching_for(sequences.tokens, self.device)
        for numbers, found in in_streams(computed, sequences.batches(cut.tokens), streams=cut.streams):
            yield numbers, found
            advance(len(numbers))


@dataclass(frozen=True, slots=True)
class _LaunchedRows:
    """Rows of a window of texts that a GPU may still be at, in the order of the batches."""

    numbers: tuple[Integers, ...]
    rows: Tensor
    arrival: torch.cuda.Event | None

    def in_order(self) -> Tensor:
        """The rows in the order of the texts, as soon as they are there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.rows[torch.from_numpy(np.concatenate(self.numbers)).argsort()]


@dataclass(frozen=True, slots=True)
class Batching:
    """How many tokens go into a batch, and how many batches are computed at once."""

    tokens: int
    streams: int


def batching_for(tokens: int, device: torch.device) -> Batching:
    """How to cut so many tokens: batches that fill the device, and all streams with as much to do."""
    most = BATCH_TOKENS.get(device.type, USUAL_BATCH_TOKENS)
    streams = streams_for(tokens, device)
    if device.type == "cuda" and most > SPARE_TOKENS:
        rounds = max(1, math.ceil(tokens / (most - SPARE_TOKENS)))
        return Batching(math.ceil(tokens / rounds) + SPARE_TOKENS, 1)
    if streams == 1:
        return Batching(most, 1)
    # As many rounds as the largest batch allows, then batches of equal size: a last, smaller round would
    # leave cores idle while one of them is still at work.
    rounds = math.ceil(tokens / (streams * most))
    return Batching(math.ceil(tokens / (streams * rounds)), streams)
