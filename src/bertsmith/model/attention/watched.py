"""Attention that shows its probabilities while it computes, for analyses of heads.

Shapes: T packed tokens, G sequences of similar length, N tokens of the longest, H heads, K head width.

Sequences of equal length are one dense problem, and a layer's probabilities are freed when the next layer
begins: a study of a treebank never holds more than one layer of one batch, unless it keeps them. A GPU
computes faster than kernels are launched: for it, shorter sequences are padded to a few lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.arrays import ranges
from bertsmith.model.attention.attend import attend
from bertsmith.model.attention.grouped import groups_by_length
from bertsmith.model.attention.projection import Attend, Projection, Vectors
from bertsmith.model.attention.rule import AttentionRule, attention_probabilities
from bertsmith.packed import ALL, Layout, PackedBatch, Rows, moved_to_device

Watch = Callable[[int, list[int], Tensor], Tensor]
"""Function of the layer, the numbers of G sequences in their batch and the probabilities [G, H, N, N]; its
result replaces the probabilities. Most return them unchanged; one that needs gradients must. Probabilities to
and from filler are 0.
"""
See = Callable[[int, Vectors, AttentionRule], None]
"""Is shown the number of a layer, its query, key and value, and its rule."""


class Filler(NamedTuple):
    """Layout of sequences of similar length as [G, N]."""

    rows: Tensor
    """The packed row of each of the G * N; filler repeats the first of its sequence."""
    tokens: Tensor
    """Mask of the G * N that are not filler."""
    hidden_GN: Tensor
    """Mask of the filler."""

    def hide(self, probabilities_GHNN: Tensor) -> Tensor:
        """Zero the probabilities of filler, which are NaN if a window hides all tokens from it."""
        return probabilities_GHNN.masked_fill(self.hidden_GN[:, None, :, None], 0.0)


class SequenceGroup(NamedTuple):
    """Sequences that are computed together."""

    numbers: list[int]
    shape: tuple[int, int]
    """[G, N]"""
    rows: slice | Tensor
    """Packed rows of their tokens; a slice if they are contiguous, so that gathering is not needed."""
    filler: Filler | None
    """Layout of the filler; None if all have one length."""

    def gather(self, values_THK: Tensor) -> Tensor:
        """Return their rows [G, N, H, K]."""
        chosen = values_THK[self.rows] if self.filler is None else values_THK[self.filler.rows]
        return chosen.view(*self.shape, *chosen.shape[1:])

    def probabilities(self, query_GNHK: Tensor, key_GNHK: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention probabilities of each token [G, H, N, N]."""
        if self.filler is None:
            return attention_probabilities(query_GNHK, key_GNHK, rule)
        hidden_G11N = self.filler.hidden_GN[:, None, None]
        return self.filler.hide(attention_probabilities(query_GNHK, key_GNHK, rule, hidden_G11N))

    def scatter(self, mixed_GNHK: Tensor, whole_THK: Tensor) -> None:
        """Write the rows of tokens to their places."""
        rows = mixed_GNHK.flatten(0, 1)
        whole_THK[self.rows] = rows if self.filler is None else rows[self.filler.tokens]


class WatchedAttention:
    """Attention for one forward pass in evaluation mode; layers are counted as they are called."""

    def __init__(self, watch: Watch, groups: Sequence[SequenceGroup] = ()) -> None:
        """Group the sequences: without `groups` by equal length, which waits for a GPU."""
        self._watch, self._layer, self._groups = watch, 0, groups

    def __call__(self, inputs: Projection, layout: Layout, rule: AttentionRule) -> Tensor:
        """Return each requested row's mix of its sequence's values."""
        query_THK, key_THK, value_THK = inputs.apart()
        if not self._groups:
            self._groups = groups_of(layout, query_THK.device)
        mixed_THK = torch.empty_like(value_THK)
        for group in self._groups:
            query_GNHK, key_GNHK, value_GNHK = map(group.gather, (query_THK, key_THK, value_THK))
            probabilities_GHNN = group.probabilities(query_GNHK, key_GNHK, rule)
            shown_GHNN = self._watch(self._layer, group.numbers, probabilities_GHNN).to(value_THK.dtype)
            group.scatter((shown_GHNN @ value_GNHK.transpose(1, 2)).transpose(1, 2), mixed_THK)
        self._layer += 1
        return mixed_THK.flatten(1)[inputs.rows]

    def show(self, probabilities: list[Tensor]) -> list[Tensor]:
        """Show the result of an attention without kernels (DeBERTa's): [H, N, N] of each sequence."""
        layer, self._layer = self._layer, self._layer + 1
        return [self._watch(layer, [number], each[None])[0] for number, each in enumerate(probabilities)]


def shown(see: See) -> Attend:
    """Return the attention of one forward pass that shows each layer's query, key and value, and its rule."""
    layers: list[int] = []

    def attend_shown(inputs: Projection, layout: Layout, rule: AttentionRule) -> Tensor:
        vectors = inputs.apart()
        see(len(layers), vectors, rule)
        layers.append(len(layers))
        return attend(replace(inputs, vectors=vectors), layout, rule)

    return attend_shown


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The attention heads of an encoder, for an analysis of what they do."""

    order: tuple[int, ...]
    """Block of each layer; layers that share a block share its heads."""
    last_states: Callable[[PackedBatch, Attend, Rows], Tensor]
    """`Encoder.forward` with this attention in every layer."""
    hidden_states: Callable[[PackedBatch, Attend], list[Tensor]]
    """`Encoder.hidden_states` with this attention in every layer."""

    def watch(
        self, batch: PackedBatch, watch: Watch, groups: Sequence[SequenceGroup] = (), *, rows: Rows = ALL
    ) -> Tensor:
        """Return the last states of the requested rows, and show the probabilities of each layer."""
        return self.last_states(batch, WatchedAttention(watch, groups), rows)

    def maps(self, batch: PackedBatch) -> list[list[Tensor]]:
        """Return, for each layer and each sequence, the attention of every head [H, N, N]."""
        maps: list[dict[int, Tensor]] = [{} for _ in self.order]

        def keep(layer: int, numbers: list[int], weights_GHNN: Tensor) -> Tensor:
            maps[layer] |= dict(zip(numbers, weights_GHNN, strict=True))
            return weights_GHNN

        self.watch(batch, keep)
        return [[layer[number] for number in sorted(layer)] for layer in maps]


def groups_of(layout: Layout, device: torch.device, group_scores: int = 0) -> list[SequenceGroup]:
    """Return the groups of a batch, the longest first; empty sequences are left out.

    A group costs `group_scores` by itself, in scores of one head that could be computed instead; at 0 its
    sequences have one length.
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
