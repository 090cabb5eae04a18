"""Attention over groups of sequences of similar length: for CPUs, Apple mps and all without a GPU kernel.

Shapes: T packed tokens, H heads, K head width; in one group G sequences of N rows each, filler included.

A group is one dense [G, H, N, K] problem. Equal lengths need no filler; if dropout needs a mask anyway,
lengths that differ by a few tokens share a group, because a dozen small problems cost more than a little
filler. Grouping reads the lengths, which a traced graph must not do, so the whole form is one custom operator
with its own fake and backward.
"""

import os
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, library

from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.kernels.elementwise import bernoulli_mask, dropout_seed, real_probability
from bertsmith.model.kernels.torch_internals import (
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
    softmax_backward,
)
from bertsmith.packed import Layout

GROUP_COST = 24_000
"""Fixed cost of a group, in scores that could be computed instead; measured on two CPUs."""
CACHED_PLANS = 16 + 2 * (os.cpu_count() or 1)
"""All layers of a pass use the same plan, and a CPU runs as many passes as it has cores."""


# ---- one group: a dense problem, both passes, by the fused CPU kernel or written out


class Operands(NamedTuple):
    """Inputs of attention."""

    query_GHNK: Tensor
    key_GHNK: Tensor
    value_GHNK: Tensor


class Saved(NamedTuple):
    """Values that a backward pass needs besides the operands."""

    gradient_GHNK: Tensor
    mixed_GHNK: Tensor
    normalisers_GHN: Tensor
    """The logarithm of each softmax's denominator, before dropout."""


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """The problem of one group."""

    operands: Operands
    bias: Tensor | None
    """Bias added to the scores [G or 1, 1, N, N]: `lowered` for hidden keys; None if all are seen."""
    causal: bool
    """True if later keys are hidden without a bias."""
    dropout: float
    generator: torch.Generator | None
    """Generator of dropout, with the same seed in both passes; None without dropout."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the mix, and the normalisers [G, H, N]."""
        if not self._suits_fused_kernel():
            return self._written_out_forward()
        fused = partial(flash_attention_for_cpu, *self.operands, causal=self.causal)
        mixed_GHNK, normalisers_GHN = fused(bias=self.bias)
        if self.generator is None:
            return mixed_GHNK, normalisers_GHN
        # The fused kernel does not support dropout, but it supports hidden keys. The mix of only the kept
        # keys is too large by the fraction of the dropped ones in the softmax, which follows from the two
        # normalisers.
        mixed_GHNK, of_kept_GHN = fused(bias=self._bias_of_dropped())
        fraction_GHN = (of_kept_GHN - normalisers_GHN).exp_() / (1 - real_probability(self.dropout))
        return (mixed_GHNK * fraction_GHN[..., None]).to(mixed_GHNK.dtype), normalisers_GHN

    def backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        if not self._suits_fused_kernel():
            return self._written_out_backward(saved)
        fused = partial(flash_attention_for_cpu_backward, causal=self.causal)
        if self.generator is None:
            return fused(self.operands, saved, bias=self.bias)
        # With probabilities P, kept ones M and c = gradient . mix, the gradient of the scores is P * (M *
        # gradient @ values' - c): one pass without c over the kept keys, and one with only c.
        query, key, _ = self.operands
        gradient, mixed, normalisers = saved
        nothing = torch.zeros_like(mixed)  # for a mix it makes c 0; for values it leaves only c
        kept = Saved(gradient / (1 - real_probability(self.dropout)), nothing, normalisers)
        to_query, to_key, to_value = fused(self.operands, kept, bias=self._bias_of_dropped())
        more_to_query, more_to_key, _ = fused((query, key, nothing), saved, bias=self.bias)
        return to_query.add_(more_to_query), to_key.add_(more_to_key), to_value

    def _suits_fused_kernel(self) -> bool:
        # torch has this kernel, which also returns the normalisers, for CPUs only.
        return self.operands.query_GHNK.device.type == "cpu"

    def _written_out_forward(self) -> tuple[Tensor, Tensor]:
        probabilities_GHNN, dropped_GHNN = self._probabilities(), self._dropped()
        if dropped_GHNN is not None:
            probabilities_GHNN.masked_fill_(dropped_GHNN, 0.0)
        value = self.operands.value_GHNK
        # Scaling the mix [N, K] costs less than scaling the probabilities [N, N].
        mixed_GHNK = (probabilities_GHNN.to(value.dtype) @ value).mul_(
            1 / (1 - real_probability(self.dropout))
        )
        # the backward pass does not need any
        return mixed_GHNK, probabilities_GHNN.new_zeros(value.shape[:3])

    def _written_out_backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        # The probabilities are computed again: [N, N] for every layer and head would fill the memory.
        query, key, value = self.operands
        gradient = saved.gradient_GHNK * (1 / (1 - real_probability(self.dropout)))
        probabilities_GHNN, dropped_GHNN = self._probabilities(), self._dropped()
        through_values_GHNN = (gradient @ value.mT).to(probabilities_GHNN.dtype)
        kept_GHNN = probabilities_GHNN
        if dropped_GHNN is not None:
            through_values_GHNN.masked_fill_(dropped_GHNN, 0.0)
            kept_GHNN = probabilities_GHNN.masked_fill(dropped_GHNN, 0.0)
        to_scores_GHNN = softmax_backward(through_values_GHNN, probabilities_GHNN).to(query.dtype)
        to_query, to_key = to_scores_GHNN @ key, to_scores_GHNN.mT @ query
        return (
            to_query.mul_(self._scale()),
            to_key.mul_(self._scale()),
            kept_GHNN.to(value.dtype).mT @ gradient,
        )

    def _scale(self) -> float:
        return float(self.operands.query_GHNK.shape[-1] ** -0.5)

    def _probabilities(self) -> Tensor:
        scores_GHNN = (self.operands.query_GHNK @ self.operands.key_GHNK.mT).mul_(self._scale())
        exact = exact_type(scores_GHNN.dtype)  # half precision cannot hold a softmax over many keys
        return (scores_GHNN if self.bias is None else scores_GHNN.add_(self.bias)).softmax(-1, dtype=exact)

    def _bias_of_dropped(self) -> Tensor:
        """Return the bias with the dropped keys also hidden [G, H, N, N]."""
        query, dropped_GHNN = self.operands.query_GHNK, self._dropped()
        assert dropped_GHNN is not None, "only used under dropout"
        others = query.new_zeros(()) if self.bias is None else self.bias
        return torch.where(dropped_GHNN, query.new_full((), lowest(query.dtype)), others)

    def _dropped(self) -> Tensor | None:
        """Return a mask of the dropped probabilities [G, H, N, N], if any."""
        if self.generator is None:
            return None
        # Both passes sample group after group from one seed, so that both drop the same values.
        groups, heads, length, _ = self.operands.query_GHNK.shape
        shape, device = (groups, heads, length, length), self.operands.query_GHNK.device
        return bernoulli_mask(self.dropout, shape, device, self.generator)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of scores and normalisers: fp32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lowest(dtype: torch.dtype) -> float:
    """Return the score of a hidden key; minus infinity would give NaN for a query that sees no key at all."""
    return torch.finfo(dtype).min / 2


