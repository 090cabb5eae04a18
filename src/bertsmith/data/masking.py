"""Masking: choose the tokens to predict, and what the model sees in their place (Devlin et al. 2018, 3.1).

1. Units: the text is divided into units that are masked whole (`UNITS`: a new kind is a line there, and its
   name in the recipe's `Unit`).
2. Choice: units are taken in random order until the budget of a sequence is spent, for many sequences in lock
   step. A unit that would exceed the budget is skipped (BERT's whole word masking). With runs of units
   (ALBERT's n-grams), a sampled run that exceeds the budget is tried shorter, and a run that touches a chosen
   unit is skipped. The loop goes over ranks in that order, the arrays over sequences.
3. Replacement: each chosen token is shown as the mask, as a random token, or unchanged.

Every random number follows from a key of the example itself and a counter, so masks depend neither on workers
nor on the batch that an example is part of.

Shapes: X tokens of text, N spans of text, P predicted tokens, S sequences, U units, G most units per
sequence, K ranks tried, R longest run, C chosen units.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.seeds import Words, bits, uniforms
from bertsmith.data.example_index import Numbers
from bertsmith.recipe.data_sections import Level, MaskingSection, Unit
from bertsmith.text.lexicon import UNIT_KINDS
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_boundaries import Flags, WordBoundaries


@dataclass(frozen=True, slots=True)
class Text:
    """The text of some sequences, without special tokens, with the keys and codes that decide its masks."""

    tokens_X: Numbers
    span_lengths_N: Numbers
    lengths_S: Numbers
    whole_lengths_S: Numbers
    """Lengths with special tokens, the basis of the masking budget."""
    keys_S: Words
    codes_X: NDArray[np.uint8] | None = None
    """The store's unit codes, if a level uses them."""
    next_codes_N: NDArray[np.uint8] | None = None
    """Unit code of the token after each span in the store."""


@dataclass(frozen=True, slots=True)
class UnitMarks:
    """Flags of the tokens that start a unit, and of the starts of units that must not be chosen."""

    starts_X: Flags
    barred_X: Flags


@dataclass(frozen=True, slots=True)
class MaskingUnit:
    """A kind of unit that is masked whole: how to find its units in a text, and how to choose among them."""

    mark: Callable[[Text, WordBoundaries], UnitMarks]
    in_runs: bool = False
    """True if units are chosen in runs of 1 to masking.longest_ngram neighbours, not one by one."""
    in_store: bool = False
    """True if only stores made with a lexicon have these units, as unit codes of their tokens."""


def _mark_tokens(text: Text, boundaries: WordBoundaries) -> UnitMarks:  # noqa: ARG001
    return UnitMarks(np.ones(len(text.tokens_X), np.bool_), np.zeros(len(text.tokens_X), np.bool_))


def _mark_words(text: Text, boundaries: WordBoundaries) -> UnitMarks:
    # The store's lexicon and masking share one definition of a word; a span always starts one. A word that
    # truncation has cut is its remaining part, as in BERT's code.
    starts_X = boundaries.begins(text.tokens_X, text.span_lengths_N)[:-1]
    return UnitMarks(starts_X, np.zeros(len(starts_X), np.bool_))


def _mark_stored(text: Text, boundaries: WordBoundaries, *, kind: int) -> UnitMarks:
    """Mark the store's units of this kind, and words everywhere else, as a level of ERNIE's masks them.

    A unit that truncation has cut is never chosen.
    """
    assert text.codes_X is not None and text.next_codes_N is not None
    words_X = _mark_words(text, boundaries).starts_X
    span_starts_N = np.cumsum(text.span_lengths_N) - text.span_lengths_N
    begins_X, inside_X = text.codes_X == 2 * kind, text.codes_X == 2 * kind + 1
    in_unit_X = begins_X | inside_X
    behind_unit_X = np.concatenate([[False], in_unit_X[:-1]])
    starts_X = begins_X | (~in_unit_X & (words_X | behind_unit_X))
    starts_X[span_starts_N] = True
    barred_X = starts_X & inside_X  # its first tokens were cut off
    start_of_unit_X = np.maximum.accumulate(np.where(starts_X, np.arange(len(starts_X)), 0))
    continues_N = text.next_codes_N == 2 * kind + 1
    barred_X[start_of_unit_X[span_starts_N + text.span_lengths_N - 1][continues_N]] = True
    return UnitMarks(starts_X, barred_X)


