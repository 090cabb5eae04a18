"""Pieces learned from words by joining pairs, the core of WordPiece and byte pair encoding.

Letters at the end of names: W words, K characters of all words in one row, P positions of a Segmentation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.text.merge_ranking import GainRule, MergeRanking
from bertsmith.text.segmentation import NOTHING, Counts, Ints, Segmentation

_INSIDE_BIT = 1 << 32  # above every code point


@dataclass(frozen=True, slots=True)
class Joining:
    """What decides which pairs are joined."""

    gain: GainRule
    inside: str  # the mark of a piece that continues a word, or ""
    min_count: int  # a pair seen less often is not joined
    shortlist: int = 1024  # pairs looked at for each merge; it changes the speed alone


@dataclass(frozen=True, slots=True)
class Spelled:
    """Words as pieces of one character each, laid out for a Segmentation; texts[0] stands for no piece."""

    texts: list[str]
    piece_P: Ints
    word_count_P: Counts


@dataclass(frozen=True, slots=True)
class Merge:
    """A pair of pieces that was joined, and the piece it became."""

    left: str
    right: str
    joined: str


def spell(words: Mapping[str, int], *, characters: int, inside: str) -> Spelled:
    """The words cut into characters, except words with a character that is not among the most frequent."""
    code_K, length_W, count_W = _codes(words)
    common_W = _all_common(code_K, length_W, count_W=count_W, characters=characters)
    code_K = code_K[np.repeat(common_W, length_W)].astype(np.int64)
    length_W, count_W = length_W[common_W], count_W[common_W]
    if inside:
        code_K += _INSIDE_BIT
        code_K[np.cumsum(length_W) - length_W] -= _INSIDE_BIT
    pieces, which_K = np.unique(code_K, return_inverse=True)
    texts = [(inside if code >= _INSIDE_BIT else "") + chr(code % _INSIDE_BIT) for code in pieces.tolist()]
    at_K = np.arange(len(code_K)) + np.repeat(np.arange(1, len(length_W) + 1), length_W)
    piece_P = np.full(len(code_K) + len(length_W) + 1, NOTHING, np.int32)
    word_count_P = np.zeros(len(piece_P), np.int64)
    piece_P[at_K], word_count_P[at_K] = which_K + 1, np.repeat(count_W, length_W)
    return Spelled(["", *texts], piece_P, word_count_P)


def join_pairs(spelled: Spelled, joining: Joining) -> Iterator[Merge]:
    """One merge after the other, each the one with the largest gain, of equals the first by text."""
    texts = list(spelled.texts)
    numbers = {text: number for number, text in enumerate(texts)}
    segmentation = Segmentation(spelled.piece_P, spelled.word_count_P)
    ranking = MergeRanking(
        segmentation, joining.gain, min_count=joining.min_count, shortlist=joining.shortlist
    )
    while pair := ranking.best(texts):
        left, right = int(segmentation.pairs.left[pair]), int(segmentation.pairs.right[pair])
        joined = texts[left] + texts[right].removeprefix(joining.inside)
        into = numbers.setdefault(joined, len(texts))  # two pairs may join into the same text
        if into == len(texts):
            texts.append(joined)
        segmentation.merge(pair, into=into)
        ranking.look_again({left, right, into})
        yield Merge(texts[left], texts[right], joined)


def _codes(words: Mapping[str, int]) -> tuple[NDArray[np.uint32], NDArray[np.int64], Counts]:
    """The code points of all words in one row, and the length and count of each word."""
    code_K = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    length_W = np.fromiter(map(len, words), np.int64, len(words))
    return code_K, length_W, np.fromiter(words.values(), np.int64, len(words))


def _all_common(
    code_K: NDArray[np.uint32], length_W: NDArray[np.int64], *, count_W: Counts, characters: int
) -> NDArray[np.bool_]:
    """Whether all characters of a word are among the most frequent; of equals the lower code point is."""
    codes, which_K = np.unique(code_K, return_inverse=True)
    seen = np.bincount(which_K, np.repeat(count_W, length_W))
    is_common = np.zeros(len(codes), np.bool_)
    is_common[np.lexsort((codes, -seen))[:characters]] = True
    word_K = np.repeat(np.arange(len(length_W)), length_W)
    common_W: NDArray[np.bool_] = np.bincount(word_K[~is_common[which_K]], minlength=len(length_W)) == 0
    return common_W
