"""The engine behind every use of a trained encoder: texts in, packed batches through, answers in order."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.ground.progress import progress_bar
from bertsmith.inference.reading import Numbers, Reader, Sequences, Text
from bertsmith.inference.streams import in_streams, streams_for
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded, Tokenizer

Answer = TypeVar("Answer")
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

    def answer_each(
        self, texts: Iterable[Text], answer: Callable[[PackedBatch], Sequence[Answer]], *, truncate: bool
    ) -> Iterator[Answer]:
        """What `answer` says of each text of a packed batch, in the order of the texts."""
        for sequences, advance in self._windows(texts, truncate=truncate):
            yield from self._answers(sequences, answer, advance)

    def answer_encoded(
        self,
        encoded: Sequence[Encoded],
        answer: Callable[[PackedBatch], Sequence[Answer]],
        advance: Advance = lambda _texts: None,
    ) -> list[Answer]:
        """What `answer` says of each encoded text, in their order."""
        return self._answers(Sequences.of(encoded), answer, advance) if encoded else []

    def vectors(
        self, texts: Iterable[Text], answer: Callable[[PackedBatch], Tensor], *, truncate: bool
    ) -> list[Tensor]:
        """A row for each text of what `answer` says of packed batches, on the CPU, by windows of texts."""
        found = []
        for sequences, advance in self._windows(texts, truncate=truncate):
            numbers, rows = zip(*self._each_batch(sequences, answer, advance), strict=True)
            in_order = torch.from_numpy(np.concatenate(numbers)).argsort()
            found.append(torch.cat(rows).float().cpu()[in_order])  # the one wait for a GPU
        return found

    def _windows(self, texts: Iterable[Text], *, truncate: bool) -> Iterator[tuple[Sequences, Advance]]:
        several = listed(texts)
        with progress_bar("reading texts", len(several)) as advance:
            for first in range(0, len(several), WINDOW_TEXTS):
                window = several[first : first + WINDOW_TEXTS]
                yield self.reader.read(window, truncate=truncate, first=first), advance

    def _answers(
        self, sequences: Sequences, answer: Callable[[PackedBatch], Sequence[Answer]], advance: Advance
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for numbers, found in self._each_batch(sequences, answer, advance):
            answers |= dict(zip(numbers.tolist(), found, strict=True))
        return [answers[number] for number in range(len(answers))]

    def _each_batch(
        self, sequences: Sequences, answer: Callable[[PackedBatch], Answer], advance: Advance
    ) -> Iterator[tuple[Numbers, Answer]]:
        """What `answer` says of each batch, with the numbers of its sequences."""

        def answered(numbered: tuple[Numbers, PackedBatch]) -> tuple[Numbers, Answer]:
            numbers, batch = numbered
            with torch.no_grad():  # not inference_mode: people train probes on what comes out
                return numbers, answer(batch.to(self.device))

        cut = cut_for(sequences.tokens, self.device)
        for numbers, found in in_streams(answered, sequences.batches(cut.tokens), streams=cut.streams):
            yield numbers, found
            advance(len(numbers))


@dataclass(frozen=True, slots=True)
class Cut:
    """How many tokens go into a batch, and how many batches are computed at once."""

    tokens: int
    streams: int


def cut_for(tokens: int, device: torch.device) -> Cut:
    """How to cut so many tokens: batches that fill the device, and all streams with as much to do."""
    most = BATCH_TOKENS.get(device.type, USUAL_BATCH_TOKENS)
    streams = streams_for(tokens, device)
    if streams == 1:
        return Cut(most, 1)
    rounds = math.ceil(tokens / (streams * most))
    return Cut(math.ceil(tokens / (streams * rounds)), streams)


def listed(texts: Iterable[Given]) -> list[Given]:
    """All texts; a single one in place of several is refused."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        what = f"a list of texts is expected, not {type(texts).__name__}"
        raise UserError(what, remedy='write ["..."], also for a single text')
    return list(texts)
