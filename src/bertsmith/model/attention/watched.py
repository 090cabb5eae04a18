"""Attention that shows its probabilities while it computes, for whoever studies heads.

Shapes: T packed tokens, G sequences of like length, N tokens of the longest of them, H heads, K head width.

Sequences of equal length are one dense problem, and a layer's probabilities are gone when the next layer
begins: a study of a treebank never holds more than one layer of one batch, unless it keeps what it was shown.
A GPU computes faster than it is told what to: for it, shorter sequences are filled up to a few lengths.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.arrays import ranges
from bertsmith.model.attention.grouped import groups_by_length
from bertsmith.model.attention.rule import AttentionRule, attention_probabilities
from bertsmith.packed import Layout, moved_to_device

Watch = Callable[[int, list[int], Tensor], Tensor]
"""Is shown the layer, the numbers of G sequences in their batch and the probabilities [G, H, N, N]; what it
returns is used in their place. Most return what they were shown; one that asks for gradients must. What goes
to filler and comes from it is 0."""


class Filler(NamedTuple):
    """Layout of sequences of like length as [G, N]."""

    rows: Tensor
    """The packed row of each of the G * N; filler repeats the first of its sequence."""
    tokens: Tensor
    """Mask of the G * N that are not filler."""
    hidden_GN: Tensor
    """Mask of those that are filler."""

    def hide(self, probabilities_GHNN: Tensor) -> Tensor:
        """Without what filler attends to, which is no number where a window hides all tokens from it."""
        return probabilities_GHNN.masked_fill(self.hidden_GN[:, None, :, None], 0.0)


class SequenceGroup(NamedTuple):
    """Sequences that are computed together."""

    numbers: list[int]
    shape: tuple[int, int]
    """[G, N]"""
    rows: slice | Tensor
    """The packed rows of their tokens; a slice where they stand side by side, which need not be gathered."""
    filler: Filler | None
    """None where all are of one length."""

    def gather(self, values_THK: Tensor) -> Tensor:
        """Their rows [G, N, H, K]."""
        chosen = values_THK[self.rows] if self.filler is None else values_THK[self.filler.rows]
        return chosen.view(*self.shape, *chosen.shape[1:])

    def probabilities(self, query_GNHK: Tensor, key_GNHK: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention probabilities of each token [G, H, N, N]."""
        if self.filler is None:
            return attention_probabilities(query_GNHK, key_GNHK, rule)
        hidden_G11N = self.filler.hidden_GN[:, None, None]
        return self.filler.hide(attention_probabilities(query_GNHK, key_GNHK, rule, hidden_G11N))

    def scatter(self, mixed_GNHK: Tensor, whole_THK: Tensor) -> None:
        """Put the rows of tokens where they belong."""
        rows = mixed_GNHK.flatten(0, 1)
        whole_THK[self.rows] = rows if self.filler is None else rows[self.filler.tokens]


class WatchedAttention:
    """Packed attention for one forward pass in evaluation mode; the layers are counted as they come."""

    def __init__(self, watch: Watch, groups: Sequence[SequenceGroup] = ()) -> None:
        """Without groups those of one length, which are asked of the layout: a GPU is waited for."""
        self._watch, self._layer, self._groups = watch, 0, groups

    def __call__(
        self, query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
    ) -> Tensor:
        """Each token's mix of the values of its own sequence."""
        if not self._groups:
            self._groups = groups_of(layout, query_THK.device)
        mixed_THK = torch.empty_like(value_THK)
        for group in self._groups:
            query_GNHK, key_GNHK, value_GNHK = map(group.gather, (query_THK, key_THK, value_THK))
            probabilities_GHNN = group.probabilities(query_GNHK, key_GNHK, rule)
            shown_GHNN = self._watch(self._layer, group.numbers, probabilities_GHNN).to(value_THK.dtype)
            group.scatter((shown_GHNN @ value_GNHK.transpose(1, 2)).transpose(1, 2), mixed_THK)
        self._layer += 1
        return mixed_THK

    def show(self, probabilities: list[Tensor]) -> list[Tensor]:
        """Show what an attention that no kernel takes (DeBERTa's) computed: [H, N, N] of each sequence."""
        layer, self._layer = self._layer, self._layer + 1
        return [self._watch(layer, [number], each[None])[0] for number, each in enumerate(probabilities)]


def groups_of(layout: Layout, device: torch.device, group_scores: int = 0) -> list[SequenceGroup]:
    """The groups of a batch, the longest first; empty sequences are left out.

    A group costs `group_scores` by itself, in scores of one head that could be computed instead; at 0 its
    sequences are of one length.
    """
    starts = layout.starts_S1.cpu().numpy().astype(np.int64)
    members = groups_by_length(np.diff(starts), group_scores)
    return [_group(np.flatnonzero(each), starts, device) for each in reversed(members)]


def _group(numbers: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device) -> SequenceGroup:
    firsts_G, lengths_G = starts[numbers], starts[numbers + 1] - starts[numbers]
    longest = int(lengths_G.max())
    rows: slice | Tensor = slice(int(firsts_G[0]), int(firsts_G[-1] + lengths_G[-1]))
    if not np.array_equal(firsts_G[1:], (firsts_G + lengths_G)[:-1]):
        rows = moved_to_device(torch.from_numpy(ranges(firsts_G, lengths_G)), device)
    filler = None
    if lengths_G.min() < longest:
        index_N = np.arange(longest)
        hidden_GN = index_N >= lengths_G[:, None]
        rows_GN = firsts_G[:, None] + np.where(hidden_GN, 0, index_N)
        arrays = (rows_GN.reshape(-1), np.flatnonzero(~hidden_GN), hidden_GN)
        filler = Filler(*(moved_to_device(torch.from_numpy(each), device) for each in arrays))
    return SequenceGroup(numbers.tolist(), (len(numbers), longest), rows, filler)
