"""Texts as pieces, and stretches of them laid between the special tokens of the tokenizer.

Shapes: X pieces, N texts, S sequences of K texts each (1 or 2), T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import ranges
from bertsmith.examples.sequences import Spans, lay_out
from bertsmith.examples.template import Template
from bertsmith.ground.progress import progress_bar
from bertsmith.text.fast_encoder import FastEncoder
from bertsmith.text.tokenizer import Tokenizer

Numbers = NDArray[np.int64]

WORTH_A_TABLE = 1000
"""Fewer texts are encoded before the fast encoder is made."""
TEXTS_AT_ONCE = 1 << 14
SEQUENCES_AT_ONCE = 1 << 13
"""Laid out together; bounds the memory that the wide numbers in between take."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of many texts; texts that are equal share them."""

    ids_X: NDArray[np.int32]
    starts_N: Numbers
    lengths_N: Numbers


@dataclass(frozen=True, slots=True)
class Stretches:
    """What each sequence shows of its texts: of each a stretch of pieces, and a second one after it."""

    starts_SK2: Numbers
    lengths_SK2: Numbers


@dataclass(frozen=True, slots=True)
class Laid:
    """Whole sequences, one after the other."""

    tokens_T: NDArray[np.int32]
    segments_T: NDArray[np.uint8]
    starts_S1: Numbers


def pieces_of(texts: Sequence[str], tokenizer: Tokenizer) -> Pieces:
    """The pieces of texts, without special tokens; each distinct text is encoded once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    ids_X, lengths_D = _encoded(list(numbers), tokenizer)
    which_N = np.array([numbers[text] for text in texts], np.int64)
    return Pieces(ids_X, (np.cumsum(lengths_D) - lengths_D)[which_N], lengths_D[which_N])


def _encoded(texts: list[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int32], Numbers]:
    if len(texts) < WORTH_A_TABLE:
        listed = [each.ids for each in tokenizer.closed.encode_batch(texts, add_special_tokens=False)]
        lengths_D = np.array([len(ids) for ids in listed], np.int64)
        return np.fromiter(chain.from_iterable(listed), np.int32, int(lengths_D.sum())), lengths_D
    encoder, parts = FastEncoder(tokenizer), []
    with progress_bar("encoding texts", len(texts)) as advance:
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            parts.append(encoder.encode_many(texts[first : first + TEXTS_AT_ONCE]))
            advance(len(parts[-1].lengths))
    ids_X = np.concatenate([part.ids for part in parts]).astype(np.int32)
    return ids_X, np.concatenate([part.lengths for part in parts])


def unbroken(starts_SK: Numbers, lengths_SK: Numbers) -> Stretches:
    """One stretch of each text."""
    nothing_SK = np.zeros_like(starts_SK)
    return Stretches(np.stack([starts_SK, nothing_SK], -1), np.stack([lengths_SK, nothing_SK], -1))


def lay_sequences(ids_X: NDArray[np.int32], stretches: Stretches, template: Template) -> Laid:
    """The sequences with their special tokens and segments."""
    tokens, segments = [np.empty(0, np.int32)], [np.empty(0, np.uint8)]
    starts = [np.zeros(1, np.int64)]
    for first in range(0, len(stretches.starts_SK2), SEQUENCES_AT_ONCE):
        chosen = slice(first, first + SEQUENCES_AT_ONCE)
        starts_SK2, lengths_SK2 = stretches.starts_SK2[chosen], stretches.lengths_SK2[chosen]
        texts_X = ids_X[ranges(starts_SK2.ravel(), lengths_SK2.ravel())]
        spans = _spans(lengths_SK2.sum(-1))
        rows = lay_out(texts_X.astype(np.int64), spans, template)
        tokens.append(rows.tokens_T.astype(np.int32))
        segments.append(rows.segments_T.astype(np.uint8))
        starts.append(starts[-1][-1] + rows.starts_S1[1:])
    return Laid(np.concatenate(tokens), np.concatenate(segments), np.concatenate(starts))


def _spans(lengths_SK: Numbers) -> Spans:
    sequences, texts = lengths_SK.shape
    lengths_N = lengths_SK.ravel()
    # Where the spans come from is told already by the pieces that were taken.
    return Spans(np.full(sequences, texts), np.zeros_like(lengths_N), lengths_N)