UNITS: dict[Unit, MaskingUnit] = {
    "token": MaskingUnit(_mark_tokens),
    "word": MaskingUnit(_mark_words),
    "ngram": MaskingUnit(_mark_words, in_runs=True),
    "phrase": MaskingUnit(partial(_mark_stored, kind=UNIT_KINDS.index("phrase")), in_store=True),
    "entity": MaskingUnit(partial(_mark_stored, kind=UNIT_KINDS.index("entity")), in_store=True),
}


def uncut_units(text: Text, unit: Unit, *, boundaries: WordBoundaries) -> tuple[Numbers, Numbers]:
    """Return the starts and ends of the phrases or entities that truncation has not cut."""
    assert text.codes_X is not None
    marks = UNITS[unit].mark(text, boundaries)
    starts_U = np.flatnonzero(marks.starts_X)
    ends_U = np.append(starts_U[1:], len(text.tokens_X))
    is_uncut_U = (text.codes_X[starts_U] == 2 * UNIT_KINDS.index(unit)) & ~marks.barred_X[starts_U]
    return starts_U[is_uncut_U], ends_U[is_uncut_U]


_TOO_LARGE = 1 << 30  # the size of units that must not be chosen: it fits into no budget
_RANK_BITS = np.uint64(0xFFFF)
_RUN_DRAWS = 1 << 32


@dataclass(frozen=True, slots=True)
class Units:
    """The units of some sequences, one after the other."""

    sizes_U: Numbers
    """Sizes in tokens."""
    barred_U: Flags
    counts_S: Numbers
    """Number of units in each sequence."""
    keys_S: Words
    weights_U: NDArray[np.float64] | None = None
    """Relative frequency of choosing each unit, or None if all are equal."""


def choose_units(units: Units, budgets_S: Numbers) -> Flags:
    """Choose the units to mask, one at a time."""
    table = _Table(units)
    # Sorting all units of all sequences would be most of the work, but the first few nearly always spend the
    # budget. If not, sort all of them: the draws are the same, so the same units come first.
    for ranks in table.depths(budgets_S):
        order_SK = table.random_order(ranks)
        # Ranks first and contiguous: the loop reads one row of sizes after the other.
        sizes_KS = np.take_along_axis(table.sizes_SG, order_SK, axis=1).T.copy()
        chosen_KS = np.zeros(sizes_KS.shape, np.bool_)
        left_S = budgets_S.copy()
        for rank, sizes_S in enumerate(sizes_KS):
            # A unit that does not fit is skipped and never cut: half a word would give away the other half.
            fits_S = np.less_equal(sizes_S, left_S, out=chosen_KS[rank])
            left_S -= sizes_S * fits_S
            if not left_S.any():
                break
        if not left_S.any():
            break
    rank_C, sequence_C = np.nonzero(chosen_KS)
    return table.flags(sequence_C, order_SK[sequence_C, rank_C])


def choose_runs(units: Units, budgets_S: Numbers, *, max_run_S: Numbers) -> Flags:
    """Choose the units to mask, in runs of one to `max_run_S` neighbours."""
    table = _Table(units)
    runs_RSG = table.run_sizes(max_run_S)
    max_run, count, width = runs_RSG.shape
    sequences_S, offsets_R = np.arange(count), np.arange(max_run)[:, None]
    for ranks in table.depths(budgets_S):
        order_SK = table.random_order(ranks)
        runs_KRS = np.stack([np.take_along_axis(runs_SG, order_SK, axis=1) for runs_SG in runs_RSG]).T
        runs_KRS = np.ascontiguousarray(runs_KRS.transpose(0, 2, 1))
        # Units covered by the chosen runs: a flat table; its rows have a margin for runs past the end.
        covered = np.zeros(count * (width + max_run), np.bool_)
        left_S = budgets_S.copy()
        for units_S, runs_RS in zip(order_SK.T, runs_KRS, strict=True):
            # A longer run is never smaller, so the number that fit is the longest one's length.
            lengths_S = np.count_nonzero(runs_RS <= left_S, axis=0)
            cells_RS = sequences_S * (width + max_run) + units_S + offsets_R
            in_run_RS = offsets_R < lengths_S
            is_free_S = ~(covered[cells_RS] & in_run_RS).any(axis=0) & (lengths_S > 0)
            covered[cells_RS] |= in_run_RS & is_free_S
            left_S -= runs_RS[lengths_S - 1, sequences_S] * is_free_S
            if not left_S.any():
                break
        if not left_S.any():
            break
    return covered.reshape(count, width + max_run)[:, :width][table.exists_SG]


