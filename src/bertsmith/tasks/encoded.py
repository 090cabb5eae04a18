"""Examples as tokens: a whole split laid end to end.

Shapes: T tokens, N sequences, M items, P tagged words, C classes.
An item is what is learned and scored as one: a text, a tagged window, a question's window, or a question with
all its options. It has one sequence, but as many as there are options (choice) or windows of a long text.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ScoredUnit = Literal["item", "sequence", "token", "word"]
"""What has a row of scores: an item, each of its sequences, each token, or each tagged word's first piece."""
NO_LABEL = -1
"""Stands for the index of a label where there is none."""


@dataclass(frozen=True, slots=True)
class QuestionWindows:
    """How windows of passages lead back to the passages' characters."""

    questions_N: NDArray[np.int64]
    """The question that each window belongs to, by its place in the list of questions."""
    offsets_T2: NDArray[np.int32]
    """First and past-the-last code point of each token in its passage; (-1, -1) outside of the passage."""
    best_T: NDArray[np.bool_]
    """Whether no other window shows this token with more context."""


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
    and last row of the answer, counted from the window's first row [N, 2], (0, 0) where the window has none.
    -1 (or NaN) where there is no label. A label that training does not have is a number below -1 of its own,
    in multilabel a column behind the C others: nobody can predict it, so it counts as missed."""
    rows_P: NDArray[np.int64]
    """tag: the row of each word's first piece in tokens_T, rising; otherwise empty."""
    words_P2: NDArray[np.int64]
    """tag: sentence and word that each row stands for, every word exactly once; otherwise empty."""
    passages_N2: NDArray[np.int64]
    """span: first and past-the-last row of the passage in each window, counted from its first row."""
    windows: QuestionWindows | None = None
    states_L: tuple[NDArray[np.float32], ...] = ()
    """States [T, D] of some layers of a frozen encoder, where they were computed before; else none."""
    teacher: NDArray[np.float16] | NDArray[np.float32] | None = None
    """What a teacher scores, a row for each unit, where there is one."""

    @classmethod
    def without_tokens(
        cls, unit: ScoredUnit, targets: NDArray[np.int64] | NDArray[np.float32]
    ) -> "EncodedSet":
        """Items of which only the targets are looked at, before there is a tokenizer."""
        no_rows, pairs = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        starts = np.zeros(len(targets) + 1, np.int64)
        tokens, segments = np.zeros(0, np.int32), np.zeros(0, np.uint8)
        return cls(
            unit, tokens, segments, starts, np.arange(len(targets) + 1), targets, no_rows, pairs, pairs
        )

    @property
    def items(self) -> int:
        """How many items there are."""
        return len(self.items_M1) - 1

    def by_sequence(self) -> "EncodedSet":
        """The same with each window of a long text as an item of its own."""
        counts_M = np.diff(self.items_M1)
        targets = self.targets.repeat(counts_M, axis=0)
        return replace(self, items_M1=np.arange(len(self.starts_N1)), targets=targets)

    def lengths_M(self) -> NDArray[np.int64]:
        """The tokens of each item."""
        return np.diff(self.starts_N1[self.items_M1])
