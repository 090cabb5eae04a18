"""Which pair to join next: the one whose joining gains most, found without looking at all pairs each time."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bertsmith.text.segmentation import Ints, Segmentation

Gains = NDArray[np.float64]
# From how often a pair, its left and its right piece are seen, and the number of all pieces in the text.
# A gain may rise only when the pair is seen more often or one of its pieces less often.
GainRule = Callable[[Gains, Gains, Gains, float], Gains]

_STEPS_PER_BIT = 2.0**20


def likelihood_gain(pair: Gains, left: Gains, right: Gains, total: float) -> Gains:
    """How much likelier, in bits, the text is to a unigram model of pieces (Schuster and Nakajima 2012)."""
    # Rounded, so that the last digit of a machine's logarithm cannot decide between equals.
    return pair * np.rint(np.log2(pair * total / (left * right)) * _STEPS_PER_BIT)


def frequency_gain(pair: Gains, left: Gains, right: Gains, total: float) -> Gains:  # noqa: ARG001
    """How often the pair is seen (byte pair encoding, Sennrich et al. 2016)."""
    return pair


class MergeRanking:
    """The pair with the largest gain, the first by text among equals.

    A shortlist holds every pair whose gain may exceed `floor`. A merge makes all text shorter, which lowers
    gains; it raises them only for pairs beside the pieces it touched, which `look_again` is told. So while
    the best of the shortlist is above the floor, no other pair is as good; after that the list is made anew.
    """

    def __init__(self, segmentation: Segmentation, gain: GainRule, *, min_count: int, shortlist: int) -> None:
        self._segmentation, self._gain = segmentation, gain
        self._min_count, self._length = min_count, shortlist
        self._shortlist: Ints
        self._listed: NDArray[np.bool_]  # whether a pair is in the shortlist
        self._make_shortlist()

    def best(self, texts: Sequence[str]) -> int:
        """The pair to join next, or 0 if none is frequent enough; texts are those of the pieces."""
        if len(self._shortlist) > self._too_long:
            self._make_shortlist()
        while True:
            candidates = self._frequent(self._shortlist)
            gains = self._gains(candidates)
            best = gains.max(initial=-np.inf)
            if best > self._floor:
                return self._first_by_text(candidates[gains == best], texts)
            if self._floor == -np.inf:
                return 0
            self._make_shortlist()

    def look_again(self, pieces: set[int]) -> None:
        """Note that these pieces, or the pairs they are part of, are seen more or less often than before."""
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
        least = np.partition(gains, -self._length)[-self._length] if len(gains) > self._length else -np.inf
        self._floor = gains[gains < least].max(initial=-np.inf)
        self._shortlist = everything[gains >= least]
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

    def _first_by_text(self, numbers: Ints, texts: Sequence[str]) -> int:
        left, right = self._segmentation.pairs.left, self._segmentation.pairs.right
        tied: list[int] = numbers.tolist()
        return min(tied, key=lambda pair: (texts[int(left[pair])], texts[int(right[pair])]))