def run_weights(max_run: int) -> NDArray[np.float64]:
    """Return the probabilities of runs of 1, 2, ... units: proportional to 1/n (ALBERT)."""
    weights_R: NDArray[np.float64] = 1 / np.arange(1, max_run + 1)
    weights_R /= weights_R.sum()
    return weights_R


class _Table:
    """The units as a table with a row per sequence."""

    def __init__(self, units: Units) -> None:
        self.keys_S = units.keys_S
        self.width = int(units.counts_S.max(initial=0))
        assert self.width <= _RANK_BITS
        self.numbers_1G = np.arange(self.width)[None]
        # All rows are as long as the longest one; missing units are too large for any budget.
        self.exists_SG = self.numbers_1G < units.counts_S[:, None]
        self.sizes_SG = np.full(self.exists_SG.shape, _TOO_LARGE)
        self.sizes_SG[self.exists_SG] = np.where(units.barred_U, _TOO_LARGE, units.sizes_U)
        self.weights_SG: NDArray[np.float64] | None = None
        if units.weights_U is not None:
            self.weights_SG = np.ones(self.exists_SG.shape)
            self.weights_SG[self.exists_SG] = units.weights_U
        self._first_S = np.cumsum(units.counts_S) - units.counts_S
        self._total = len(units.sizes_U)

    def depths(self, budgets_S: Numbers) -> Iterator[int]:
        """Yield how many ranks to try: a number that is nearly always enough, then all."""
        enough = 2 * int(budgets_S.max(initial=0)) + 16
        if enough < self.width:
            yield enough  # sorting only these is what makes long sequences cheap
        yield self.width

    def random_order(self, ranks: int) -> Numbers:
        """Return the numbers of the first `ranks` units of each sequence, in random order."""
        # Sort by a random number for each unit. Unlike a shuffle by swaps, this keeps nothing between draws,
        # so the order in one sequence does not depend on the other sequences.
        numbers_1G = self.numbers_1G.astype(np.uint64)
        if self.weights_SG is None:
            sampled_SG = bits(self.keys_S[:, None], numbers_1G)
        else:
            # Waiting times at these rates: their order equals drawing by weight without replacement
            # (Efraimidis & Spirakis 2006), and the bits of positive floats sort as the floats do.
            drawn_SG = uniforms(self.keys_S[:, None], numbers_1G)
            sampled_SG = (-np.log1p(-drawn_SG) / self.weights_SG).view(np.uint64)
        sampled_SG |= _RANK_BITS
        sampled_SG[~self.exists_SG] = ~np.uint64(0)
        # The unit's number replaces the lowest bits, so that sorting moves it along.
        sampled_SG ^= _RANK_BITS ^ numbers_1G
        if ranks < self.width:
            sampled_SG = np.partition(sampled_SG, ranks, axis=1)[:, :ranks]
        sampled_SG.sort(axis=1)
        return (sampled_SG & _RANK_BITS).astype(np.int64)

    def flags(self, sequence_C: Numbers, number_C: Numbers) -> Flags:
        """Return flags of all units, set for the chosen ones: their sequence and their number in it."""
        chosen_U = np.zeros(self._total, np.bool_)
        chosen_U[self._first_S[sequence_C] + number_C] = True
        return chosen_U

    def run_sizes(self, max_run_S: Numbers) -> Numbers:
        """Return the sizes [R, S, G] of runs of 1 to R units; _TOO_LARGE beyond the sampled length."""
        max_run, width = int(max_run_S.max(initial=1)), self.width
        # Other counters than `random_order` uses: a unit's rank and its run length must be independent.
        counters_1G = (self.numbers_1G + _RUN_DRAWS).astype(np.uint64)
        limits = np.cumsum(run_weights(max_run))[:-1]
        sampled_SG = 1 + np.searchsorted(limits, uniforms(self.keys_S[:, None], counters_1G), side="right")
        sampled_SG = np.where(max_run_S[:, None] > 1, sampled_SG, 1)
        # A run's size is a difference of running sums, which stay constant after a sequence's last unit.
        before_SG = np.zeros((len(max_run_S), width + max_run), np.int64)
        np.cumsum(np.where(self.exists_SG, self.sizes_SG, 0), axis=1, out=before_SG[:, 1 : width + 1])
        before_SG[:, width + 1 :] = before_SG[:, width : width + 1]
        runs_RSG = np.empty((max_run, *sampled_SG.shape), np.int64)
        for length in range(1, max_run + 1):
            runs_RSG[length - 1] = before_SG[:, length : length + width] - before_SG[:, :width]
            runs_RSG[length - 1][~self.exists_SG | (sampled_SG < length)] = _TOO_LARGE
        return runs_RSG