def lowered(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias that hides keys."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, lowest(dtype))


def unseen(length: int, *, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """Return the keys that a rule hides from a query of one sequence [N, N], or None if it sees all."""
    if not causal and (window < 0 or window >= length - 1):
        return None
    index_N = torch.arange(length, device=device)
    distance_NN = index_N[:, None] - index_N[None, :]
    later = distance_NN < 0 if causal else torch.zeros_like(distance_NN, dtype=torch.bool)
    return later if window < 0 else later | (distance_NN.abs() > window)


# ---- which sequences are computed together


def groups_by_length(lengths: np.ndarray, group_scores: int) -> list[np.ndarray]:
    """Return the members of each group, as masks over the sequences; empty sequences are in none.

    A group of G sequences up to the length N costs G * N * N + `group_scores` scores of a head; if the latter
    is 0, a group contains one length only and no filler.
    """
    # Over the different lengths, not over the sequences: a batch has far more sequences.
    found, counts = np.unique(lengths[lengths > 0], return_counts=True)
    edges = cheapest_edges(found, counts, group_scores)
    return [(lengths > low) & (lengths <= high) for low, high in pairwise(edges)]


def cheapest_edges(lengths: np.ndarray, counts: np.ndarray, group_scores: int) -> list[int]:
    """Return the cuts between lengths that minimise the cost of filler and groups; 0 comes first."""
    if not group_scores:
        return [0, *lengths.tolist()]
    # Dynamic programming over the sorted lengths: the cheapest cut of the first `end` of them ends with one
    # group, as wide as its longest, after the cheapest cut of the lengths before it.
    before = np.append(0, np.cumsum(counts))
    costs, cuts = np.zeros(len(lengths) + 1, np.int64), np.zeros(len(lengths) + 1, np.int64)
    for end, length in enumerate(lengths, start=1):
        options = costs[:end] + (before[end] - before[:end]) * length * length + group_scores
        cuts[end] = np.argmin(options)
        costs[end] = options[cuts[end]]
    edges = [len(lengths)]
    while edges[-1]:
        edges.append(int(cuts[edges[-1]]))
    return [0, *(int(lengths[edge - 1]) for edge in reversed(edges) if edge)]


@dataclass(frozen=True, eq=False)
class _Group:
    """Sequences of similar length, laid out as [G, N] with filler after the shorter ones."""

    sequences: int
    width: int
    rows: slice | Tensor
    """Packed rows [G * N], a slice if they are contiguous; filler repeats its sequence's first row."""
    real: tuple[Tensor, Tensor] | None
    """Mask of the G * N that are not filler, and their packed rows; None without filler."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the rows of this group as [G, H, N, ...]."""
        chosen = values[self.rows] if isinstance(self.rows, slice) else values.index_select(0, self.rows)
        return chosen.view(self.sequences, self.width, *chosen.shape[1:]).transpose(1, 2)

    def gather_gradient(self, values: Tensor) -> Tensor:
        """Gather a gradient, which is 0 for filler."""
        if self.real is None:
            return self.gather(values)
        indices, rows = self.real
        # Filler repeats a real row: a gradient left on it would be counted twice.
        laid_out = values.new_zeros(self.sequences * self.width, *values.shape[1:])
        laid_out.index_copy_(0, indices, values.index_select(0, rows))
        return laid_out.view(self.sequences, self.width, *values.shape[1:]).transpose(1, 2)

    def scatter(self, values_GHN: Tensor, whole: Tensor) -> None:
        """Write the rows that `gather` would return back into the whole."""
        laid_out = values_GHN.transpose(1, 2).flatten(0, 1).to(whole.dtype)
        if self.real is not None:
            indices, rows = self.real
            whole.index_copy_(0, rows, laid_out.index_select(0, indices))
        elif isinstance(self.rows, slice):
            whole[self.rows] = laid_out
        else:
            whole.index_copy_(0, self.rows, laid_out)

    def problem(
        self, operands: Operands, rule: AttentionRule, generator: torch.Generator | None
    ) -> DenseAttention:
        """Return the dense problem of these operands."""
        query = operands.query_GHNK
        # If nothing else is hidden, the fused kernel skips later keys without computing them.
        nothing_else = rule.window < 0 and self.real is None and generator is None
        if rule.causal and nothing_else and query.device.type == "cpu":
            return DenseAttention(operands, None, True, rule.dropout, generator)
        bias = _bias(self, rule.causal, rule.window, query.dtype, query.device)
        return DenseAttention(operands, bias, False, rule.dropout, generator)


@lru_cache(maxsize=64)
def _bias(
    group: _Group, causal: bool, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the mask of hidden keys [G or 1, 1, N, N], if any; cached, because all layers share it."""
    hidden = unseen(group.width, causal=causal, window=window, device=device)
    if group.real is not None:
        filler = torch.ones(group.sequences * group.width, dtype=torch.bool, device=device)
        filler[group.real[0]] = False
        filler = filler.view(group.sequences, 1, 1, group.width).expand(-1, 1, group.width, -1)
        hidden = filler if hidden is None else filler | hidden
    elif hidden is not None:
        hidden = hidden[None, None]
    return None if hidden is None else lowered(hidden, dtype)


def _groups(starts: Tensor, query_THK: Tensor, *, filler: bool) -> list[_Group]:
    """Return the groups of a layout; filler pays only if dropout needs a mask anyway."""
    offsets = starts.cpu().numpy().astype(np.int64)
    # A layout of other rows would silently read or skip memory.
    assert offsets[-1] == len(query_THK), f"the layout covers {offsets[-1]} of {len(query_THK)} rows"
    # Costs are in scores of one head; a group's own cost counts once for all heads.
    group_scores = GROUP_COST // query_THK.shape[1] if filler else 0
    return _groups_of(offsets.tobytes(), group_scores, query_THK.device)


@lru_cache(maxsize=CACHED_PLANS)
def _groups_of(starts_as_bytes: bytes, group_scores: int, device: torch.device) -> list[_Group]:
    """Return the sequences by length; cached, because every layer of a forward pass uses the same."""
    offsets = np.frombuffer(starts_as_bytes, dtype=np.int64)
    lengths = np.diff(offsets)
    groups = []
    for members in groups_by_length(lengths, group_scores):
        firsts_G, lengths_G = offsets[:-1][members], lengths[members]
        index_N = np.arange(lengths_G.max())
        real_GN = index_N < lengths_G[:, None]
        rows = (firsts_G[:, None] + np.where(real_GN, index_N, 0)).reshape(-1)
        # A slice is a view of the packed rows: contiguous sequences are not copied.
        side_by_side = bool(np.all(np.diff(rows) == 1))
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        indices = np.flatnonzero(real_GN)
        real = (torch.from_numpy(indices).to(device), torch.from_numpy(rows[indices]).to(device))
        group = _Group(
            sequences=len(firsts_G),
            width=len(index_N),
            rows=span if side_by_side else torch.from_numpy(rows).to(device),
            real=None if real_GN.all() else real,
        )
        groups.append(group)
    return groups


# ---- the form: a custom operator, or only the mix if gradients are not needed


def grouped_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Return each token's mix of its sequence's values."""
    # Calling it as an operator loads torch's compiler (1.5 s): only under tracing or with gradients.
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling() or rule.dropout):
        return _mix_without_gradient(Operands(query_THK, key_THK, value_THK), layout.starts_S1, rule)
    # The backward pass must drop the same values as the forward pass: both sample from this seed.
    seed = dropout_seed(query_THK.device) if rule.dropout else None
    operands = (query_THK, key_THK, value_THK, layout.starts_S1, seed)
    mixed_THK: Tensor = _forward(*operands, rule.causal, rule.window, rule.dropout)[0]
    return mixed_THK


def _mix_without_gradient(operands_THK: Operands, starts: Tensor, rule: AttentionRule) -> Tensor:
    """Return only the mix; skip `torch.empty_like` and `scatter` if the groups are already in order."""
    groups = _groups(starts, operands_THK.query_GHNK, filler=False)
    parts = []
    for group in groups:
        operands = Operands(*map(group.gather, operands_THK))
        parts.append(group.problem(operands, rule, None).forward()[0].transpose(1, 2).flatten(0, 1))
    rows = [group.rows for group in groups if isinstance(group.rows, slice)]
    side_by_side = len(rows) == len(groups) and all(one.stop == other.start for one, other in pairwise(rows))
    if side_by_side:  # sorted by length, as in an engine's batches
        return torch.cat(parts)
    mixed_THK = torch.empty_like(operands_THK.value_GHNK)
    for group, part in zip(groups, parts, strict=True):
        mixed_THK[group.rows] = part
    return mixed_THK


def _mix(  # noqa: PLR0913 - an operator takes tensors and numbers, not our dataclasses
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    causal: bool,
    window: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    normalisers = _empty_normalisers(query)
    rule, generator = AttentionRule(causal, window, dropout), _generator(seed, query.device)
    # In the order of `_backward`: the same generator must process the groups in the same order.
    for group in _groups(starts, query, filler=dropout > 0):
        operands = Operands(*map(group.gather, (query, key, value)))
        parts = group.problem(operands, rule, generator).forward()
        for part, whole in zip(parts, (mixed, normalisers), strict=True):
            group.scatter(part, whole)
    return mixed, normalisers


# Lengths are read on the CPU, which a CUDA graph cannot record: the tag excludes the operator.
_forward = library.custom_op(
    "bertsmith::grouped_attention", _mix, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)


@library.custom_op(
    "bertsmith::grouped_attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _backward(  # noqa: PLR0913
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    normalisers: Tensor,
    starts: Tensor,
    seed: Tensor | None,
    causal: bool,
    window: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # In the caller's precision, whatever is used to compute: `scatter` rounds.
    gradients = [torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(3)]
    # The fused backward pass is ten times slower in half precision than in single.
    exact = exact_type(query.dtype) if query.device.type == "cpu" else query.dtype
    query, key, value, gradient, mixed = (each.to(exact) for each in (query, key, value, gradient, mixed))
    rule, generator = AttentionRule(causal, window, dropout), _generator(seed, query.device)
    for group in _groups(starts, query, filler=dropout > 0):
        operands = Operands(*map(group.gather, (query, key, value)))
        saved = Saved(group.gather_gradient(gradient), *map(group.gather, (mixed, normalisers)))
        parts = group.problem(operands, rule, generator).backward(saved)
        for part, whole in zip(parts, gradients, strict=True):
            group.scatter(part, whole)
    return gradients[0], gradients[1], gradients[2]


# The fakes give a tracer shapes and types without reading any length: one graph serves all layouts.


@_forward.register_fake
def _forward_fake(query, key, value, starts, seed, causal, window, dropout):  # type: ignore[no-untyped-def]  # noqa: ARG001, PLR0913
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), _empty_normalisers(query)


@_backward.register_fake
def _backward_fake(gradient, query, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    return tuple(torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(3))


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    # Neither the probabilities nor the dropout masks, [N, N] for every head and layer: the backward pass
    # computes both again, from the operands and from the seed.
    query, key, value, starts, seed, *ctx.rule = inputs
    mixed, normalisers = output
    ctx.save_for_backward(query, key, value, mixed, normalisers, starts, seed)


def _differentiate(ctx, gradient, _):  # type: ignore[no-untyped-def]
    query_key_value = _backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.rule)
    return *query_key_value, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def _empty_normalisers(query_THK: Tensor) -> Tensor:
    return torch.empty(query_THK.shape[:2], dtype=exact_type(query_THK.dtype), device=query_THK.device)


def _generator(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))
