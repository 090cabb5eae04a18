"""Choosing units until the budget of a sequence is spent, for many sequences in lock step.

Units are looked at in random order. One that would exceed the budget is skipped (BERT's whole word masking).
With runs of units (ALBERT's n-grams), a drawn run that exceeds the budget is tried shorter, and one that
touches a chosen unit is skipped. The loop goes over ranks in that order, the arrays over sequences.

Shapes: U units of all sequences, S sequences, G most units a sequence has, K ranks looked at,
R longest run, C chosen units.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import Numbers
from bertsmith.ground.seeds import Words, bits, uniforms
from bertsmith.text.word_borders import Flags

_TOO_LARGE = 1 << 30
_RANK_BITS = np.uint64(0xFFFF)
_RUN_DRAWS = 1 << 32


@dataclass(frozen=True, slots=True)
class Units:
    """The units of some sequences, one after the other."""

    sizes_U: Numbers
    """In tokens."""
    barred_U: Flags
    counts_S: Numbers
    """Units in each sequence."""
    keys_S: Words


def choose_units(units: Units, budgets_S: Numbers) -> Flags:
    """Which units to mask, each chosen alone."""
    table = _Table(units)
    for ranks in table.depths(budgets_S):
        order_SK = table.random_order(ranks)
        sizes_KS = np.take_along_axis(table.sizes_SG, order_SK, axis=1).T.copy()
        chosen_KS = np.zeros(sizes_KS.shape, np.bool_)
        left_S = budgets_S.copy()
        for rank, sizes_S in enumerate(sizes_KS):
            fits_S = np.less_equal(sizes_S, left_S, out=chosen_KS[rank])
            left_S -= sizes_S * fits_S
            if not left_S.any():
                break
        if not left_S.any():
            break
    rank_C, sequence_C = np.nonzero(chosen_KS)
    return table.flags(sequence_C, order_SK[sequence_C, rank_C])


def choose_runs(units: Units, budgets_S: Numbers, *, longest_S: Numbers) -> Flags:
    """Which units to mask, chosen in runs of one to `longest_S` neighbours."""
    table = _Table(units)
    runs = table.run_sizes(longest_S)
    for ranks in table.depths(budgets_S):
        order_SK = table.random_order(ranks)
        covered_SG, left_S = _cover(runs, order_SK, budgets_S)
        if not left_S.any():
            break
    return covered_SG[table.exists_SG]


def _cover(runs_RSG: Numbers, order_SK: Numbers, budgets_S: Numbers) -> tuple[Flags, Numbers]:
    """The units in the chosen runs, and what is left of the budgets."""
    longest, count, width = runs_RSG.shape
    runs_KRS = np.stack([np.take_along_axis(runs_SG, order_SK, axis=1) for runs_SG in runs_RSG]).T
    sequences_S, offsets_R = np.arange(count), np.arange(longest)[:, None]
    covered = np.zeros(count * (width + longest), np.bool_)
    left_S = budgets_S.copy()
    for units_S, runs_RS in zip(order_SK.T, np.ascontiguousarray(runs_KRS.transpose(0, 2, 1)), strict=True):
        # A longer run is never smaller, so the number of runs that fit is the length of the longest one.
        lengths_S = np.count_nonzero(runs_RS <= left_S, axis=0)
        places_RS = sequences_S * (width + longest) + units_S + offsets_R
        in_run_RS = offsets_R < lengths_S
        is_free_S = ~(covered[places_RS] & in_run_RS).any(axis=0) & (lengths_S > 0)
        covered[places_RS] |= in_run_RS & is_free_S
        left_S -= runs_RS[lengths_S - 1, sequences_S] * is_free_S
        if not left_S.any():
            break
    return covered.reshape(count, width + longest)[:, :width], left_S


def run_weights(longest: int) -> NDArray[np.float64]:
    """The probability of a run of 1, 2, ... units: proportional to 1/n (ALBERT)."""
    weights_R: NDArray[np.float64] = 1 / np.arange(1, longest + 1)
    weights_R /= weights_R.sum()
    return weights_R


class _Table:
    """The units as a table, a row for each sequence."""

    def __init__(self, units: Units) -> None:
        self.keys_S = units.keys_S
        self.width = int(units.counts_S.max(initial=0))
        assert self.width <= _RANK_BITS
        self.numbers_1G = np.arange(self.width)[None]
        self.exists_SG = self.numbers_1G < units.counts_S[:, None]
        self.sizes_SG = np.full(self.exists_SG.shape, _TOO_LARGE)
        self.sizes_SG[self.exists_SG] = np.where(units.barred_U, _TOO_LARGE, units.sizes_U)
        self._first_S = np.cumsum(units.counts_S) - units.counts_S
        self._total = len(units.sizes_U)

    def depths(self, budgets_S: Numbers) -> Iterator[int]:
        """How many ranks to look at: nearly always enough, and then all."""
        enough = 2 * int(budgets_S.max(initial=0)) + 16
        if enough < self.width:
            yield enough
        yield self.width

    def random_order(self, ranks: int) -> Numbers:
        """The numbers of the units that come first in the order of their draws."""
        numbers_1G = self.numbers_1G.astype(np.uint64)
        drawn_SG = bits(self.keys_S[:, None], numbers_1G) | _RANK_BITS
        drawn_SG[~self.exists_SG] = ~np.uint64(0)
        # The unit's number replaces the lowest bits, so that sorting moves it along.
        drawn_SG ^= _RANK_BITS ^ numbers_1G
        if ranks < self.width:
            drawn_SG = np.partition(drawn_SG, ranks, axis=1)[:, :ranks]
        drawn_SG.sort(axis=1)
        return (drawn_SG & _RANK_BITS).astype(np.int64)

    def flags(self, sequence_C: Numbers, number_C: Numbers) -> Flags:
        """Flags of all units, set for those chosen: their sequence and their number in it."""
        chosen_U = np.zeros(self._total, np.bool_)
        chosen_U[self._first_S[sequence_C] + number_C] = True
        return chosen_U

    def run_sizes(self, longest_S: Numbers) -> Numbers:
        """The tokens [R, S, G] of the run of 1 to R units from each on; too many beyond the drawn length."""
        longest, width = int(longest_S.max(initial=1)), self.width
        drawn_SG = self._drawn_run_lengths(longest_S, longest)
        before_SG = np.zeros((len(longest_S), width + longest), np.int64)
        np.cumsum(np.where(self.exists_SG, self.sizes_SG, 0), axis=1, out=before_SG[:, 1 : width + 1])
        before_SG[:, width + 1 :] = before_SG[:, width : width + 1]
        runs_RSG = np.empty((longest, *drawn_SG.shape), np.int64)
        for length in range(1, longest + 1):
            runs_RSG[length - 1] = before_SG[:, length : length + width] - before_SG[:, :width]
            runs_RSG[length - 1][~self.exists_SG | (drawn_SG < length)] = _TOO_LARGE
        return runs_RSG

    def _drawn_run_lengths(self, longest_S: Numbers, longest: int) -> Numbers:
        counters_1G = (self.numbers_1G + _RUN_DRAWS).astype(np.uint64)
        limits = np.cumsum(run_weights(longest))[:-1]
        drawn_SG = 1 + np.searchsorted(limits, uniforms(self.keys_S[:, None], counters_1G), side="right")
        return np.where(longest_S[:, None] > 1, drawn_SG, 1)
