"""Attention over groups of sequences of like length: for CPUs, Apple mps and what no GPU kernel takes.

Shapes: T packed tokens, H heads, K head width, G sequences of one group, N rows of each of them.

A group is one dense [G, H, N, K] problem. Equal lengths need no filler; where dropout needs a mask anyway,
lengths that differ by a few tokens share a group, as a dozen small problems cost more than a little filler.
Grouping looks at the lengths, which a traced graph must not do, so the whole is one custom operator with a
fake and a backward of its own.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.attention_rule import AttentionRule
from bertsmith.model.dense_attention import DenseAttention, Operands, Saved, exact_type
from bertsmith.packed import Layout

LARGEST_SEED = 2**63 - 1
LIKE_LENGTHS = 8
"""Under dropout, lengths share a group where they are the same in so many tokens."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of like length, laid out as [G, N] with filler behind the shorter ones."""

    sequences: int
    width: int
    rows: slice | Tensor
    """Their packed rows; a slice where they lie side by side, which saves copying them together."""
    places: Tensor | None
    """Where these rows stand among the G * N; None where there is no filler."""

    def gather(self, values: Tensor) -> Tensor:
        """The rows of this group as [G, H, N, ...], zeros where there is filler."""
        chosen = values[self.rows]
        if self.places is not None:
            laid_out = chosen.new_zeros(self.sequences * self.width, *chosen.shape[1:])
            laid_out[self.places] = chosen
            chosen = laid_out
        return chosen.view(self.sequences, self.width, *chosen.shape[1:]).transpose(1, 2)

    def scatter(self, values_GHN: Tensor, whole: Tensor) -> None:
        """Put what `gather` would bring back into the whole."""
        laid_out = values_GHN.transpose(1, 2).flatten(0, 1)
        whole[self.rows] = laid_out if self.places is None else laid_out[self.places]

    def filler(self) -> Tensor | None:
        """Which rows are filler [G, N], or None where there is none."""
        if self.places is None:
            return None
        flat = torch.ones(self.sequences * self.width, dtype=torch.bool, device=self.places.device)
        flat[self.places] = False
        return flat.view(self.sequences, self.width)


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
    for group in _groups(starts, query, like=LIKE_LENGTHS if dropout else 1):
        operands = Operands(*map(group.gather, (query, key, value)))
        problem = DenseAttention(operands, causal, window, group.filler(), dropout, stream)
        for part, whole in zip(problem.forward(), (mixed, normalisers), strict=True):
            group.scatter(part, whole)
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
    for group in _groups(starts, query, like=LIKE_LENGTHS if dropout else 1):
        operands = Operands(*map(group.gather, (query, key, value)))
        problem = DenseAttention(operands, causal, window, group.filler(), dropout, stream)
        saved = Saved(*map(group.gather, (gradient, mixed, normalisers)))
        for part, whole in zip(problem.backward(saved), gradients, strict=True):
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


def _groups(starts: Tensor, query_THK: Tensor, *, like: int) -> list[_Group]:
    offsets = starts.cpu().numpy().astype(np.int64)
    assert offsets[-1] == len(query_THK), f"the layout covers {offsets[-1]} of {len(query_THK)} rows"
    return _groups_of(offsets.tobytes(), like, query_THK.device)


@lru_cache(maxsize=16)
def _groups_of(starts_as_bytes: bytes, like: int, device: torch.device) -> list[_Group]:
    """Sequences by length; cached because every layer of a forward pass asks for the same."""
    offsets = np.frombuffer(starts_as_bytes, dtype=np.int64)
    lengths = np.diff(offsets)
    kinds = -(-lengths // like)
    return [
        _group(offsets[:-1][kinds == kind], lengths[kinds == kind], device)
        for kind in np.unique(kinds)
        if kind
    ]


def _group(firsts_G: np.ndarray, lengths_G: np.ndarray, device: torch.device) -> _Group:
    width = int(lengths_G.max())
    real_GN = np.arange(width) < lengths_G[:, None]
    rows = (firsts_G[:, None] + np.arange(width))[real_GN]
    side_by_side = bool(np.all(np.diff(rows) == 1))
    return _Group(
        sequences=len(firsts_G),
        width=width,
        rows=slice(int(rows[0]), int(rows[-1]) + 1) if side_by_side else torch.from_numpy(rows).to(device),
        places=None if real_GN.all() else torch.from_numpy(np.flatnonzero(real_GN)).to(device),
    )


def _empty_normalisers(query_THK: Tensor) -> Tensor:
    return torch.empty(query_THK.shape[:2], dtype=exact_type(query_THK.dtype), device=query_THK.device)


def _stream(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))
