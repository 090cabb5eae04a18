"""Examples as tokens: a whole split laid end to end.

Shapes: T tokens, N sequences, M items, P tagged words, C classes.
An item is one unit of training and scoring: a text, a tagged window, a question's window, or a question with
all its options. It has one sequence, or as many as there are options (choice) or windows of a long text.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ScoredUnit = Literal["item", "sequence", "token", "word"]
"""Unit with one row of scores: an item, each of its sequences, each token, or a tagged word's first piece."""
NO_LABEL = -1
"""Placeholder for the index of a missing label."""


@dataclass(frozen=True, slots=True)
class QuestionWindows:
    """Maps windows of passages back to the passages' characters."""

    questions_N: NDArray[np.int64]
    """Index of the question that each window belongs to, in the list of questions."""
    offsets_T2: NDArray[np.int32]
    """First and past-the-last code point of each token in its passage; (-1, -1) outside of the passage."""
    best_T: NDArray[np.bool_]
    """True if no other window shows this token with more context."""


@dataclass(frozen=True, slots=True)
class EncodedSet:
    """A split of a task as tokens."""

    unit: ScoredUnit
    tokens_T: NDArray[np.int32]
    segments_T: NDArray[np.uint8]
    starts_N1: NDArray[np.int64]
    items_M1: NDArray[np.int64]
    """The sequences of item m are items_M1[m] : items_M1[m + 1]."""
    targets: NDArray[np.int64] | NDArray[np.float32]
    """classify, choice: class [M]; regress: number [M]; multilabel: 0 or 1 [M, C]; tag: tag [P]; span: first
    and last row of the answer, counted from the window's first row [N, 2], or (0, 0) for a window without it.
    -1 (or NaN) without a label. A label that is missing from training has its own number below -1, in
    multilabel its own column after the C others: no model can predict it, so it counts as missed."""
    rows_P: NDArray[np.int64]
    """tag: the row of each word's first piece in tokens_T, ascending; otherwise empty."""
    words_P2: NDArray[np.int64]
    """tag: sentence and word of each row, every word exactly once; otherwise empty."""
    passages_N2: NDArray[np.int64]
    """span: first and past-the-last row of the passage in each window, from the window's first row."""
    windows: QuestionWindows | None = None
    states_L: tuple[NDArray[np.float32], ...] = ()
    """Precomputed states [T, D] of some layers of a frozen encoder; empty if not computed."""
    teacher: NDArray[np.float16] | NDArray[np.float32] | None = None
    """A teacher's scores, one row per unit, or None without a teacher."""

    @classmethod
    def without_tokens(
        cls, unit: ScoredUnit, targets: NDArray[np.int64] | NDArray[np.float32]
    ) -> "EncodedSet":
        """Return items with targets only, for uses without a tokenizer."""
        no_rows, pairs = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        starts = np.zeros(len(targets) + 1, np.int64)
        tokens, segments = np.zeros(0, np.int32), np.zeros(0, np.uint8)
        return cls(
            unit, tokens, segments, starts, np.arange(len(targets) + 1), targets, no_rows, pairs, pairs
        )

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.items_M1) - 1

    def by_sequence(self) -> "EncodedSet":
        """Return a copy with each window of a long text as a separate item."""
        counts_M = np.diff(self.items_M1)
        targets = self.targets.repeat(counts_M, axis=0)
        return replace(self, items_M1=np.arange(len(self.starts_N1)), targets=targets)

    def lengths_M(self) -> NDArray[np.int64]:
        """Return the number of tokens in each item."""
        return np.diff(self.starts_N1[self.items_M1])
