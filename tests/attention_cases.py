"""Ragged attention problems and the statistics of dropout, shared by the CPU and the GPU tests."""

import torch
from torch import Tensor, nn

from bertsmith.model.attention.projection import Attend, Projection
from bertsmith.model.attention.rule import AttentionRule, Form
from bertsmith.packed import ALL, Layout

RULES = [
    AttentionRule(),
    AttentionRule(causal=True),
    AttentionRule(window=3),
    AttentionRule(causal=True, window=2),
]
LENGTHS = [7, 31, 1, 7, 64, 31, 2, 40, 3, 4, 5]  # 4 and 5: a window of 3 just covers, just does not


def layout_of(lengths: list[int], device: str = "cpu") -> Layout:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    return Layout(starts.to(device), max(lengths))


def of_vectors(query: Tensor, key: Tensor, value: Tensor) -> Projection:
    """Inputs of attention that were computed before."""
    hidden, positions = query.flatten(1), torch.arange(len(query), device=query.device)
    vectors = (query, key, value)
    return Projection(hidden, nn.Identity(), query.shape[-1], None, positions, ALL, vectors=vectors)


def of_three(attend: Attend) -> Form:
    """Attention as a function of query, key and value, as the reference is."""

    def form(query: Tensor, key: Tensor, value: Tensor, layout: Layout, rule: AttentionRule) -> Tensor:
        return attend(of_vectors(query, key, value), layout, rule).view_as(value)

    return form


def operands(tokens: int, *, heads: int = 2, width: int = 16, device: str = "cpu", dtype=torch.float32):
    """Query, key and value as the strided views that a fused projection gives."""
    stream = torch.Generator().manual_seed(tokens)
    projected = torch.randn(tokens, 3, heads, width, generator=stream, dtype=torch.float32)
    projected = projected.to(device=device, dtype=dtype).requires_grad_()
    return projected, projected.unbind(1)


def kept_probabilities(attend, length: int, sequences: int, dropout: float, device: str, dtype) -> tuple:
    """Probabilities before and after dropout, read off by attending to one-hot values.

    With the identity as values, the output row of a query is its (dropped) probability row.
    """
    layout = layout_of([length] * sequences, device)
    tokens = length * sequences
    projected, (query, key, _) = operands(tokens, heads=2, width=length, device=device, dtype=dtype)
    identity = torch.eye(length, device=device, dtype=dtype).repeat(sequences, 1)
    value = identity[:, None, :].expand(-1, 2, -1).contiguous().requires_grad_()
    whole = attend(query, key, value, layout, AttentionRule())
    dropped = attend(query, key, value, layout, AttentionRule(dropout=dropout))
    return whole, dropped, (projected, value, layout)


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, length: int, kept: Tensor) -> Tensor:
    """softmax(QK)/keep, written out for equally long sequences with a given keep factor [T, H, N]."""
    split = [each.unflatten(0, (-1, length)).transpose(1, 2) for each in (query, key, value)]
    probabilities = (split[0] @ split[1].mT / query.shape[-1] ** 0.5).softmax(-1)
    factor = kept.unflatten(0, (-1, length)).transpose(1, 2)
    return (probabilities * factor @ split[2]).transpose(1, 2).flatten(0, 1)


def sequences_agree_by_chance(dropped: Tensor, length: int, dropout: float) -> bool:
    """Whether two sequences drop the same places no more often than independent draws would."""
    first, second = (dropped != 0).unflatten(0, (-1, length))[:2]
    by_chance = dropout**2 + (1 - dropout) ** 2
    return abs((first == second).float().mean().item() - by_chance) < 0.02
