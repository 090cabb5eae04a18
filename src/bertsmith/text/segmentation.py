"""All words of a corpus cut into pieces, in flat arrays, so that joining a pair is a few array steps.

Positions run over the characters of all distinct words, with one empty position between words. A piece stands
at the position of its first character. Letters at the end of names: P positions, C changed positions.
"""

from array import array
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.int64)

NOTHING = 0  # the piece at empty positions, and the pair at positions where none begins


class Pairs:
    """Which pieces stand side by side and how often; pairs are numbered from 1 as they first appear."""

    def __init__(self) -> None:
        self.size = 1
        self.left: Ints = np.zeros(1024, np.int32)
        self.right: Ints = np.zeros(1024, np.int32)
        self.count: Counts = np.zeros(1024, np.int64)
        self._beside: dict[int, array[int]] = {}

    def beside(self, piece: int) -> Ints:
        """The pairs that a piece is part of."""
        return np.array(self._beside.get(piece, ()), np.int32)

    def number(self, left: int, right: int) -> int:
        """The number of a pair that has none yet."""
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
        """From the piece at each position (0 between words and at both ends) and its word's count there."""
        size = len(piece_P)
        self.pairs = Pairs()
        self.piece_count: Counts = np.bincount(piece_P, word_count_P).astype(np.int64)
        self.total = int(self.piece_count.sum())
        self._piece_P, self._word_count_P = piece_P.copy(), word_count_P
        self._after_P = np.arange(1, size + 1, dtype=np.int32)
        self._before_P = np.arange(-1, size - 1, dtype=np.int32)
        self._pair_P = np.zeros(size, np.int32)
        self._positions = _positions_by_piece(piece_P)
        self._count_pairs(np.arange(size - 1, dtype=np.int32), known={})

    def merge(self, pair: int, *, into: int) -> None:
        """Join this pair into a piece, from left to right where occurrences overlap."""
        at_C = self._occurrences(pair)
        right_C = self._after_P[at_C]
        self._forget_pairs(np.unique(np.concatenate([self._before_P[at_C], at_C, right_C])))
        self._move_counts(pair, into, int(self._word_count_P[at_C].sum()))
        self._piece_P[at_C], self._piece_P[right_C] = into, NOTHING
        self._after_P[at_C] = self._after_P[right_C]
        self._before_P[self._after_P[at_C]] = at_C
        self._positions[into] = np.union1d(self._positions.get(into, at_C), at_C)
        known = {
            (int(self.pairs.left[it]), int(self.pairs.right[it])): int(it) for it in self.pairs.beside(into)
        }
        self._count_pairs(np.unique(np.concatenate([self._before_P[at_C], at_C])), known=known)

    def _occurrences(self, pair: int) -> Ints:
        """Where the pair stands: sought among the positions of its rarer piece."""
        left, right = int(self.pairs.left[pair]), int(self.pairs.right[pair])
        if len(self._positions[left]) <= len(self._positions[right]):
            candidates = self._positions_of(left)
        else:
            candidates = self._before_P[self._positions_of(right)]
        found = candidates[self._pair_P[candidates] == pair]
        return self._without_overlaps(found) if left == right else found

    def _positions_of(self, piece: int) -> Ints:
        recorded = self._positions[piece]
        # Some have become parts of longer pieces since.
        self._positions[piece] = recorded[self._piece_P[recorded] == piece]
        return self._positions[piece]

    def _without_overlaps(self, at: Ints) -> Ints:
        """Of a run like aaaa only every second position, for a piece can be joined but once."""
        kept, taken = [], -1
        for position, after in zip(at.tolist(), self._after_P[at].tolist(), strict=True):
            if position != taken:
                kept.append(position)
                taken = after
        return np.array(kept, np.int32)

    def _move_counts(self, pair: int, into: int, count: int) -> None:
        if into >= len(self.piece_count):
            self.piece_count = _doubled(self.piece_count)
        self.piece_count[self.pairs.left[pair]] -= count
        self.piece_count[self.pairs.right[pair]] -= count
        self.piece_count[into] += count
        self.total -= count

    def _forget_pairs(self, at_C: Ints) -> None:
        """Uncount the pairs that begin at these positions."""
        np.subtract.at(self.pairs.count, self._pair_P[at_C], self._word_count_P[at_C])
        self._pair_P[at_C] = NOTHING

    def _count_pairs(self, at_C: Ints, *, known: dict[tuple[int, int], int]) -> None:
        """Count the pairs that begin at these positions; they are known or new."""
        left_C, right_C = self._piece_P[at_C], self._piece_P[self._after_P[at_C]]
        within_word = (left_C != NOTHING) & (right_C != NOTHING)
        at_C, left_C, right_C = at_C[within_word], left_C[within_word], right_C[within_word]
        keys, which_C = np.unique(left_C.astype(np.int64) << 32 | right_C, return_inverse=True)
        spelled = zip((keys >> 32).tolist(), (keys & 0xFFFFFFFF).tolist(), strict=True)
        numbers = [known.get(pair) or self.pairs.number(*pair) for pair in spelled]
        self._pair_P[at_C] = np.array(numbers, np.int32)[which_C]
        np.add.at(self.pairs.count, self._pair_P[at_C], self._word_count_P[at_C])


def _positions_by_piece(piece_P: Ints) -> dict[int, Ints]:
    order = np.argsort(piece_P, kind="stable").astype(np.int32)
    starts = np.flatnonzero(np.diff(piece_P[order], prepend=-1))
    parts: Sequence[Ints] = np.split(order, starts[1:])
    return {int(piece_P[part[0]]): part for part in parts if len(part) and piece_P[part[0]] != NOTHING}


def _doubled(numbers: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate([numbers, np.zeros_like(numbers)])
