"""Pre-training batches, and how a step of one process is divided into micro-batches.

Shapes: T packed tokens, S sequences, P predicted tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.example_index import Numbers
from bertsmith.packed import Layout, PackedBatch, split_by_budget


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
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PretrainingBatch":
        """The same batch in page-locked memory, from which a GPU copies in the background."""
        return self.mapped(Tensor.pin_memory)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "PretrainingBatch":
        """The same batch with this done to every tensor, in the order of `tensors`."""
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return PretrainingBatch.from_tensors(changed, longest=self.inputs.layout.longest)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the batch by its name; optional ones only where they are given."""
        inputs = self.inputs
        optional = {} if inputs.task_types_T is None else {"task_types_T": inputs.task_types_T}
        return {
            "tokens_T": inputs.tokens_T,
            "segments_T": inputs.segments_T,
            "positions_T": inputs.positions_T,
            "starts_S1": inputs.layout.starts_S1,
            "masked_rows_P": self.masked_rows_P,
            "masked_ids_P": self.masked_ids_P,
            "masked_weights_P": self.masked_weights_P,
            "pair_labels_S": self.pair_labels_S,
            "pair_weights_S": self.pair_weights_S,
            **optional,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, longest: int) -> "PretrainingBatch":
        """The batch of which these are the `tensors`."""
        inputs = PackedBatch(
            tokens_T=tensors["tokens_T"],
            segments_T=tensors["segments_T"],
            positions_T=tensors["positions_T"],
            layout=Layout(tensors["starts_S1"], longest),
            task_types_T=tensors.get("task_types_T"),
        )
        return cls(
            inputs,
            masked_rows_P=tensors["masked_rows_P"],
            masked_ids_P=tensors["masked_ids_P"],
            masked_weights_P=tensors["masked_weights_P"],
            pair_labels_S=tensors["pair_labels_S"],
            pair_weights_S=tensors["pair_weights_S"],
        )


@dataclass(frozen=True, slots=True)
class MicroShape:
    """What every micro-batch of a stage keeps to."""

    tokens: int
    """Most tokens, filler included."""
    multiple: int
    """The numbers of tokens and of predicted tokens are filled up to multiples of it."""
    length: int
    """The stage's longest sequence."""
    pad_id: int
    recipe_length: int
    """The longest sequence of all stages: one number for the whole run, so that nothing is compiled anew."""

    @property
    def capacity(self) -> int:
        """Most tokens of examples, one token of filler being always there."""
        return self.tokens // self.multiple * self.multiple - 1

    @property
    def longest(self) -> int:
        """The longest sequence there can be in the run, filler included."""
        return max(self.recipe_length, self.multiple)


def slices_of_ranks(count: int, world: int) -> list[slice]:
    """The examples of a step that each rank takes: contiguous, and as many for each as for the next."""
    return [slice(count * rank // world, count * (rank + 1) // world) for rank in range(world)]


def micro_sizes(lengths_by_rank: list[Numbers], rank: int, *, capacity: int) -> list[int]:
    """How many of its examples the rank takes into each micro-batch; every rank has as many of them."""
    # Ranks meet in every backward pass (gradients are summed), so they must agree on the number of passes.
    greedy = [
        [len(group) for group in split_by_budget(lengths.tolist(), capacity)] for lengths in lengths_by_rank
    ]
    wanted = max(len(sizes) for sizes in greedy)
    # About as many tokens in each, if all fit: a small last micro-batch would be compiled anew.
    lengths = lengths_by_rank[rank]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, total * np.arange(1, wanted) / wanted, side="right")
    even: list[int] = np.diff([0, *cuts, len(lengths)]).tolist()
    tokens = np.diff([0, *np.append(0, ends)[cuts], total])
    if (tokens <= capacity).all() and all(even):
        return even
    # Else the greedy ones, the largest halved until there are enough; if need be some stay empty.
    sizes = greedy[rank]
    while len(sizes) < wanted:
        largest = int(np.argmax([*sizes, 1]))
        if largest == len(sizes) or sizes[largest] < 2:
            return sizes + [0] * (wanted - len(sizes))
        half = sizes[largest] // 2
        sizes = [*sizes[:largest], sizes[largest] - half, half, *sizes[largest + 1 :]]
    return sizes
