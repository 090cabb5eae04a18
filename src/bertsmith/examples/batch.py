"""A batch for pre-training: packed tokens with what the model must say about them.

Shapes: T packed tokens, S sequences, P predicted tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class PretrainingBatch:
    """Packed tokens and their targets; rows and sequences of weight 0 only fill the shapes."""

    inputs: PackedBatch
    masked_rows_P: Tensor
    masked_ids_P: Tensor
    masked_weights_P: Tensor
    pair_labels_S: Tensor
    """0: B follows A, or the pair is in order; 1: B is random, or the pair is swapped (BERT and ALBERT)."""
    pair_weights_S: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PretrainingBatch":
        """The same batch on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PretrainingBatch":
        """The same batch in page-locked memory, from which a GPU copies in the background."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "PretrainingBatch":
        old = self.inputs
        inputs = PackedBatch(
            tokens_T=change(old.tokens_T),
            segments_T=change(old.segments_T),
            positions_T=change(old.positions_T),
            layout=replace(old.layout, starts_S1=change(old.layout.starts_S1)),
            task_types_T=None if old.task_types_T is None else change(old.task_types_T),
        )
        return PretrainingBatch(
            inputs,
            masked_rows_P=change(self.masked_rows_P),
            masked_ids_P=change(self.masked_ids_P),
            masked_weights_P=change(self.masked_weights_P),
            pair_labels_S=change(self.pair_labels_S),
            pair_weights_S=change(self.pair_weights_S),
        )
