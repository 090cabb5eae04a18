"""Learn pieces from words by merging pairs, the core of WordPiece and byte pair encoding.

    split_characters -> Segmentation (all words as pieces) -> MergeRanking (the best pair) -> merge, and again

All distinct words are stored in flat arrays, so that a merge is a few array steps: positions run over their
characters, with one empty position between words, and a piece is stored at the position of its first
character.

Letters at the end of names: W words, K characters of all words in one row, P positions of a Segmentation,
C changed positions.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.int64)

NOTHING = 0  # the piece at empty positions, and the pair at positions without one


class Pairs:
    """Adjacent pieces and their counts; pairs are numbered from 1 in order of first appearance."""

    def __init__(self) -> None:
        self.size = 1
        self.left: Ints = np.zeros(1024, np.int32)
        self.right: Ints = np.zeros(1024, np.int32)
        self.count: Counts = np.zeros(1024, np.int64)
        self._beside: dict[int, array[int]] = {}

    def beside(self, piece: int) -> Ints:
        """Return the pairs that contain a piece."""
        return np.array(self._beside.get(piece, ()), np.int32)

    def number(self, left: int, right: int) -> int:
        """Number a new pair."""
        if self.size == len(self.count):
            self.left, self.right = _doubled(self.left), _doubled(self.right)
            self.count = _doubled(self.count)
        number, self.size = self.size, self.size + 1
        self.left[number], self.right[number] = left, right
        for piece in {left, right}:
            self._beside.setdefault(piece, array("i")).append(number)
        return number


class Segmentation:
    """The words as pieces; `merge` joins one pair everywhere and keeps all counts exact."""

    def __init__(self, piece_P: Ints, word_count_P: Counts) -> None:
        """Start from the piece at each position (0 between words and at both ends) and its word's count."""
        size = len(piece_P)
        self.pairs = Pairs()
        self.piece_count: Counts = np.bincount(piece_P, word_count_P).astype(np.int64)
        self.total = int(self.piece_count.sum())
        self._piece_P, self._word_count_P = piece_P.copy(), word_count_P
        # A linked list over positions: a merge unlinks the right piece without moving anything.
        self._after_P = np.arange(1, size + 1, dtype=np.int32)
        self._before_P = np.arange(-1, size - 1, dtype=np.int32)
        self._pair_P = np.zeros(size, np.int32)
        # The ascending positions of each piece: a merge searches only one piece's positions.
        order = np.argsort(piece_P, kind="stable").astype(np.int32)
        starts = np.flatnonzero(np.diff(piece_P[order], prepend=-1))
        parts: Sequence[Ints] = np.split(order, starts[1:])
        owners = [(int(piece_P[part[0]]), part) for part in parts if len(part)]
        self._positions = {piece: part for piece, part in owners if piece != NOTHING}
        self._count_pairs(np.arange(size - 1, dtype=np.int32), known={})

    def merge(self, pair: int, *, into: int) -> None:
        """Join this pair into a piece everywhere, from left to right if occurrences overlap."""
        at_C = self._occurrences(pair)
        right_C = self._after_P[at_C]
        # Only pairs that touch an occurrence change. Subtract the counts of pairs that begin before, at and
        # after it, join, and count the pairs that begin there now. So a merge costs only what it touches.
        touched_C = np.unique(np.concatenate([self._before_P[at_C], at_C, right_C]))
        # np.subtract.at: one pair may begin at several positions, and indexing would count it once.
        np.subtract.at(self.pairs.count, self._pair_P[touched_C], self._word_count_P[touched_C])
        self._pair_P[touched_C] = NOTHING
        count = int(self._word_count_P[at_C].sum())
        if into >= len(self.piece_count):
            self.piece_count = _doubled(self.piece_count)
        self.piece_count[self.pairs.left[pair]] -= count
        self.piece_count[self.pairs.right[pair]] -= count
        self.piece_count[into] += count
        self.total -= count
        self._piece_P[at_C], self._piece_P[right_C] = into, NOTHING
        self._after_P[at_C] = self._after_P[right_C]
        self._before_P[self._after_P[at_C]] = at_C
        self._positions[into] = np.union1d(self._positions.get(into, at_C), at_C)
        # Every pair that begins there now includes `into`; a number it already has is in `beside(into)`.
        known = {
            (int(self.pairs.left[it]), int(self.pairs.right[it])): int(it) for it in self.pairs.beside(into)
        }
        self._count_pairs(np.unique(np.concatenate([self._before_P[at_C], at_C])), known=known)

    def _occurrences(self, pair: int) -> Ints:
        """Return the positions of a pair, searching those of its rarer piece."""
        left, right = int(self.pairs.left[pair]), int(self.pairs.right[pair])
        if len(self._positions[left]) <= len(self._positions[right]):
            candidates = self._positions_of(left)
        else:
            candidates = self._before_P[self._positions_of(right)]
        found: Ints = candidates[self._pair_P[candidates] == pair]
        if left != right:
            return found
        # In a run like aaaa, take only every second position: a piece can be joined only once.
        kept, taken = [], -1
        for position, after in zip(found.tolist(), self._after_P[found].tolist(), strict=True):
            if position != taken:
                kept.append(position)
                taken = after
        return np.array(kept, np.int32)

    def _positions_of(self, piece: int) -> Ints:
        recorded = self._positions[piece]
        # Some of these positions have since been merged into longer pieces.
        self._positions[piece] = recorded[self._piece_P[recorded] == piece]
        return self._positions[piece]

    def _count_pairs(self, at_C: Ints, *, known: dict[tuple[int, int], int]) -> None:
        """Count the pairs that begin at these positions, and number those not in `known`."""
        left_C, right_C = self._piece_P[at_C], self._piece_P[self._after_P[at_C]]
        within_word = (left_C != NOTHING) & (right_C != NOTHING)
        at_C, left_C, right_C = at_C[within_word], left_C[within_word], right_C[within_word]
        keys, which_C = np.unique(left_C.astype(np.int64) << 32 | right_C, return_inverse=True)
        sides = zip((keys >> 32).tolist(), (keys & 0xFFFFFFFF).tolist(), strict=True)
        numbers = [known.get(pair) or self.pairs.number(*pair) for pair in sides]
        self._pair_P[at_C] = np.array(numbers, np.int32)[which_C]
        np.add.at(self.pairs.count, self._pair_P[at_C], self._word_count_P[at_C])


