"""What is masked whole: tokens, words, and the phrases and entities that the store marks.

A level of ERNIE's takes its own units whole and falls back on words for everything else: level entity knows
entities and words, level phrase knows phrases and words. A unit of the level that truncation has cut is never
chosen; a cut word is what is left of it, as in BERT's code.

Shapes: X tokens of text, N spans of text, S sequences, U units.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import Numbers
from bertsmith.ground.seeds import Words
from bertsmith.recipe.schema import Unit
from bertsmith.text.units import UNIT_KINDS
from bertsmith.text.word_borders import Flags, WordBorders

CODED_UNITS = frozenset(("phrase", "entity"))


@dataclass(frozen=True, slots=True)
class Text:
    """The text of some sequences, without special tokens, and what decides about its masks."""

    tokens_X: Numbers
    span_lengths_N: Numbers
    lengths_S: Numbers
    whole_lengths_S: Numbers
    """Lengths with the special tokens, of which the masked share is counted."""
    keys_S: Words
    codes_X: NDArray[np.uint8] | None = None
    """The store's unit codes, where a level asks for them."""
    next_codes_N: NDArray[np.uint8] | None = None
    """The code of the token that follows each span in the store."""


@dataclass(frozen=True, slots=True)
class UnitMarks:
    """Where units start, and at which of these starts a unit stands that must not be chosen."""

    starts_X: Flags
    barred_X: Flags


def mark_units(text: Text, unit: Unit, *, borders: WordBorders) -> UnitMarks:
    """The units of a kind in the text."""
    if unit == "token":
        return UnitMarks(np.ones(len(text.tokens_X), np.bool_), np.zeros(len(text.tokens_X), np.bool_))
    # What a word is, the lexicon of the store and masking agree on; a span always starts one.
    starts_X = borders.begins(text.tokens_X, text.span_lengths_N)[:-1]
    if unit in CODED_UNITS:
        return _mark_coded(text, starts_X, kind=UNIT_KINDS.index(unit))
    return UnitMarks(starts_X, np.zeros(len(starts_X), np.bool_))


def uncut_units(text: Text, unit: Unit, *, borders: WordBorders) -> tuple[Numbers, Numbers]:
    """Where the phrases or entities start and end that truncation has not cut."""
    assert text.codes_X is not None
    marks = mark_units(text, unit, borders=borders)
    starts_U = np.flatnonzero(marks.starts_X)
    ends_U = np.append(starts_U[1:], len(text.tokens_X))
    is_uncut_U = (text.codes_X[starts_U] == 2 * UNIT_KINDS.index(unit)) & ~marks.barred_X[starts_U]
    return starts_U[is_uncut_U], ends_U[is_uncut_U]


def _mark_coded(text: Text, words_X: Flags, *, kind: int) -> UnitMarks:
    assert text.codes_X is not None and text.next_codes_N is not None
    span_starts_N = np.cumsum(text.span_lengths_N) - text.span_lengths_N
    begins_X, inside_X = text.codes_X == 2 * kind, text.codes_X == 2 * kind + 1
    in_unit_X = begins_X | inside_X
    behind_unit_X = np.concatenate([[False], in_unit_X[:-1]])
    starts_X = begins_X | (~in_unit_X & (words_X | behind_unit_X))
    starts_X[span_starts_N] = True
    barred_X = starts_X & inside_X  # its first tokens were cut off
    start_of_unit_X = np.maximum.accumulate(np.where(starts_X, np.arange(len(starts_X)), 0))
    goes_on_N = text.next_codes_N == 2 * kind + 1
    barred_X[start_of_unit_X[span_starts_N + text.span_lengths_N - 1][goes_on_N]] = True
    return UnitMarks(starts_X, barred_X)
