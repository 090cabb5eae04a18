"""Texts in the form that the engine reads: all tokens in one row that is then cut into batches.

Shapes: S sequences, S1 = S + 1 boundaries, T tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges
from bertsmith.core.errors import TRUNCATE, UserError
from bertsmith.packed import Layout, PackedBatch, split_by_budget
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import (
    Encoded,
    Tokenizer,
    encode_ids,
    join_pair,
    read_templates,
    truncate_longest_first,
)

TextOrPair = str | tuple[str, str]
Given = TypeVar("Given")
Integers = NDArray[np.int64]

WORTH_A_TABLE = 256
"""Texts to tokenize with the library before building the fast encoder, which caches words."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text together with its tokens, so that it is tokenized only once."""

    text: TextOrPair
    """Empty if only the tokens were given."""
    encoded: Encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def pieces(self) -> tuple[list[int], ...]:
        """Return the tokens of the text, or of both texts of a pair, without special ones."""
        ids, sequence = self.encoded.ids, self.encoded.sequence
        parts = range(1 if isinstance(self.text, str) else 2)
        return tuple([id for id, own in zip(ids, sequence, strict=True) if own == part] for part in parts)


TextInput = TextOrPair | TokenizedText
Pair = TypeVar("Pair", bound=tuple[str, str] | TokenizedText)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Many sequences in one row."""

    tokens_T: Integers
    segments_T: Integers
    starts_S1: Integers

    @classmethod
    def of(cls, encoded: Sequence[Encoded]) -> "Sequences":
        """Return the sequences of texts that were encoded one by one."""
        starts_S1 = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(each) for each in encoded], out=starts_S1[1:])
        total = int(starts_S1[-1])
        tokens = np.fromiter(chain.from_iterable(each.ids for each in encoded), np.int64, total)
        segments = np.fromiter(chain.from_iterable(each.segments for each in encoded), np.int64, total)
        return cls(tokens, segments, starts_S1)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.starts_S1[-1])

    def batches(self, budget: int) -> Iterator[tuple[Integers, PackedBatch]]:
        """Yield batches of similar length within the token budget, with the numbers of their sequences.

        The longest come first: if several are computed at once, none of them is still running at the end.
        """
        lengths_S = np.diff(self.starts_S1)
        by_length = np.argsort(-lengths_S, kind="stable")
        for group in split_by_budget(lengths_S[by_length].tolist(), budget):
            numbers = by_length[group[0] : group[-1] + 1]
            yield numbers, self.packed(numbers)

    def packed(self, numbers: Integers) -> PackedBatch:
        """Return a batch of the sequences with these numbers; one may occur several times."""
        lengths = np.diff(self.starts_S1)[numbers]
        rows_T = ranges(self.starts_S1[numbers], lengths)
        starts = np.append(0, np.cumsum(lengths))
        # The tokens are in one row without padding; positions restart with each sequence.
        positions_T = np.arange(len(rows_T)) - np.repeat(starts[:-1], lengths)
        return PackedBatch(
            tokens_T=torch.from_numpy(self.tokens_T[rows_T]),
            segments_T=torch.from_numpy(self.segments_T[rows_T]),
            positions_T=torch.from_numpy(positions_T),
            layout=Layout(torch.from_numpy(starts.astype(np.int32)), int(lengths.max())),
        )


class Reader:
    """A tokenizer that reads many texts, and rejects texts that do not fit the model."""

    def __init__(self, tokenizer: Tokenizer, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self._met = 0
        self._fast: FastEncoder | None = None
        self._lock = Lock()  # the fast encoder caches words as it reads them

    def read(self, texts: Sequence[TextInput], *, truncate: bool, first: int) -> Sequences:
        """Return the sequences of texts; reject an empty or overlong one by its index, from `first` on."""
        self._met += len(texts)
        if self._met >= WORTH_A_TABLE and all(isinstance(text, str) for text in texts):
            quickly = self._read_quickly([str(text) for text in texts], truncate=truncate)
            if quickly is not None:
                return quickly
        # Pairs, the first few texts, and texts with an invalid one: this reports which one, and why.
        return Sequences.of(self.encode(texts, truncate=truncate, first=first))

    def tokenize(
        self, texts: Sequence[TextInput], *, allow_special: tuple[str, ...] = (), first: int = 0
    ) -> list[TokenizedText]:
        """Return each text with its tokens, of any number."""
        raw = [text for text in texts if not isinstance(text, TokenizedText)]
        if len(raw) == len(texts):
            encoded = self.tokenizer.encode_many(raw, allow_special=allow_special, first=first)
            return [TokenizedText(text, each) for text, each in zip(raw, encoded, strict=True)]
        return [
            text
            if isinstance(text, TokenizedText)
            else self.tokenize([text], allow_special=allow_special, first=number)[0]
            for number, text in enumerate(texts, start=first)
        ]

    def tokenize_ids(self, lists: Sequence[Sequence[int]], prompt: str) -> list[TokenizedText]:
        """Return lists of token ids as texts after a prompt; the ids are used unchanged."""
        for number in set(chain.from_iterable(lists)):
            self.tokenizer.token(number)  # raises an error for an unknown id
        template = read_templates(self.tokenizer).single
        (before,) = TokenizedText(prompt, self.tokenizer.encode(prompt)).pieces()
        return [TokenizedText("", encode_ids(ids, template, prompt=before)) for ids in lists]

    def pairs(
        self, first: TokenizedText, others: Sequence[TokenizedText], *, truncate: bool
    ) -> list[TokenizedText]:
        """Return the first text in pairs with the others; none of them is tokenized again.

        Both are truncated to the model's limit: pairs need all of it.
        """
        template = read_templates(self.tokenizer).pair
        limit = self.longest if truncate else None
        before = self.truncated(first).encoded
        return [
            TokenizedText(
                (str(first.text), str(other.text)),
                join_pair(before, self.truncated(other).encoded, template, limit=limit),
            )
            for other in others
        ]

    def check(self, tokenized: Sequence[TokenizedText], *, truncate: bool, first: int = 0) -> None:
        """Reject texts that are empty, or too long unless they are truncated."""
        for number, each in enumerate(tokenized, start=first):
            _check_not_empty(each.text, each.encoded, number)
        for number, each in enumerate([] if truncate else tokenized, start=first):
            if len(each.encoded.ids) > self.longest:
                what = f"has {len(each)} tokens, but the model takes {self.longest}"
                raise UserError(what, index=number, remedy=TRUNCATE)

    def truncated(self, tokenized: TokenizedText) -> TokenizedText:
        """Return the text without the tokens at its end that do not fit into the model."""
        if len(tokenized.encoded.ids) <= self.longest:
            return tokenized
        return replace(tokenized, encoded=truncate_longest_first(tokenized.encoded, self.longest))

    def encode(
        self,
        texts: Sequence[TextInput],
        *,
        truncate: bool,
        allow_special: tuple[str, ...] = (),
        first: int = 0,
    ) -> list[Encoded]:
        """Return the tokens of each text with their offsets in it; reject texts as `read` does."""
        tokenized = self.tokenize(texts, allow_special=allow_special, first=first)
        self.check(tokenized, truncate=truncate, first=first)
        return [self.truncated(each).encoded for each in tokenized]

    def _read_quickly(self, texts: list[str], *, truncate: bool) -> Sequences | None:
        """Return the sequences of single texts, or None if one of them must be rejected."""
        if not all(map(str.strip, texts)):
            return None
        # Imported here: a command for a single text does not need the schema of recipes.
        from bertsmith.data.collate import lay_out
        from bertsmith.data.example_index import Spans

        try:
            with self._lock:
                self._fast = self._fast or FastEncoder(self.tokenizer)
                found = self._fast.encode_many(texts)
        except UserError:
            return None
        template = read_templates(self.tokenizer).single
        room = self.longest - template.specials(1)
        lengths = found.lengths.astype(np.int64)
        if lengths.min() == 0 or (lengths.max() > room and not truncate):
            return None
        first = np.cumsum(lengths) - lengths
        lengths = np.minimum(lengths, room)  # truncated at the end, like truncate_longest_first
        text = found.ids[ranges(first, lengths)].astype(np.int64)
        laid_out = lay_out(text, Spans(np.ones_like(lengths), first, lengths), template)
        return Sequences(laid_out.tokens_T, laid_out.segments_T, laid_out.starts_S1)


def _check_not_empty(text: TextOrPair, encoded: Encoded, index: int) -> None:
    if isinstance(text, str) and 0 in encoded.sequence and not text.isspace():
        return  # the usual case: a GPU waits for this check
    parts = (text,) if isinstance(text, str) else text
    empty = [which for which, part in zip(("first", "second"), parts, strict=False) if not part.strip()]
    if empty and isinstance(text, str):
        raise UserError("is empty", index=index, remedy="remove it, or write some words")
    if empty:
        raise UserError(f"its {empty[0]} text is empty", index=index, remedy="write some words")
    if not set(range(len(parts))) <= set(encoded.sequence):
        remedy = "remove it: it has only control or invisible characters"
        raise UserError("does not have a token that the model can read", index=index, remedy=remedy)


def as_written(text: TextInput) -> TextOrPair:
    """Return the text or pair without its tokens."""
    return text.text if isinstance(text, TokenizedText) else text


def as_list(texts: Iterable[Given]) -> list[Given]:
    """Return all texts; reject a single one in place of several."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        what = f"expected a list of texts, not {type(texts).__name__}"
        raise UserError(what, remedy='write ["..."], also for a single text')
    return list(texts)


def as_pairs(pairs: Iterable[Pair]) -> list[Pair]:
    """Return all pairs; reject what is not a pair by its index."""
    several = as_list(pairs)
    for number, given in enumerate(several):
        pair: object = given.text if isinstance(given, TokenizedText) else given
        if not isinstance(pair, tuple) or len(pair) != 2:
            kind = type(pair).__name__
            what = "is one text, not a pair" if isinstance(pair, str) else f"is {kind}, not a text or a pair"
            raise UserError(what, index=number, remedy="a pair is a tuple of two texts")
    return several
