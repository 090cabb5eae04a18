"""Attention over groups of sequences of like length: for CPUs, Apple mps and what no GPU kernel takes.

Shapes: T packed tokens, H heads, K head width, G sequences of one group, N rows of each of them.

A group is one dense [G, H, N, K] problem. Equal lengths need no filler; where dropout needs a mask anyway,
lengths that differ by a few tokens share a group, as a dozen small problems cost more than a little filler.
Grouping looks at the lengths, which a traced graph must not do, so the whole is one custom operator with a
fake and a backward of its own.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.attention_rule import AttentionRule
from bertsmith.model.dense_attention import DenseAttention, Operands, Saved, exact_type, lowered, unseen
from bertsmith.model.length_groups import KEPT_PLANS, groups_by_length
from bertsmith.packed import Layout

LARGEST_SEED = 2**63 - 1
GROUP_COST = 24_000
"""What a group costs by itself, in scores that could be computed instead; measured on two CPUs."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Sequences of like length, laid out as [G, N] with filler behind the shorter ones."""

    sequences: int
    width: int
    rows: slice | Tensor
    """Their packed rows [G * N], a slice where they lie side by side; filler repeats its sequence's first."""
    real: tuple[Tensor, Tensor] | None
    """Where the G * N are no filler, and the packed rows of these; None where there is no filler."""

    def gather(self, values: Tensor) -> Tensor:
        """The rows of this group as [G, H, N, ...]."""
        chosen = values[self.rows] if isinstance(self.rows, slice) else values.index_select(0, self.rows)
        return chosen.view(self.sequences, self.width, *chosen.shape[1:]).transpose(1, 2)

    def gather_gradient(self, values: Tensor) -> Tensor:
        """The same of a gradient, which filler has none of."""
        if self.real is None:
            return self.gather(values)
        places, rows = self.real
        laid_out = values.new_zeros(self.sequences * self.width, *values.shape[1:])
        laid_out.index_copy_(0, places, values.index_select(0, rows))
        return laid_out.view(self.sequences, self.width, *values.shape[1:]).transpose(1, 2)

    def scatter(self, values_GHN: Tensor, whole: Tensor) -> None:
        """Put what `gather` would bring back into the whole."""
        laid_out = values_GHN.transpose(1, 2).flatten(0, 1).to(whole.dtype)
        if self.real is not None:
            places, rows = self.real
            whole.index_copy_(0, rows, laid_out.index_select(0, places))
        elif isinstance(self.rows, slice):
            whole[self.rows] = laid_out
        else:
            whole.index_copy_(0, self.rows, laid_out)

    def hidden(self, *, causal: bool, window: int, device: torch.device) -> Tensor | None:
        """Which keys a query may not see [G or 1, 1, N, N], or None where it sees all."""
        unseen_NN = unseen(self.width, causal=causal, window=window, device=device)
        if self.real is None:
            return None if unseen_NN is None else unseen_NN[None, None]
        filler = torch.ones(self.sequences * self.width, dtype=torch.bool, device=device)
        filler[self.real[0]] = False
        filler = filler.view(self.sequences, 1, 1, self.width).expand(-1, 1, self.width, -1)
        return filler if unseen_NN is None else filler | unseen_NN


def grouped_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Each token's mix of the values of its own sequence."""
    # Called as an operator, it makes torch load its compiler (1.5 s): only where something traces or learns.
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling() or rule.dropout):
        return _mix_for_good(Operands(query_THK, key_THK, value_THK), layout.starts_S1, rule)
    # The backward pass must drop what the forward dropped: both draw from this seed.
    seed = torch.randint(LARGEST_SEED, (), device=query_THK.device) if rule.dropout else None
    operands = (query_THK, key_THK, value_THK, layout.starts_S1, seed)
    mixed_THK: Tensor = _forward(*operands, rule.causal, rule.window, rule.dropout)[0]
    return mixed_THK


def _mix_for_good(operands_THK: Operands, starts: Tensor, rule: AttentionRule) -> Tensor:
    """The mix alone, where nobody will ask for a gradient."""
    choices = _Choices(rule.causal, rule.window, 0.0, None)
    groups = _groups(starts, operands_THK.query_GHNK, filler=False)
    parts = []
    for group in groups:
        operands = Operands(*map(group.gather, operands_THK))
        parts.append(choices.problem(group, operands).forward()[0].transpose(1, 2).flatten(0, 1))
    if _side_by_side(groups):  # sorted by length, as an engine's batches are
        return torch.cat(parts)
    mixed_THK = torch.empty_like(operands_THK.value_GHNK)
    for group, part in zip(groups, parts, strict=True):
        mixed_THK[group.rows] = part
    return mixed_THK


