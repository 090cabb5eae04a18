"""Attention that sees one side only, for the comparators of BERT's ablation (Devlin et al. 2018, 5.1).

Shapes: T packed tokens, H heads, K head width, S1 boundaries of sequences.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from bertsmith.model.attention import Attend, packed_attention
from bertsmith.model.attention_rule import AttentionRule
from bertsmith.packed import Layout


def attention_of(objective: Literal["masked", "left-to-right", "right-to-left"]) -> Attend:
    """Who may look at whom: whoever predicts a neighbour must not see it."""
    sides = {"left-to-right": see_before, "right-to-left": see_behind}
    return sides.get(objective, packed_attention)


def see_before(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Each token's mix of the values up to its own."""
    return packed_attention(query_THK, key_THK, value_THK, layout, replace(rule, causal=True))


def see_behind(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Each token's mix of the values from its own on: the same in the row written backwards."""
    backwards = Layout((query_THK.shape[0] - layout.starts_S1).flip(0), layout.longest)
    turned_THK = see_before(query_THK.flip(0), key_THK.flip(0), value_THK.flip(0), backwards, rule)
    return turned_THK.flip(0)
