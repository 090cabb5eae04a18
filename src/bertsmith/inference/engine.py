"""The engine behind every use of a trained encoder: texts in, packed batches through, answers in order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from bertsmith.ground.errors import UserError
from bertsmith.ground.progress import progress_bar
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch, pack, split_by_budget
from bertsmith.text.tokenizer import Encoded, Tokenizer, truncate_longest_first

Text = str | tuple[str, str]
Answer = TypeVar("Answer")
Given = TypeVar("Given")

BATCH_TOKENS = 8192
WINDOW_TEXTS = 4096
"""Texts are sorted by length within such a window: equal lengths meet in one batch, memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A network and its tokenizer on one device."""

    network: Network
    tokenizer: Tokenizer
    device: torch.device

    def encode(
        self, texts: Sequence[Text], *, truncate: bool, allow_special: tuple[str, ...] = (), first: int = 0
    ) -> list[Encoded]:
        """Tokens of each text; an empty or too long one is refused by its number, counted from `first`."""
        encoded = self.tokenizer.encode_many(texts, allow_special=allow_special, first=first)
        for number, (text, each) in enumerate(zip(texts, encoded, strict=True), start=first):
            _refuse_empty(text, each, where=f"text {number}")
        return [self._fitted(each, number, truncate) for number, each in enumerate(encoded, start=first)]

    def answer_each(
        self, texts: Iterable[Text], answer: Callable[[PackedBatch], Sequence[Answer]], *, truncate: bool
    ) -> Iterator[Answer]:
        """What `answer` says of each text of a packed batch, in the order of the texts."""
        several = listed(texts)
        with progress_bar("reading texts", len(several)) as advance:
            for first in range(0, len(several), WINDOW_TEXTS):
                encoded = self.encode(several[first : first + WINDOW_TEXTS], truncate=truncate, first=first)
                yield from self.answer_encoded(encoded, answer, advance)

    def answer_encoded(
        self,
        encoded: Sequence[Encoded],
        answer: Callable[[PackedBatch], Sequence[Answer]],
        advance: Callable[[int], None] = lambda _texts: None,
    ) -> list[Answer]:
        """What `answer` says of each encoded text, in their order."""
        by_length = sorted(range(len(encoded)), key=lambda number: len(encoded[number]))
        groups = split_by_budget([len(encoded[number]) for number in by_length], BATCH_TOKENS)
        answers: dict[int, Answer] = {}
        with torch.no_grad():  # not inference_mode: people train probes on what comes out
            for group in groups:
                numbers = [by_length[place] for place in group]
                batch = self._batch([encoded[number] for number in numbers])
                answers |= dict(zip(numbers, answer(batch), strict=True))
                advance(len(group))
        return [answers[number] for number in range(len(encoded))]

    def _batch(self, encoded: Sequence[Encoded]) -> PackedBatch:
        return pack([each.ids for each in encoded], [each.segments for each in encoded]).to(self.device)

    def _fitted(self, encoded: Encoded, number: int, truncate: bool) -> Encoded:
        limit = self.network.shape.positions
        if len(encoded) <= limit:
            return encoded
        if truncate:
            return truncate_longest_first(encoded, limit)
        what = f"has {len(encoded)} tokens but the model takes {limit}"
        raise UserError(what, where=f"text {number}", remedy="shorten it, split it, or pass truncate=True")


def listed(texts: Iterable[Given]) -> list[Given]:
    """All texts; a single one in place of several is refused."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        what = f"a list of texts is expected, not {type(texts).__name__}"
        raise UserError(what, remedy='write ["..."], also for a single text')
    return list(texts)


def _refuse_empty(text: Text, encoded: Encoded, *, where: str) -> None:
    parts = (text,) if isinstance(text, str) else text
    if not all(part.strip() for part in parts):
        raise UserError("is empty", where=where, remedy="drop it or give it some words")
    if not set(range(len(parts))) <= set(encoded.sequence):
        remedy = "drop it: its characters are all control or invisible ones"
        raise UserError("has no token that the model can read", where=where, remedy=remedy)