def _side_by_side(groups: list[_Group]) -> bool:
    """Whether the rows of all groups lie one after the other."""
    rows = [group.rows for group in groups if isinstance(group.rows, slice)]
    return len(rows) == len(groups) and all(one.stop == other.start for one, other in pairwise(rows))


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
    choices = _Choices(causal, window, dropout, _stream(seed, query.device))
    for group in _groups(starts, query, filler=dropout > 0):
        operands = Operands(*map(group.gather, (query, key, value)))
        for part, whole in zip(choices.problem(group, operands).forward(), (mixed, normalisers), strict=True):
            group.scatter(part, whole)
    return mixed, normalisers


# Lengths are looked at on the CPU, which a CUDA graph cannot record: the tag keeps the operator out of one.
_forward = torch.library.custom_op(
    "bertsmith::grouped_attention", _mix, mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,)
)


@torch.library.custom_op(
    "bertsmith::grouped_attention_backward", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,)
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
    gradients = [torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(3)]
    # The fused backward pass is ten times slower in half precision than in single.
    exact = exact_type(query.dtype) if query.device.type == "cpu" else query.dtype
    query, key, value, gradient, mixed = (each.to(exact) for each in (query, key, value, gradient, mixed))
    choices = _Choices(causal, window, dropout, _stream(seed, query.device))
    for group in _groups(starts, query, filler=dropout > 0):
        operands = Operands(*map(group.gather, (query, key, value)))
        saved = Saved(group.gather_gradient(gradient), *map(group.gather, (mixed, normalisers)))
        for part, whole in zip(choices.problem(group, operands).backward(saved), gradients, strict=True):
            group.scatter(part, whole)
    return gradients[0], gradients[1], gradients[2]


@_forward.register_fake
def _forward_fake(query, key, value, starts, seed, causal, window, dropout):  # type: ignore[no-untyped-def]  # noqa: ARG001, PLR0913
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), _empty_normalisers(query)


@_backward.register_fake
def _backward_fake(gradient, query, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    return tuple(torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(3))


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, starts, seed, *ctx.choices = inputs
    mixed, normalisers = output
    ctx.save_for_backward(query, key, value, mixed, normalisers, starts, seed)


def _differentiate(ctx, gradient, _):  # type: ignore[no-untyped-def]
    query_key_value = _backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.choices)
    return *query_key_value, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


@dataclass(frozen=True, slots=True)
class _Choices:
    """What is the same for all groups."""

    causal: bool
    window: int
    dropout: float
    stream: torch.Generator | None

    def problem(self, group: _Group, operands: Operands) -> DenseAttention:
        query = operands.query_GHNK
        # Where nothing else is hidden, the fused kernel leaves later keys out without computing them.
        plain = query.device.type == "cpu" and self.window < 0 and group.real is None and self.stream is None
        if self.causal and plain:
            return DenseAttention(operands, None, True, self.dropout, self.stream)
        bias = _bias(group, self.causal, self.window, query.dtype, query.device)
        return DenseAttention(operands, bias, False, self.dropout, self.stream)


@lru_cache(maxsize=64)
def _bias(
    group: _Group, causal: bool, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What hides keys; cached, because every layer asks for the same."""
    hidden = group.hidden(causal=causal, window=window, device=device)
    return None if hidden is None else lowered(hidden, dtype)


def _groups(starts: Tensor, query_THK: Tensor, *, filler: bool) -> list[_Group]:
    offsets = starts.cpu().numpy().astype(np.int64)
    assert offsets[-1] == len(query_THK), f"the layout covers {offsets[-1]} of {len(query_THK)} rows"
    group_scores = GROUP_COST // query_THK.shape[1] if filler else 0
    return _groups_of(offsets.tobytes(), group_scores, query_THK.device)


@lru_cache(maxsize=KEPT_PLANS)
def _groups_of(starts_as_bytes: bytes, group_scores: int, device: torch.device) -> list[_Group]:
    """Sequences by length; cached because every layer of a forward pass asks for the same."""
    offsets = np.frombuffer(starts_as_bytes, dtype=np.int64)
    lengths = np.diff(offsets)
    members = groups_by_length(lengths, group_scores)
    return [_group(offsets[:-1][each], lengths[each], device) for each in members]


def _group(firsts_G: np.ndarray, lengths_G: np.ndarray, device: torch.device) -> _Group:
    width = int(lengths_G.max())
    place_N = np.arange(width)
    real_GN = place_N < lengths_G[:, None]
    rows = (firsts_G[:, None] + np.where(real_GN, place_N, 0)).reshape(-1)
    side_by_side = bool(np.all(np.diff(rows) == 1))
    places = np.flatnonzero(real_GN)
    real = (torch.from_numpy(places).to(device), torch.from_numpy(rows[places]).to(device))
    return _Group(
        sequences=len(firsts_G),
        width=width,
        rows=slice(int(rows[0]), int(rows[-1]) + 1) if side_by_side else torch.from_numpy(rows).to(device),
        real=None if real_GN.all() else real,
    )


def _empty_normalisers(query_THK: Tensor) -> Tensor:
    return torch.empty(query_THK.shape[:2], dtype=exact_type(query_THK.dtype), device=query_THK.device)


def _stream(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))
