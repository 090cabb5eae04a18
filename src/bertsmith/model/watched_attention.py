"""Attention that shows its probabilities while it computes, for whoever studies heads.

Shapes: T packed tokens, G sequences of one length N, H heads, K head width.

Sequences of equal length are one dense problem, and a layer's probabilities are gone when the next layer
begins: a study of a treebank never holds more than one layer of one batch, unless it keeps what it was shown.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bertsmith.model.attention import AttentionRule, attention_probabilities
from bertsmith.packed import Layout

Watch = Callable[[int, list[int], Tensor], Tensor]
"""Is shown the layer, the numbers of G sequences in their batch and the probabilities [G, H, N, N]; what it
returns is used in their place. Most return what they were shown; one that asks for gradients must."""


class WatchedAttention:
    """Packed attention for one forward pass in evaluation mode; the layers are counted as they come."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._layer = watch, 0
        self._groups: list[_Group] = []

    def __call__(
        self, query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
    ) -> Tensor:
        """Each token's mix of the values of its own sequence."""
        if self._layer == 0:
            self._groups = _of_equal_length(layout, query_THK.device)
        mixed_THK = torch.empty_like(value_THK)
        for numbers, rows, shape in self._groups:
            query_GNHK, key_GNHK, value_GNHK = (
                each[rows].view(*shape, *each.shape[1:]) for each in (query_THK, key_THK, value_THK)
            )
            probabilities_GHNN = attention_probabilities(query_GNHK, key_GNHK, rule)
            shown_GHNN = self._watch(self._layer, numbers, probabilities_GHNN).to(value_THK.dtype)
            mixed_THK[rows] = (shown_GHNN @ value_GNHK.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
        self._layer += 1
        return mixed_THK

    def show(self, probabilities: list[Tensor]) -> list[Tensor]:
        """Show what an attention that no kernel takes (DeBERTa's) computed: [H, N, N] of each sequence."""
        layer, self._layer = self._layer, self._layer + 1
        return [self._watch(layer, [number], each[None])[0] for number, each in enumerate(probabilities)]


class _Group(NamedTuple):
    """Sequences of one length: their numbers, their rows one after the other, and [G, N]."""

    numbers: list[int]
    rows: slice | Tensor
    shape: tuple[int, int]


def _of_equal_length(layout: Layout, device: torch.device) -> list[_Group]:
    """The groups of a batch; empty sequences are left out."""
    bounds_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, (start, end) in enumerate(layout.bounds()):
        if end > start:
            bounds_of[end - start].append((number, start, end))
    return [_group(length, bounds, device) for length, bounds in bounds_of.items()]


def _group(length: int, bounds: list[tuple[int, int, int]], device: torch.device) -> _Group:
    numbers, starts, ends = map(list, zip(*bounds, strict=True))
    shape = (len(numbers), length)
    if ends[:-1] == starts[1:]:
        # They stand side by side, as in sorted batches: their rows need not be gathered.
        return _Group(numbers, slice(starts[0], ends[-1]), shape)
    rows_GN = torch.tensor(starts)[:, None] + torch.arange(length)
    return _Group(numbers, rows_GN.flatten().to(device), shape)
