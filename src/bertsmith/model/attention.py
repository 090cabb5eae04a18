"""Packed attention: one signature, several forms that agree.

Shapes: T packed tokens, H heads, K head width, N tokens of one sequence.

`packed_attention` takes the fastest form for the device, the precision and the rule. `reference_attention` is
the plain one that every other is tested against, and `explain_attention` also gives the probabilities.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.model.attention_rule import EVERYTHING, AttentionRule
from bertsmith.model.grouped_attention import grouped_attention
from bertsmith.model.product_attention import product_attention, products_take
from bertsmith.model.varlen_attention import (
    efficient_attention,
    efficient_takes,
    flash_attention,
    flash_takes,
)
from bertsmith.packed import Layout

Attend = Callable[[Tensor, Tensor, Tensor, Layout, AttentionRule], Tensor]


def packed_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Each token's mix of the values of its own sequence, by the fastest form that fits."""
    if query_THK.is_cuda and flash_takes(query_THK):
        return flash_attention(query_THK, key_THK, value_THK, layout, rule)
    if query_THK.is_cuda and efficient_takes(query_THK, rule):
        return efficient_attention(query_THK, key_THK, value_THK, layout, rule)
    if products_take(query_THK, layout, rule):
        return product_attention(query_THK, key_THK, value_THK, layout, rule)
    return grouped_attention(query_THK, key_THK, value_THK, layout, rule)


def reference_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """The same mix written plainly, one sequence after the other."""
    mixed_THK, _ = explain_attention(query_THK, key_THK, value_THK, layout, rule)
    return mixed_THK


def explain_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> tuple[Tensor, list[Tensor]]:
    """The mix and, for each sequence, the probabilities [H, N, N] before dropout."""
    mixed, maps = [], []
    for start, end in layout.bounds():
        probabilities_HNN = _probabilities(query_THK[start:end], key_THK[start:end], rule)
        kept_HNN = functional.dropout(probabilities_HNN, rule.dropout, training=rule.dropout > 0)
        mixed.append(torch.einsum("hqk,khd->qhd", kept_HNN.to(value_THK.dtype), value_THK[start:end]))
        maps.append(probabilities_HNN)
    return torch.cat(mixed), maps


def _probabilities(query_NHK: Tensor, key_NHK: Tensor, rule: AttentionRule) -> Tensor:
    scores_HNN: Tensor = torch.einsum("qhd,khd->hqk", query_NHK, key_NHK) / query_NHK.shape[-1] ** 0.5
    if scores_HNN.dtype in (torch.bfloat16, torch.float16):
        scores_HNN = scores_HNN.float()
    place = torch.arange(query_NHK.shape[0], device=query_NHK.device)
    distance_NN = place[:, None] - place[None, :]
    hidden_NN = torch.zeros_like(distance_NN, dtype=torch.bool)
    if rule.causal:
        hidden_NN |= distance_NN < 0
    if rule.window != EVERYTHING:
        hidden_NN |= distance_NN.abs() > rule.window
    visible_HNN: Tensor = scores_HNN.masked_fill(hidden_NN, float("-inf"))
    return visible_HNN.softmax(-1)
