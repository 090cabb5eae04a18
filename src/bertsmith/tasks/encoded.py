"""Examples as tokens: a whole split laid end to end, and batches cut from it.

Shapes: T tokens, N sequences, M items, P tagged words, C classes; S sequences of one batch.
An item is what is learned and judged as one: a text, a tagged window, a question's window, or a question with
all its options. It has one sequence, but as many as there are options (choice) or windows of a long text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.packed import PackedBatch
from bertsmith.tasks.examples import Kind


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

    kind: Kind
    tokens_T: NDArray[np.int32]
    segments_T: NDArray[np.uint8]
    starts_N1: NDArray[np.int64]
    items_M1: NDArray[np.int64]
    """The sequences of item m are items_M1[m] : items_M1[m + 1]."""
    targets: NDArray[np.int64] | NDArray[np.float32]
    """classify, choice: class [M]; regress: number [M]; multilabel: 0 or 1 [M, C]; tag: tag [P]; span: first
    and last row of the answer, counted from the window's first row [N, 2], (0, 0) where the window has none.
    -1 (or NaN) where there is no label. A label that training does not have is a number below -1 of its own,
    in multilabel a column behind the C others: nobody can guess it, so it is judged as missed."""
    rows_P: NDArray[np.int64]
    """tag: the row of each word's first piece in tokens_T, rising; otherwise empty."""
    words_P2: NDArray[np.int64]
    """tag: sentence and word that each row stands for, every word exactly once; otherwise empty."""
    passages_N2: NDArray[np.int64]
    """span: first and past-the-last row of the passage in each window, counted from its first row."""
    windows: QuestionWindows | None = None

    @property
    def items(self) -> int:
        """How many items there are."""
        return len(self.items_M1) - 1

    def lengths_M(self) -> NDArray[np.int64]:
        """The tokens of each item."""
        return np.diff(self.starts_N1[self.items_M1])


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Some items, packed; what has weight 0 only fills the shapes."""

    inputs: PackedBatch
    targets: Tensor
    """As in EncodedSet, for the items (M), windows (S) or tagged words (P) of this batch."""
    weights: Tensor
    """One for each target: the weight of its class, or 0 for filler."""
    rows_P: Tensor
    """tag: packed rows that are asked about; otherwise empty."""
    items_S: Tensor
    """The item of each sequence, counted within the batch."""
    passages_S2: Tensor
    """span: first and past-the-last packed row of the passage of each sequence; otherwise empty."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "TaskBatch":
        """The same batch on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "TaskBatch":
        """The same batch in page-locked memory, from which a GPU copies in the background."""
        return self._mapped(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All its tensors, in an order that is always the same."""
        old = self.inputs
        inputs = [old.tokens_T, old.segments_T, old.positions_T, old.layout.starts_S1]
        return [*inputs, self.targets, self.weights, self.rows_P, self.items_S, self.passages_S2]

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """What a recorded step depends on: every shape, and the longest sequence."""
        return (*(tuple(tensor.shape) for tensor in self.tensors()), (self.inputs.layout.longest,))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "TaskBatch":
        old = self.inputs
        inputs = replace(
            old,
            tokens_T=change(old.tokens_T),
            segments_T=change(old.segments_T),
            positions_T=change(old.positions_T),
            layout=replace(old.layout, starts_S1=change(old.layout.starts_S1)),
        )
        return TaskBatch(
            inputs,
            targets=change(self.targets),
            weights=change(self.weights),
            rows_P=change(self.rows_P),
            items_S=change(self.items_S),
            passages_S2=change(self.passages_S2),
        )