def _doubled(numbers: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate([numbers, np.zeros_like(numbers)])


Gains = NDArray[np.float64]
# Arguments: counts of a pair, of its left and of its right piece, and of all pieces in the text. A gain may
# rise only if the pair's count rises or the count of one of its pieces falls.
GainRule = Callable[[Gains, Gains, Gains, float], Gains]

_STEPS_PER_BIT = 2.0**20


def likelihood_gain(pair: Gains, left: Gains, right: Gains, total: float) -> Gains:
    """Return the gain in a unigram model's log likelihood, in bits (Schuster and Nakajima 2012)."""
    # Rounded, so that ties do not depend on the last digit of a machine's logarithm.
    return pair * np.rint(np.log2(pair * total / (left * right)) * _STEPS_PER_BIT)


def frequency_gain(pair: Gains, left: Gains, right: Gains, total: float) -> Gains:  # noqa: ARG001
    """Return the pair's count (byte pair encoding, Sennrich et al. 2016)."""
    return pair


class MergeRanking:
    """Finds the pair with the largest gain; ties are broken by text.

    A shortlist has each pair whose gain may exceed `floor`. A merge shortens all text, which lowers gains. It
    raises gains only for pairs with a piece it touched, which `update` adds. So while the best pair of the
    shortlist is above the floor, it is the best of all; otherwise the list is rebuilt.
    """

    def __init__(self, segmentation: Segmentation, gain: GainRule, *, min_count: int, shortlist: int) -> None:
        self._segmentation, self._gain = segmentation, gain
        self._min_count, self._length = min_count, shortlist
        self._shortlist: Ints
        self._listed: NDArray[np.bool_]  # True for pairs in the shortlist
        self._make_shortlist()

    def best(self, texts: Sequence[str]) -> int:
        """Return the pair to join next, or 0 if all are too rare; `texts` are the texts of the pieces."""
        if len(self._shortlist) > self._too_long:
            self._make_shortlist()
        while True:
            candidates = self._frequent(self._shortlist)
            gains = self._gains(candidates)
            best = gains.max(initial=-np.inf)
            if best > self._floor:
                # The first by text, a property of the vocabulary; pair numbers are an implementation detail.
                tied: list[int] = candidates[gains == best].tolist()
                left, right = self._segmentation.pairs.left, self._segmentation.pairs.right
                return min(tied, key=lambda pair: (texts[int(left[pair])], texts[int(right[pair])]))
            if self._floor == -np.inf:
                return 0
            self._make_shortlist()

    def update(self, pieces: set[int]) -> None:
        """Note that the counts of these pieces, or of pairs with them, have changed."""
        pairs = self._segmentation.pairs
        for piece in pieces:
            beside = self._frequent(pairs.beside(piece))
            if len(self._listed) < pairs.size:
                self._listed = np.concatenate([self._listed, np.zeros(len(pairs.count), np.bool_)])
            unlisted = beside[~self._listed[beside]]
            risen = unlisted[self._gains(unlisted) > self._floor]
            self._shortlist = np.concatenate([self._shortlist, risen])
            self._listed[risen] = True

    def _make_shortlist(self) -> None:
        everything = self._frequent(np.arange(1, self._segmentation.pairs.size, dtype=np.int32))
        gains = self._gains(everything)
        lowest = np.partition(gains, -self._length)[-self._length] if len(gains) > self._length else -np.inf
        self._floor = gains[gains < lowest].max(initial=-np.inf)
        self._shortlist = everything[gains >= lowest]
        self._too_long = 4 * max(self._length, len(self._shortlist))
        self._listed = np.zeros(len(self._segmentation.pairs.count), np.bool_)
        self._listed[self._shortlist] = True

    def _frequent(self, pairs: Ints) -> Ints:
        return pairs[self._segmentation.pairs.count[pairs] >= self._min_count]

    def _gains(self, numbers: Ints) -> Gains:
        pairs, pieces = self._segmentation.pairs, self._segmentation.piece_count
        seen = pairs.count[numbers].astype(np.float64)
        left = pieces[pairs.left[numbers]].astype(np.float64)
        right = pieces[pairs.right[numbers]].astype(np.float64)
        return self._gain(seen, left, right, float(self._segmentation.total))


_INSIDE_BIT = 1 << 32  # above every code point


@dataclass(frozen=True, slots=True)
class MergeRule:
    """The rule that selects the pairs to join."""

    gain: GainRule
    inside: str  # the prefix of a piece that continues a word, or ""
    min_count: int  # pairs with a lower count are not joined
    shortlist: int = 1024  # pairs considered for each merge; affects only the speed


@dataclass(frozen=True, slots=True)
class CharacterPieces:
    """Words as pieces of one character each, laid out for a Segmentation; texts[0] is a placeholder."""

    texts: list[str]
    piece_P: Ints
    word_count_P: Counts


@dataclass(frozen=True, slots=True)
class Merge:
    """A pair of pieces that was joined, and the resulting piece."""

    left: str
    right: str
    joined: str


def split_characters(words: Mapping[str, int], *, characters: int, inside: str) -> CharacterPieces:
    """Cut words into characters, without words that have a character not among the most frequent."""
    code_K = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    length_W = np.fromiter(map(len, words), np.int64, len(words))
    count_W = np.fromiter(words.values(), np.int64, len(words))
    # Keep words of only the most frequent characters; on a tie the lower code point wins.
    codes, which_K = np.unique(code_K, return_inverse=True)
    seen = np.bincount(which_K, np.repeat(count_W, length_W))
    is_common = np.zeros(len(codes), np.bool_)
    is_common[np.lexsort((codes, -seen))[:characters]] = True
    word_K = np.repeat(np.arange(len(length_W)), length_W)
    common_W = np.bincount(word_K[~is_common[which_K]], minlength=len(length_W)) == 0
    code_K = code_K[np.repeat(common_W, length_W)].astype(np.int64)
    length_W, count_W = length_W[common_W], count_W[common_W]
    # A character inside a word is a different piece from the same character at its beginning.
    if inside:
        code_K += _INSIDE_BIT
        code_K[np.cumsum(length_W) - length_W] -= _INSIDE_BIT
    pieces, which_K = np.unique(code_K, return_inverse=True)
    texts = [(inside if code >= _INSIDE_BIT else "") + chr(code % _INSIDE_BIT) for code in pieces.tolist()]
    at_K = np.arange(len(code_K)) + np.repeat(np.arange(1, len(length_W) + 1), length_W)
    piece_P = np.full(len(code_K) + len(length_W) + 1, NOTHING, np.int32)
    word_count_P = np.zeros(len(piece_P), np.int64)
    piece_P[at_K], word_count_P[at_K] = which_K + 1, np.repeat(count_W, length_W)
    return CharacterPieces(["", *texts], piece_P, word_count_P)


def learn_merges(start: CharacterPieces, rule: MergeRule) -> Iterator[Merge]:
    """Yield one merge after the other, each with the largest gain, on a tie the first by text."""
    texts = list(start.texts)
    numbers = {text: number for number, text in enumerate(texts)}
    segmentation = Segmentation(start.piece_P, start.word_count_P)
    ranking = MergeRanking(segmentation, rule.gain, min_count=rule.min_count, shortlist=rule.shortlist)
    while pair := ranking.best(texts):
        left, right = int(segmentation.pairs.left[pair]), int(segmentation.pairs.right[pair])
        joined = texts[left] + texts[right].removeprefix(rule.inside)
        into = numbers.setdefault(joined, len(texts))  # two pairs may join into the same text
        if into == len(texts):
            texts.append(joined)
        segmentation.merge(pair, into=into)
        ranking.update({left, right, into})
        yield Merge(texts[left], texts[right], joined)
