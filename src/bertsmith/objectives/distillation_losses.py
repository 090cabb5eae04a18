"""Losses between a student and its teacher: of states, attention scores and relations.

Shapes: T packed tokens, R rows that count (all T or the predicted ones), D width, S sequences, N tokens of
the longest one, H heads, A relation heads, K width of a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.packed import Layout
from bertsmith.recipe.distill_section import Relation
from bertsmith.training.soft_targets import divergence

UNSEEN = -1e9
"""Score of a missing key: e to it is 0 compared with any other, but differences of it are finite."""


class Projections(NamedTuple):
    """Query, key and value of a layer's attention, rotary positions applied."""

    query_THK: Tensor
    key_THK: Tensor
    value_THK: Tensor

    def in_heads(self, heads: int) -> "Projections":
        """Return the same numbers, cut into `heads` heads."""
        return Projections(*(each.reshape(len(each), heads, -1) for each in self))


def cosine_losses(ours_RD: Tensor, theirs_RD: Tensor) -> Tensor:
    """Return 1 - the cosine of each row's states [R]."""
    return 1 - functional.cosine_similarity(ours_RD.float(), theirs_RD.float(), dim=-1)


def state_losses(ours_TD: Tensor, theirs_TD: Tensor) -> Tensor:
    """Return the mean squared difference of each row's states [T]."""
    return (ours_TD.float() - theirs_TD.float()).square().mean(-1)


def attention_losses(ours: Projections, theirs: Projections, layout: Layout) -> Tensor:
    """Return the mean squared difference of each row's attention scores, over heads and keys [S, N]."""
    exists_SN = _padding(layout)[1]
    scores = [_scores(each.query_THK, each.key_THK, layout) for each in (ours, theirs)]
    differences_SANN = (scores[0] - scores[1]).square() * exists_SN[:, None, None]
    return differences_SANN.mean(1).sum(-1) / exists_SN.sum(-1).clamp(min=1)[:, None]


def relation_losses(ours: Projections, theirs: Projections, layout: Layout, relation: Relation) -> Tensor:
    """Return the divergence of each row's relation to all rows of its sequence, a mean over heads [S, N]."""
    ours_SANN, theirs_SANN = (_log_relation(each, layout, relation) for each in (ours, theirs))
    return divergence(theirs_SANN, ours_SANN).mean(1)


def in_sequences(weights_T: Tensor, layout: Layout) -> Tensor:
    """Return each row's number at its place in its sequence [S, N]; 0 for places without a row."""
    rows_SN, exists_SN = _padding(layout)
    return weights_T[rows_SN] * exists_SN


def _log_relation(projections: Projections, layout: Layout, relation: Relation) -> Tensor:
    by_letter = dict(zip("qkv", projections, strict=True))
    scores_SANN = _scores(by_letter[relation[0]], by_letter[relation[1]], layout)
    exists_SN = _padding(layout)[1]
    return scores_SANN.masked_fill(~exists_SN[:, None, None], UNSEEN).log_softmax(-1)


def _scores(ones_TAK: Tensor, others_TAK: Tensor, layout: Layout) -> Tensor:
    """Return the scaled products of each row with all rows of its sequence [S, A, N, N]."""
    rows_SN = _padding(layout)[0]
    ones_SANK, others_SANK = (each.float()[rows_SN].transpose(1, 2) for each in (ones_TAK, others_TAK))
    scores_SANN: Tensor = ones_SANK @ others_SANK.transpose(-1, -2) / math.sqrt(ones_TAK.shape[-1])
    return scores_SANN


def _padding(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the row of each place in each sequence, and True if it exists [S, N]."""
    starts_S1 = layout.starts_S1
    rows_SN = starts_S1[:-1, None] + torch.arange(layout.longest, device=starts_S1.device)
    exists_SN = rows_SN < starts_S1[1:, None]
    return torch.minimum(rows_SN, starts_S1[-1] - 1), exists_SN
