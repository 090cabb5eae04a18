"""Attention that shows its probabilities while it computes, for whoever studies heads.

Shapes: T packed tokens, G sequences of one length N, H heads, K head width.

Sequences of equal length are one dense problem, and a layer's probabilities are gone when the next layer
begins: a study of a treebank never holds more than one layer of one batch, unless it keeps what it was shown.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

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

    def __call__(
        self, query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
    ) -> Tensor:
        """Each token's mix of the values of its own sequence."""
        mixed_THK = torch.empty_like(value_THK)
        for numbers, rows_GN in _of_equal_length(layout, query_THK.device):
            probabilities_GHNN = attention_probabilities(query_THK[rows_GN], key_THK[rows_GN], rule)
            shown_GHNN = self._watch(self._layer, numbers, probabilities_GHNN).to(value_THK.dtype)
            mixed_THK[rows_GN] = (shown_GHNN @ value_THK[rows_GN].transpose(1, 2)).transpose(1, 2)
        self._layer += 1
        return mixed_THK

    def show(self, probabilities: list[Tensor]) -> list[Tensor]:
        """Show what an attention that no kernel takes (DeBERTa's) computed: [H, N, N] of each sequence."""
        layer, self._layer = self._layer, self._layer + 1
        return [self._watch(layer, [number], each[None])[0] for number, each in enumerate(probabilities)]


def _of_equal_length(layout: Layout, device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """The numbers of sequences of one length, and their rows [G, N]; empty ones are left out."""
    numbers_of: dict[int, list[int]] = defaultdict(list)
    starts: dict[int, list[int]] = defaultdict(list)
    for number, (start, end) in enumerate(layout.bounds()):
        if end > start:
            numbers_of[end - start].append(number)
            starts[end - start].append(start)
    for length, numbers in numbers_of.items():
        first_G = torch.tensor(starts[length], device=device)
        yield numbers, first_G[:, None] + torch.arange(length, device=device)