# Numbers of the draws under a sequence's key, far from those for choosing units. Never change them: a resumed
# run would get other masks.
_FATE, _REPLACEMENT, _LEVEL, _FRACTION, _SAMPLING = (number << 32 for number in (2, 3, 4, 5, 6))
SAMPLING_BITS = 30
"""Bits of the draws that sample tokens: sums of this many bits fit into 32."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of a tokenizer's ids that masking depends on."""

    mask_id: int
    random_ids: Numbers
    """Ids to sample random tokens from."""
    boundaries: WordBoundaries
    weights_V: NDArray[np.float64] | None = None
    """Relative frequency of choosing each token (masking.smoothing), or None if all are equal."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The predicted tokens, in order."""

    indices_P: Numbers
    """Indices into the text."""
    shown_P: Numbers
    """Ids that the model sees at these indices."""


def read_vocabulary(
    tokenizer: Tokenizer, masking: MaskingSection, token_counts: NDArray[np.int64] | None = None
) -> Vocabulary:
    """Read the properties of the ids; token_counts is needed only to choose rare tokens more often."""
    # A gap is an id without a token: its embedding is never trained, and must not be shown.
    excluded = set(tokenizer.gaps)
    if masking.random_from == "ordinary":
        excluded |= tokenizer.special_ids
    random_ids = np.setdiff1d(np.arange(tokenizer.vocabulary_size), np.array(sorted(excluded), np.int64))
    weights_V = None
    if masking.smoothing:
        assert token_counts is not None, "only a store knows which tokens are rare"
        weights_V = np.maximum(token_counts, 1).astype(np.float64) ** -masking.smoothing
    return Vocabulary(tokenizer.mask_id, random_ids, WordBoundaries(tokenizer), weights_V)


def stored_units(masking: MaskingSection) -> list[Unit]:
    """Return the kinds of units in a recipe that only the store knows: phrases, entities, both or none."""
    return sorted({level.unit for level in _levels_of(masking) if UNITS[level.unit].in_store})


