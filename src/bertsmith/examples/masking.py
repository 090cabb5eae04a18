"""Which tokens the model must guess, and what it is shown in their place (Devlin et al. 2018, 3.1).

Shapes: X tokens of text, P predicted tokens, S sequences, U units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.examples.masking_choice import Units, choose_runs, choose_units
from bertsmith.examples.masking_units import CODED_UNITS, Text, UnitMarks, mark_units
from bertsmith.examples.pairs import Numbers
from bertsmith.ground.seeds import uniforms
from bertsmith.recipe.schema import Level, MaskingSection, Unit
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_borders import Flags, WordBorders

# Numbers of the draws under a sequence's key, far from those that masking_choice takes for its units.
_FATE, _REPLACEMENT, _LEVEL, _FRACTION = (number << 32 for number in (2, 3, 4, 5))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What masking must know about a tokenizer's ids."""

    mask_id: int
    random_ids: Numbers
    """The ids that a random token is drawn from."""
    borders: WordBorders


@dataclass(frozen=True, slots=True)
class Masks:
    """The predicted tokens, in their order."""

    places_P: Numbers
    """Where they stand in the text."""
    shown_P: Numbers
    """What the model sees there."""


def read_vocabulary(tokenizer: Tokenizer, masking: MaskingSection) -> Vocabulary:
    """The ids that masking needs."""
    left_out = set(tokenizer.gaps)
    if masking.random_from == "ordinary":
        left_out |= tokenizer.special_ids
    random_ids = np.setdiff1d(np.arange(tokenizer.vocabulary_size), np.array(sorted(left_out), np.int64))
    return Vocabulary(tokenizer.mask_id, random_ids, WordBorders(tokenizer))


def coded_units(masking: MaskingSection) -> list[Unit]:
    """What is masked whole that only the store knows: phrases, entities, both or none."""
    return sorted({level.unit for level in _levels_of(masking)} & CODED_UNITS)


@dataclass(frozen=True, slots=True)
class Masker:
    """A masking section made ready for a vocabulary."""

    masking: MaskingSection
    vocabulary: Vocabulary
    most: int
    """Most predicted tokens a sequence."""

    def masks(self, text: Text, *, progress: float) -> Masks:
        """The masks of these sequences; the run's progress tells the level where levels follow each other."""
        level_S = self._levels(text, progress)
        marks = self._marks(text, level_S)
        starts_U = np.flatnonzero(marks.starts_X)
        sizes_U = np.diff(starts_U, append=len(text.tokens_X))
        before_X1 = np.concatenate([[0], np.cumsum(marks.starts_X)])
        ends_S = np.cumsum(text.lengths_S)
        counts_S = before_X1[ends_S] - before_X1[ends_S - text.lengths_S]
        units = Units(sizes_U, marks.barred_X[starts_U], counts_S, text.keys_S)
        places_P = np.flatnonzero(np.repeat(self._chosen(units, text, level_S), sizes_U))
        return Masks(places_P, self._shown(text, places_P))

    def _levels(self, text: Text, progress: float) -> Numbers:
        """Which of the levels each sequence is masked at."""
        limits = np.cumsum([level.share for level in _levels_of(self.masking)])[:-1]
        if self.masking.levels_by == "stage":
            return np.full(len(text.lengths_S), np.searchsorted(limits, progress, side="right"))
        return np.searchsorted(limits, uniforms(text.keys_S, np.uint64(_LEVEL)), side="right")

    def _marks(self, text: Text, level_S: Numbers) -> UnitMarks:
        level_X = np.repeat(level_S, text.lengths_S)
        marks = UnitMarks(np.zeros(len(level_X), np.bool_), np.zeros(len(level_X), np.bool_))
        for number in np.unique(level_S).tolist():
            unit = _levels_of(self.masking)[number].unit
            own = mark_units(text, unit, borders=self.vocabulary.borders)
            here_X = level_X == number
            marks.starts_X[here_X], marks.barred_X[here_X] = own.starts_X[here_X], own.barred_X[here_X]
        return marks

    def _chosen(self, units: Units, text: Text, level_S: Numbers) -> Flags:
        runs = [
            self.masking.longest_ngram if level.unit == "ngram" else 1 for level in _levels_of(self.masking)
        ]
        longest_S = np.array(runs)[level_S]
        if longest_S.max(initial=1) > 1:
            return choose_runs(units, self._budgets(text), longest_S=longest_S)
        return choose_units(units, self._budgets(text))

    def _budgets(self, text: Text) -> Numbers:
        """How many tokens to predict, of each sequence with its special tokens counted."""
        expected_S = self.masking.rate * text.whole_lengths_S
        if self.masking.count == "stochastic":  # fairseq, mask_tokens_dataset.py
            budgets_S = np.floor(expected_S + uniforms(text.keys_S, np.uint64(_FRACTION)))
        else:  # create_pretraining_data.py; rint and Python's round both take halves to the even side
            budgets_S = np.maximum(1, np.rint(expected_S))
        return np.minimum(budgets_S, self.most).astype(np.int64)

    def _shown(self, text: Text, places_P: Numbers) -> Numbers:
        """The mask, a random token, or what was there: each token draws for itself."""
        ends_S = np.cumsum(text.lengths_S)
        sequence_P = np.searchsorted(ends_S, places_P, side="right")
        number_P = places_P - (ends_S - text.lengths_S)[sequence_P]
        keys_P = text.keys_S[sequence_P]
        fate_P = uniforms(keys_P, (number_P + _FATE).astype(np.uint64))
        drawn_P = uniforms(keys_P, (number_P + _REPLACEMENT).astype(np.uint64))
        random_P = self.vocabulary.random_ids[(drawn_P * len(self.vocabulary.random_ids)).astype(np.int64)]
        is_kept_P = fate_P >= self.masking.as_mask + self.masking.as_random
        shown_P = np.where(is_kept_P, text.tokens_X[places_P], random_P)
        return np.where(fate_P < self.masking.as_mask, self.vocabulary.mask_id, shown_P)


def _levels_of(masking: MaskingSection) -> Sequence[Level]:
    return masking.levels or (Level(unit=masking.unit, share=1),)
