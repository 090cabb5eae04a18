"""Texts as the engine takes them: all their tokens in one row, from which batches are cut.

Shapes: S sequences, S1 = S + 1 boundaries, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.examples.pairs import ranges
from bertsmith.ground.errors import UserError
from bertsmith.packed import Layout, PackedBatch, split_by_budget
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import Encoded, Tokenizer, truncate_longest_first

Text = str | tuple[str, str]
Numbers = NDArray[np.int64]

WORTH_A_TABLE = 256
"""So many texts are read by the library before the fast encoder, which remembers words, is made."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Many sequences in one row."""

    tokens_T: Numbers
    segments_T: Numbers
    starts_S1: Numbers

    @classmethod
    def of(cls, encoded: Sequence[Encoded]) -> "Sequences":
        """The sequences of texts that were encoded one by one."""
        starts_S1 = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(each) for each in encoded], out=starts_S1[1:])
        total = int(starts_S1[-1])
        tokens = np.fromiter(chain.from_iterable(each.ids for each in encoded), np.int64, total)
        segments = np.fromiter(chain.from_iterable(each.segments for each in encoded), np.int64, total)
        return cls(tokens, segments, starts_S1)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.starts_S1[-1])

    def batches(self, budget: int) -> Iterator[tuple[Numbers, PackedBatch]]:
        """Batches of like length within the token budget, each with the numbers of its sequences.

        The longest come first: where several are computed at once, none of them is still at it at the end.
        """
        lengths_S = np.diff(self.starts_S1)
        by_length = np.argsort(-lengths_S, kind="stable")
        for group in split_by_budget(lengths_S[by_length].tolist(), budget):
            numbers = by_length[group[0] : group[-1] + 1]
            yield numbers, self._batch(numbers, lengths_S[numbers])

    def _batch(self, numbers: Numbers, lengths: Numbers) -> PackedBatch:
        rows_T = ranges(self.starts_S1[numbers], lengths)
        starts = np.append(0, np.cumsum(lengths))
        positions_T = np.arange(len(rows_T)) - np.repeat(starts[:-1], lengths)
        return PackedBatch(
            tokens_T=torch.from_numpy(self.tokens_T[rows_T]),
            segments_T=torch.from_numpy(self.segments_T[rows_T]),
            positions_T=torch.from_numpy(positions_T),
            layout=Layout(torch.from_numpy(starts.astype(np.int32)), int(lengths.max())),
        )


class Reader:
    """A tokenizer that reads many texts, and refuses those that a model cannot take."""

    def __init__(self, tokenizer: Tokenizer, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self._met = 0
        self._fast: FastEncoder | None = None
        self._lock = Lock()  # the fast encoder learns words as it meets them

    def read(self, texts: Sequence[Text], *, truncate: bool, first: int) -> Sequences:
        """The sequences of texts; an empty or too long one is refused by its number, from `first` on."""
        self._met += len(texts)
        if self._met < WORTH_A_TABLE or not all(isinstance(text, str) for text in texts):
            return Sequences.of(self.encode(texts, truncate=truncate, first=first))
        quickly = self._read_quickly([str(text) for text in texts], truncate=truncate)
        # The slow way knows what to say of a text that cannot be taken.
        return quickly or Sequences.of(self.encode(texts, truncate=truncate, first=first))

    def encode(
        self, texts: Sequence[Text], *, truncate: bool, allow_special: tuple[str, ...] = (), first: int = 0
    ) -> list[Encoded]:
        """Tokens of each text with their places in it; refuses as `read` does."""
        encoded = self.tokenizer.encode_many(texts, allow_special=allow_special, first=first)
        for number, (text, each) in enumerate(zip(texts, encoded, strict=True), start=first):
            _refuse_empty(text, each, where=f"text {number}")
        return [self._fitted(each, number, truncate) for number, each in enumerate(encoded, start=first)]

    def _read_quickly(self, texts: list[str], *, truncate: bool) -> Sequences | None:
        """The sequences of single texts; nothing where one of them is to be refused."""
        if not all(map(str.strip, texts)):
            return None
        try:
            with self._lock:
                self._fast = self._fast or FastEncoder(self.tokenizer)
                found = self._fast.encode_many(texts)
        except UserError:
            return None
        frame = _Frame.of(self.tokenizer)
        room = self.longest - len(frame.ids)
        lengths = found.lengths.astype(np.int64)
        if lengths.min() == 0 or (lengths.max() > room and not truncate):
            return None
        first = np.cumsum(lengths) - lengths
        lengths = np.minimum(lengths, room)
        return frame.around(found.ids[ranges(first, lengths)].astype(np.int64), lengths)

    def _fitted(self, encoded: Encoded, number: int, truncate: bool) -> Encoded:
        if len(encoded) <= self.longest:
            return encoded
        if truncate:
            return truncate_longest_first(encoded, self.longest)
        what = f"has {len(encoded)} tokens but the model takes {self.longest}"
        raise UserError(what, where=f"text {number}", remedy="shorten it, split it, or pass truncate=True")


@dataclass(frozen=True, slots=True)
class _Frame:
    """The special tokens around a single text."""

    ids: list[int]
    segments: list[int]
    lead: int
    """How many of them come before the text."""
    text_segment: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Frame":
        sample = tokenizer.encode("a")
        special = [place for place, text in enumerate(sample.sequence) if text < 0]
        lead = sample.sequence.index(0)
        segments = [sample.segments[place] for place in special]
        return cls([sample.ids[place] for place in special], segments, lead, sample.segments[lead])

    def around(self, text: Numbers, lengths_S: Numbers) -> Sequences:
        """Texts that lie one after the other, each in its frame."""
        starts_S1 = np.append(0, np.cumsum(lengths_S + len(self.ids)))
        tokens_T = np.empty(starts_S1[-1], np.int64)
        segments_T = np.full(starts_S1[-1], self.text_segment, np.int64)
        tokens_T[ranges(starts_S1[:-1] + self.lead, lengths_S)] = text
        for place, (token, segment) in enumerate(zip(self.ids, self.segments, strict=True)):
            behind = place >= self.lead
            rows_S = starts_S1[1:] - len(self.ids) + place if behind else starts_S1[:-1] + place
            tokens_T[rows_S], segments_T[rows_S] = token, segment
        return Sequences(tokens_T, segments_T, starts_S1)


def _refuse_empty(text: Text, encoded: Encoded, *, where: str) -> None:
    parts = (text,) if isinstance(text, str) else text
    empty = [place for place, part in zip(("first", "second"), parts, strict=False) if not part.strip()]
    if empty and isinstance(text, str):
        raise UserError("is empty", where=where, remedy="drop it or give it some words")
    if empty:
        raise UserError(f"its {empty[0]} text is empty", where=where, remedy="give it some words")
    if not set(range(len(parts))) <= set(encoded.sequence):
        remedy = "drop it: its characters are all control or invisible ones"
        raise UserError("has no token that the model can read", where=where, remedy=remedy)
