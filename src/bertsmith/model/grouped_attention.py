"""Attention over groups of equally long sequences: for CPUs, Apple mps and what no GPU kernel takes.

Shapes: T packed tokens, H heads, K head width, G sequences of one group, N tokens of each of them.

Equal lengths need no padding: a group is one dense [G, H, N, K] problem. Grouping looks at the lengths, which
a traced graph must not do, so the whole is one custom operator with a fake and a backward of its own.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.attention_rule import AttentionRule
from bertsmith.packed import Layout

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Group:
    length: int
    rows: slice | np.ndarray
    """A slice where the sequences lie next to each other, which saves copying them together."""


def grouped_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Each token's mix of the values of its own sequence."""
    # The backward pass must drop what the forward dropped: both draw from this seed.
    seed = torch.randint(LARGEST_SEED, (), device=query_THK.device) if rule.dropout else None
    operands = (query_THK, key_THK, value_THK, layout.starts_S1, seed)
    mixed_THK: Tensor = _forward(*operands, rule.causal, rule.window, rule.dropout)[0]
    return mixed_THK


# Lengths are looked at on the CPU, which a CUDA graph cannot record: the tag keeps the operator out of one.
@torch.library.custom_op(
    "bertsmith::grouped_attention", mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,)
)
def _forward(  # noqa: PLR0913 - an operator takes tensors and numbers, not our dataclasses
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
    stream = _stream(seed, query.device)
    for group in _groups(starts, query.shape[0]):
        rows = _rows_on(group, query.device)
        operands = _Operands(*(_gather(each, rows, group.length) for each in (query, key, value)))
        problem = _Problem(operands, causal, window)
        group_mixed, group_normalisers = problem.forward(dropout, stream)
        mixed[rows] = group_mixed.transpose(1, 2).flatten(0, 1)
        normalisers[rows] = group_normalisers.transpose(1, 2).flatten(0, 1)
    return mixed, normalisers


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
    stream = _stream(seed, query.device)
    for group in _groups(starts, query.shape[0]):
        rows = _rows_on(group, query.device)
        operands = _Operands(*(_gather(each, rows, group.length) for each in (query, key, value)))
        problem = _Problem(operands, causal, window)
        saved = [_gather(each, rows, group.length) for each in (gradient, mixed)]
        group_normalisers = _gather(normalisers, rows, group.length)
        for whole, part in zip(
            gradients, problem.backward(saved, group_normalisers, dropout, stream), strict=True
        ):
            whole[rows] = part.transpose(1, 2).flatten(0, 1)
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


class _Operands(NamedTuple):
    query_GHNK: Tensor
    key_GHNK: Tensor
    value_GHNK: Tensor


@dataclass(frozen=True, slots=True)
class _Problem:
    """Dense attention over one group of equally long sequences."""

    operands: _Operands
    causal: bool
    window: int

    def forward(self, dropout: float, stream: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The mix, and the logarithm of each softmax's denominator [G, H, N]."""
        if self._fits_fused_kernel(dropout):
            fused: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *self.operands, 0.0, self._plain_causal(), attn_mask=self._bias()
            )
            return fused
        scores_GHNN = self._scores()
        normalisers_GHN = scores_GHNN.logsumexp(-1)
        kept_GHNN = (scores_GHNN - normalisers_GHN[..., None]).exp() * self._kept(dropout, stream)
        return kept_GHNN.to(self.operands.value_GHNK.dtype) @ self.operands.value_GHNK, normalisers_GHN

    def backward(
        self, saved: list[Tensor], normalisers_GHN: Tensor, dropout: float, stream: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, given the gradient of the mix and the mix itself."""
        gradient_GHNK, mixed_GHNK = saved
        if self._fits_fused_kernel(dropout):
            fused: tuple[Tensor, Tensor, Tensor]
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(gradient_GHNK, *self.operands, mixed_GHNK, normalisers_GHN),
                0.0,
                self._plain_causal(),
                attn_mask=self._bias(),
            )
            return fused
        probabilities_GHNN = (self._scores() - normalisers_GHN[..., None]).exp()
        kept = self._kept(dropout, stream)
        exact = probabilities_GHNN.dtype
        through_values_GHNN = (gradient_GHNK @ self.operands.value_GHNK.mT).to(exact) * kept
        # softmax' derivative; the row sum of probability x gradient equals gradient . mix, dropout included.
        carried_GHN = (gradient_GHNK.to(exact) * mixed_GHNK.to(exact)).sum(-1)
        to_scores_GHNN = probabilities_GHNN * (through_values_GHNN - carried_GHN[..., None]) * self._scale()
        to_scores_GHNN = to_scores_GHNN.to(self.operands.query_GHNK.dtype)
        to_value_GHNK = (probabilities_GHNN * kept).to(gradient_GHNK.dtype).mT @ gradient_GHNK
        return (
            to_scores_GHNN @ self.operands.key_GHNK,
            to_scores_GHNN.mT @ self.operands.query_GHNK,
            to_value_GHNK,
        )

    def _fits_fused_kernel(self, dropout: float) -> bool:
        return self.operands.query_GHNK.device.type == "cpu" and dropout == 0.0

    def _plain_causal(self) -> bool:
        return self.causal and self.window < 0

    def _scale(self) -> float:
        return float(self.operands.query_GHNK.shape[-1] ** -0.5)

    def _scores(self) -> Tensor:
        scores_GHNN = (self.operands.query_GHNK @ self.operands.key_GHNK.mT) * self._scale()
        scores_GHNN = scores_GHNN.to(_exact_type(scores_GHNN.dtype))
        unseen_NN = self._unseen()
        return scores_GHNN if unseen_NN is None else scores_GHNN.masked_fill(unseen_NN, float("-inf"))

    def _bias(self) -> Tensor | None:
        unseen_NN = None if self._plain_causal() else self._unseen()
        if unseen_NN is None:
            return None
        # The fused kernel wants four dimensions and the operands' own type.
        nothing = torch.zeros(unseen_NN.shape, dtype=self.operands.query_GHNK.dtype, device=unseen_NN.device)
        return nothing.masked_fill(unseen_NN, float("-inf"))[None, None]

    def _unseen(self) -> Tensor | None:
        """Which keys a query may not see, or None where it sees all."""
        if not self.causal and (self.window < 0 or self.window >= self.operands.query_GHNK.shape[2] - 1):
            return None
        place_N = torch.arange(self.operands.query_GHNK.shape[2], device=self.operands.query_GHNK.device)
        distance_NN = place_N[:, None] - place_N[None, :]
        later = distance_NN < 0 if self.causal else torch.zeros_like(distance_NN, dtype=torch.bool)
        return later if self.window < 0 else later | (distance_NN.abs() > self.window)

    def _kept(self, dropout: float, stream: torch.Generator | None) -> Tensor | float:
        """What each probability is multiplied by: 0 where dropped, else 1 / (1 - dropout)."""
        if stream is None:
            return 1.0
        groups, heads, length, _ = self.operands.query_GHNK.shape
        draw = torch.rand(
            groups, heads, length, length, device=self.operands.query_GHNK.device, generator=stream
        )
        return (draw >= dropout).to(_exact_type(self.operands.query_GHNK.dtype)) / (1.0 - dropout)


def _groups(starts: Tensor, rows: int) -> list[_Group]:
    offsets = starts.cpu().numpy().astype(np.int64)
    assert offsets[-1] == rows, f"the layout covers {offsets[-1]} of {rows} rows"
    return _groups_of(offsets.tobytes())


@lru_cache(maxsize=16)
def _groups_of(starts_as_bytes: bytes) -> list[_Group]:
    """Sequences by length; cached because every layer of a forward pass asks for the same."""
    offsets = np.frombuffer(starts_as_bytes, dtype=np.int64)
    lengths = np.diff(offsets)
    return [_group(int(length), offsets[:-1][lengths == length]) for length in np.unique(lengths) if length]


def _group(length: int, firsts: np.ndarray) -> _Group:
    if np.all(np.diff(firsts) == length):
        return _Group(length, slice(int(firsts[0]), int(firsts[-1]) + length))
    return _Group(length, (firsts[:, None] + np.arange(length)).reshape(-1))


def _rows_on(group: _Group, device: torch.device) -> slice | Tensor:
    return group.rows if isinstance(group.rows, slice) else torch.from_numpy(group.rows).to(device)


def _gather(values: Tensor, rows: slice | Tensor, length: int) -> Tensor:
    """The rows of one group as [G, H, N, ...]."""
    chosen = values[rows]
    return chosen.view(-1, length, *chosen.shape[1:]).transpose(1, 2)


def _empty_normalisers(query_THK: Tensor) -> Tensor:
    return torch.empty(query_THK.shape[:2], dtype=_exact_type(query_THK.dtype), device=query_THK.device)


def _exact_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _stream(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))