@dataclass(frozen=True, slots=True)
class Masker:
    """Masks text by a masking section, for one vocabulary."""

    masking: MaskingSection
    vocabulary: Vocabulary
    max_predictions: int
    """Maximum predicted tokens per sequence."""

    def masks(self, text: Text, *, progress: float, rate: float | None = None) -> Masks:
        """Return the masks of these sequences at a rate, by default the recipe's initial rate.

        With masking.levels_by = stage, the run's progress selects the level.
        """
        levels = _levels_of(self.masking)
        limits = np.cumsum([level.fraction for level in levels])[:-1]
        if self.masking.levels_by == "stage":
            level_S = np.full(len(text.lengths_S), np.searchsorted(limits, progress, side="right"))
        else:
            level_S = np.searchsorted(limits, uniforms(text.keys_S, np.uint64(_LEVEL)), side="right")
        # Units: each level marks the whole text, and its marks are used for the sequences of that level.
        starts_X, barred_X = (np.zeros(len(text.tokens_X), np.bool_) for _ in range(2))
        level_X = np.repeat(level_S, text.lengths_S)
        for number in np.unique(level_S).tolist():
            marks = UNITS[levels[number].unit].mark(text, self.vocabulary.boundaries)
            here_X = level_X == number
            starts_X[here_X], barred_X[here_X] = marks.starts_X[here_X], marks.barred_X[here_X]
        starts_U = np.flatnonzero(starts_X)
        sizes_U = np.diff(starts_U, append=len(text.tokens_X))
        before_X1 = np.concatenate([[0], np.cumsum(starts_X)])
        ends_S = np.cumsum(text.lengths_S)
        counts_S = before_X1[ends_S] - before_X1[ends_S - text.lengths_S]
        weights_V = self.vocabulary.weights_V
        weights_U = None if weights_V is None else weights_V[text.tokens_X[starts_U]]
        units = Units(sizes_U, barred_X[starts_U], counts_S, text.keys_S, weights_U)
        budgets_S = self._budgets(text, self.masking.rate if rate is None else rate)
        # Choice, then replacement.
        runs = [self.masking.longest_ngram if UNITS[level.unit].in_runs else 1 for level in levels]
        max_run_S = np.array(runs)[level_S]
        if max_run_S.max(initial=1) > 1:
            chosen_U = choose_runs(units, budgets_S, max_run_S=max_run_S)
        else:
            chosen_U = choose_units(units, budgets_S)
        indices_P = np.flatnonzero(np.repeat(chosen_U, sizes_U))
        return Masks(indices_P, self._shown(text, indices_P))

    def _budgets(self, text: Text, rate: float) -> Numbers:
        """Return the number of tokens to predict in each sequence; special tokens count in its length."""
        expected_S = rate * text.whole_lengths_S
        if self.masking.count == "stochastic":  # fairseq, mask_tokens_dataset.py
            budgets_S = np.floor(expected_S + uniforms(text.keys_S, np.uint64(_FRACTION)))
        else:  # create_pretraining_data.py; rint and Python's round both take halves to the even side
            budgets_S = np.maximum(1, np.rint(expected_S))
        return np.minimum(budgets_S, self.max_predictions).astype(np.int64)

    def sampling_draws(self, text: Text, indices_P: Numbers) -> Numbers:
        """Draw a whole number below 2**SAMPLING_BITS for each of these tokens, to sample its replacement."""
        keys_P, number_P = _keys_of_tokens(text, indices_P)
        sampled_P = uniforms(keys_P, (number_P + _SAMPLING).astype(np.uint64))
        draws_P: Numbers = (sampled_P * 2.0**SAMPLING_BITS).astype(np.int64)
        return draws_P

    def _shown(self, text: Text, indices_P: Numbers) -> Numbers:
        """Return the mask, a random token or the original for each token, drawn independently."""
        keys_P, number_P = _keys_of_tokens(text, indices_P)
        fate_P = uniforms(keys_P, (number_P + _FATE).astype(np.uint64))
        sampled_P = uniforms(keys_P, (number_P + _REPLACEMENT).astype(np.uint64))
        random_P = self.vocabulary.random_ids[(sampled_P * len(self.vocabulary.random_ids)).astype(np.int64)]
        is_kept_P = fate_P >= self.masking.as_mask + self.masking.as_random
        shown_P = np.where(is_kept_P, text.tokens_X[indices_P], random_P)
        return np.where(fate_P < self.masking.as_mask, self.vocabulary.mask_id, shown_P)


def _keys_of_tokens(text: Text, indices_P: Numbers) -> tuple[Words, Numbers]:
    """Return the key of each token's sequence and the token's index in it, the counter of its draws."""
    # The index in the sequence, not in the batch, so that other sequences do not matter.
    ends_S = np.cumsum(text.lengths_S)
    sequence_P = np.searchsorted(ends_S, indices_P, side="right")
    return text.keys_S[sequence_P], indices_P - (ends_S - text.lengths_S)[sequence_P]


def _levels_of(masking: MaskingSection) -> Sequence[Level]:
    return masking.levels or (Level(unit=masking.unit, fraction=1),)
