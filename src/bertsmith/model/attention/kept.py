"""Attention for a text that grows token by token: earlier keys and values are kept (KV cache).

Shapes: T new tokens, N tokens read so far, the new ones included, H heads, K head width.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.model.attention.attend import attend
from bertsmith.model.attention.projection import Projection
from bertsmith.model.attention.rule import EVERYTHING, AttentionRule
from bertsmith.packed import Layout


class KeptAttention:
    """Attention of a text's new tokens to all tokens so far, for the layers of an encoder in their order."""

    def __init__(self, layers: int) -> None:
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._layer = 0

    def __call__(self, inputs: Projection, layout: Layout, rule: AttentionRule) -> Tensor:
        """Return the mix of the values for each requested row, and keep the keys and values of all."""
        assert layout.sequences == 1 and rule.causal and not rule.backwards, "later tokens would change it"
        layer, self._layer = self._layer, (self._layer + 1) % len(self._kept)
        query_THK, key_THK, value_THK = inputs.apart()
        before = self._kept[layer]
        if before is None:
            # Copies: a view would keep the queries in memory as well.
            self._kept[layer] = (key_THK.clone(), value_THK.clone())
            return attend(replace(inputs, vectors=(query_THK, key_THK, value_THK)), layout, rule)
        pairs = zip(before, (key_THK, value_THK), strict=True)
        key_NHK, value_NHK = (torch.cat(pair) for pair in pairs)
        self._kept[layer] = (key_NHK, value_NHK)
        query_HTK, key_HNK, value_HNK = (each.transpose(0, 1) for each in (query_THK, key_NHK, value_NHK))
        seen_TN = _seen(len(query_THK), len(key_NHK), rule).to(query_THK.device)
        mixed_HTK = functional.scaled_dot_product_attention(query_HTK, key_HNK, value_HNK, attn_mask=seen_TN)
        return mixed_HTK.transpose(0, 1).flatten(1)[inputs.rows]


def _seen(new: int, length: int, rule: AttentionRule) -> Tensor:
    """Return the tokens that each of the last ones sees [T, N]."""
    index_N = torch.arange(length)
    distance_TN = index_N[length - new :, None] - index_N
    seen_TN = distance_TN >= 0
    return seen_TN if rule.window == EVERYTHING else seen_TN & (distance_TN <= rule.window)
