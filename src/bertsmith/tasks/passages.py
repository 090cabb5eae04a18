"""Passages as pieces that know their characters, so that answers can be found and cut out to the letter.

Shapes: Q questions, D distinct passages, X pieces of all passages, C all their characters.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.progress import progress_bar
from bertsmith.tasks.examples import Question
from bertsmith.text.tokenizer import Tokenizer

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

NOWHERE = -1
"""Stands for a place in a passage where there is none."""
PASSAGES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Passages:
    """The distinct passages of questions."""

    which_Q: Numbers
    """The passage of each question."""
    ids_X: NDArray[np.int32]
    offsets_X2: Numbers
    """First and past-the-last code point of each piece in its passage."""
    starts_D: Numbers
    """The first piece of each passage."""
    lengths_D: Numbers
    begins_D: Numbers
    """Where each passage begins if the characters of all are laid end to end with one in between."""


def read_passages(texts: Sequence[str], tokenizer: Tokenizer) -> Passages:
    """The passage of each question; each distinct one is encoded once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    distinct = list(numbers)
    ids_X, offsets_X2, lengths_D = _encoded(distinct, tokenizer)
    begins_D1 = np.cumsum([0, *(len(text) + 1 for text in distinct)])
    spelled = "".join(f"{text}\n" for text in distinct).encode("utf-32-le")
    begins_X = np.repeat(begins_D1[:-1], lengths_D)[:, None]
    offsets_X2 = _tidied(offsets_X2 + begins_X, np.frombuffer(spelled, "<u4")) - begins_X
    which_Q = np.array([numbers[text] for text in texts], np.int64)
    return Passages(which_Q, ids_X, offsets_X2, np.cumsum(lengths_D) - lengths_D, lengths_D, begins_D1[:-1])


def answer_pieces(questions: Sequence[Question], passages: Passages) -> Numbers:
    """First and last piece of each question's first gold, counted from its passage's first; or nowhere."""
    golds_Q2 = np.array([_gold(question) for question in questions], np.int64).reshape(-1, 2)
    edges_Q2 = golds_Q2 + passages.begins_D[passages.which_Q][:, None]
    starts_X, ends_X = (passages.offsets_X2 + np.repeat(passages.begins_D, passages.lengths_D)[:, None]).T
    # Some normalisations exchange neighbouring marks; the order that is searched in must hold all the same.
    rising_ends_X = np.maximum.accumulate(ends_X)
    rising_starts_X = np.minimum.accumulate(starts_X[::-1])[::-1]
    first_Q = np.searchsorted(rising_ends_X, edges_Q2[:, 0], side="right")
    last_Q = np.searchsorted(rising_starts_X, edges_Q2[:, 1], side="left") - 1
    pieces_Q2 = np.stack([first_Q, last_Q], axis=1) - passages.starts_D[passages.which_Q][:, None]
    pieces_Q2[(golds_Q2[:, 0] == NOWHERE) | (last_Q < first_Q)] = NOWHERE
    return pieces_Q2


def _gold(question: Question) -> tuple[int, int]:
    if not question.answers:
        return NOWHERE, NOWHERE
    gold = question.answers[0]  # the one that run_squad.py trains on
    return gold.start, gold.start + len(gold.text)


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int32], Numbers, Numbers]:
    ids, offsets, lengths = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)], []
    with progress_bar("encoding passages", len(texts)) as advance:
        for first in range(0, len(texts), PASSAGES_AT_ONCE):
            some = texts[first : first + PASSAGES_AT_ONCE]
            # The library itself: of all that Tokenizer.encode_many lists, only this is needed.
            for encoding in tokenizer.closed.encode_batch(some, add_special_tokens=False):
                ids.append(np.array(encoding.ids, np.int32))
                offsets.append(np.array(encoding.offsets, np.int64).reshape(-1, 2))
                lengths.append(len(encoding.ids))
            advance(len(some))
    return np.concatenate(ids), np.concatenate(offsets), np.array(lengths, np.int64)


# --- from the library's offsets to what a reader would mark ---


def _tidied(offsets_X2: Numbers, characters_C: NDArray[np.uint32]) -> Numbers:
    """Pieces without the white space at their edges, with the marks after them that the tokenizer dropped.

    ModernBERT's "Ġword" begins at the space, and an uncased BERT drops the U+0301 after the e of a café.
    """
    kinds_C = _kinds(characters_C)
    starts_X, ends_X = offsets_X2.T
    starts_X = np.minimum(_next_without(kinds_C == _SPACE)[starts_X], ends_X)
    ends_X = np.maximum(_last_without(kinds_C == _SPACE)[ends_X], starts_X)
    next_starts_X = np.append(starts_X[1:], len(characters_C))
    with_marks_X = np.minimum(_next_without(kinds_C == _MARK)[ends_X], next_starts_X)
    return np.stack([starts_X, np.maximum(ends_X, with_marks_X)], axis=1)


_OTHER, _SPACE, _MARK = 0, 1, 2


def _kinds(characters_C: NDArray[np.uint32]) -> NDArray[np.int8]:
    distinct, which_C = np.unique(characters_C, return_inverse=True)
    return np.array([_kind(chr(number)) for number in distinct.tolist()], np.int8)[which_C]


def _kind(character: str) -> int:
    if character.isspace():
        return _SPACE
    return _MARK if unicodedata.category(character).startswith("M") else _OTHER


def _next_without(mask_C: Mask) -> Numbers:
    """For each place, the end included, the first one from there on that the mask leaves out."""
    places = np.where(np.append(mask_C, False), len(mask_C), np.arange(len(mask_C) + 1))
    return np.minimum.accumulate(places[::-1])[::-1]


def _last_without(mask_C: Mask) -> Numbers:
    """For each place, the end included, the one behind the last before it that the mask leaves out."""
    behind = np.where(mask_C, 0, np.arange(1, len(mask_C) + 1))
    return np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), behind]))
