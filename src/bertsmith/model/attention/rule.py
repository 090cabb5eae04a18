"""Packed attention written plainly: the definition, and the reference for every kernel.

Shapes: T packed tokens, H heads, K head width, N tokens of one sequence.

The fast forms and their conditions are in `attend.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.packed import Layout

EVERYTHING = -1
"""Window of a rule that sees the whole sequence."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Visibility between the tokens of a sequence, and the dropout on the probabilities.

    A rule is static data that a compiled graph can be specialised on. Dropout therefore samples from torch's
    generator of the device, like every other dropout of a network: seed that, and the step is reproducible.
    """

    causal: bool = False
    window: int = EVERYTHING
    """Number of tokens that each token sees to either side."""
    dropout: float = 0.0
    backwards: bool = False
    """With `causal`: True if each token sees itself and later tokens, not earlier ones."""


Form = Callable[[Tensor, Tensor, Tensor, Layout, AttentionRule], Tensor]
"""A form of packed attention: of query, key and value [T, H, K], the layout and the rule."""


def reference_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Return each token's mix of its sequence's values, one sequence after the other."""
    mixed_THK, _ = explain_attention(query_THK, key_THK, value_THK, layout, rule)
    return mixed_THK


def explain_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> tuple[Tensor, list[Tensor]]:
    """Return the mix and, for each sequence, the probabilities [H, N, N] before dropout."""
    mixed, maps = [], []
    for start, end in layout.bounds():
        probabilities_HNN = attention_probabilities(query_THK[start:end], key_THK[start:end], rule)
        kept_HNN = functional.dropout(probabilities_HNN, rule.dropout, training=rule.dropout > 0)
        mixed.append(torch.einsum("hqk,khd->qhd", kept_HNN.to(value_THK.dtype), value_THK[start:end]))
        maps.append(probabilities_HNN)
    return torch.cat(mixed), maps


def attention_probabilities(
    query_NHK: Tensor, key_NHK: Tensor, rule: AttentionRule, hidden: Tensor | None = None
) -> Tensor:
    """Return the probabilities of each token [H, N, N], perhaps with sequences of one length in front.

    A mask over the scores may hide more keys than the rule.
    """
    scores_HNN: Tensor = torch.einsum("...qhd,...khd->...hqk", query_NHK, key_NHK)
    scores_HNN = scores_HNN / query_NHK.shape[-1] ** 0.5
    if scores_HNN.dtype in (torch.bfloat16, torch.float16):
        scores_HNN = scores_HNN.float()  # half precision cannot hold a softmax over many keys
    if rule.causal or rule.window != EVERYTHING:
        scores_HNN = scores_HNN.masked_fill(
            _hidden(scores_HNN.shape[-1], rule, scores_HNN.device), -torch.inf
        )
    if hidden is not None:
        scores_HNN = scores_HNN.masked_fill(hidden, -torch.inf)
    return scores_HNN.softmax(-1)


def _hidden(length: int, rule: AttentionRule, device: torch.device) -> Tensor:
    """Return a mask of the keys that each query may not see [N, N]."""
    index_N = torch.arange(length, device=device)
    distance_NN = index_N[:, None] - index_N[None, :]
    hidden_NN = torch.zeros_like(distance_NN, dtype=torch.bool)
    if rule.causal:
        hidden_NN |= distance_NN > 0 if rule.backwards else distance_NN < 0
    if rule.window != EVERYTHING:
        hidden_NN |= distance_NN.abs() > rule.window
    return hidden_NN
