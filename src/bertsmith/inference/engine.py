"""The engine behind every use of a trained encoder: texts in, packed batches through, results in order."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.progress import progress_bar
from bertsmith.inference.streams import in_streams, streams_for
from bertsmith.inference.text_reader import Numbers, Reader, Sequences, TextInput, as_list
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded, Tokenizer

Result = TypeVar("Result")
Given = TypeVar("Given")
Advance = Callable[[int], None]

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""A CPU wants the states of a batch to stay in its cache; a GPU wants to be filled."""
USUAL_BATCH_TOKENS = 8192
WINDOW_TEXTS = 4096
"""Texts are sorted by length within such a window: equal lengths meet in one batch, memory stays bounded."""


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
        found = []
        for sequences, advance in self._windows(texts, truncate=truncate):
            # All batches of a window are launched before the first result is fetched: a GPU is waited for
            # once, at .cpu(), and not after every batch.
            numbers, rows = zip(*self._each_batch(sequences, compute, advance), strict=True)
            in_order = torch.from_numpy(np.concatenate(numbers)).argsort()
            found.append(torch.cat(rows).float().cpu()[in_order])
        return found

    def _windows(self, texts: Iterable[TextInput], *, truncate: bool) -> Iterator[tuple[Sequences, Advance]]:
        """The sequences of each window of texts, with what advances the one bar over all of them."""
        several = as_list(texts)
        with progress_bar("reading texts", len(several)) as advance:
            for first in range(0, len(several), WINDOW_TEXTS):
                window = several[first : first + WINDOW_TEXTS]
                yield self.reader.read(window, truncate=truncate, first=first), advance

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
    ) -> Iterator[tuple[Numbers, Result]]:
        """What `compute` gives for each batch, with the numbers of its sequences."""

        def computed(numbered: tuple[Numbers, PackedBatch]) -> tuple[Numbers, Result]:
            numbers, batch = numbered
            with torch.no_grad():  # not inference_mode: people train probes on what comes out
                return numbers, compute(batch.to(self.device))

        cut = batching_for(sequences.tokens, self.device)
        for numbers, found in in_streams(computed, sequences.batches(cut.tokens), streams=cut.streams):
            yield numbers, found
            advance(len(numbers))


@dataclass(frozen=True, slots=True)
class Batching:
    """How many tokens go into a batch, and how many batches are computed at once."""

    tokens: int
    streams: int


def batching_for(tokens: int, device: torch.device) -> Batching:
    """How to cut so many tokens: batches that fill the device, and all streams with as much to do."""
    most = BATCH_TOKENS.get(device.type, USUAL_BATCH_TOKENS)
    streams = streams_for(tokens, device)
    if streams == 1:
        return Batching(most, 1)
    # As many rounds as the largest batch allows, then batches of equal size: a last, smaller round would
    # leave cores idle while one of them is still at work.
    rounds = math.ceil(tokens / (streams * most))
    return Batching(math.ceil(tokens / (streams * rounds)), streams)
