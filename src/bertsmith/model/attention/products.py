"""Attention with dropout as batches of plain products: for sequences of up to 128 tokens.

Shapes: T packed tokens, H heads, K head width; in one group G sequences of N rows, filler included, B = G * H
of them for each head; X rows of all groups and heads, in the order (group, sequence, head, row).

torch's fused CPU kernel does not support dropout and has to run twice for it. MKL and oneDNN compute a batch
of small products at once; OpenBLAS computes one after the other, quickly if oneDNN is turned off
(`torch_internals.blas_products`). All groups are laid out by one copy and laid back by another, so that a
group costs little more than its products.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.attention.grouped import CACHED_PLANS, groups_by_length, lowered, unseen
from bertsmith.model.attention.projection import Projection
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.kernels.elementwise import bernoulli_mask, real_probability
from bertsmith.model.kernels.torch_internals import has_mkl, onednn_is_enabled, softmax_backward, takes_blas
from bertsmith.packed import Layout

MKL = has_mkl()
MAX_THREADS = 2
"""Maximum threads without MKL (on ARM): torch then computes a batch of small products one after the other,
and with more threads the fused kernel is faster, because it distributes them.
"""
MAX_LENGTH = 128
"""Maximum length of a sequence; for longer ones the fused kernel is better: it does not store scores."""
GROUP_COST = 100_000 if MKL else 50_000
"""Fixed cost of a group, in scores of all heads that could be computed instead; measured on a Xeon and
on a Neoverse N1."""


def products_take(inputs: Projection, layout: Layout, rule: AttentionRule) -> bool:
    """True if this form is the fastest for these sequences."""
    if torch.compiler.is_compiling():  # it looks at the lengths, which a traced graph must not do
        return False
    quick = MKL or not onednn_is_enabled()
    return quick and products_fit(layout.longest, rule.dropout, inputs.dtype)


def products_fit(longest: int, dropout: float, dtype: torch.dtype) -> bool:
    """True if a step with sequences of at most `longest` tokens uses this form on a CPU."""
    few = torch.get_num_threads() <= MAX_THREADS
    worth = MKL or (few and takes_blas(dtype, torch.device("cpu")))
    return dropout > 0 and worth and longest <= MAX_LENGTH


def product_attention(
    query_THK: Tensor, key_THK: Tensor, value_THK: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Return each token's mix of its sequence's values."""
    heads = query_THK.shape[1]
    offsets = layout.starts_S1.numpy().astype(np.int64)
    assert offsets[-1] == len(query_THK), f"the layout covers {offsets[-1]} of {len(query_THK)} rows"
    plan = _plan_of(offsets.tobytes(), heads)
    mixed_THK: Tensor = _Products.apply(query_THK, key_THK, value_THK, plan, rule)  # type: ignore[no-untyped-call]
    return mixed_THK


@dataclass(frozen=True, eq=False)
class _Group:
    """Some sequences of similar length, and their rows among the rows of all groups."""

    sequences: int
    width: int
    rows: slice
    filler: Tensor | None
    """Mask of keys that are filler [G, 1, 1, N]; None if all are real."""

    def of(self, values_XK: Tensor) -> Tensor:
        """Return the rows of this group [G * H, N, K]."""
        return values_XK[self.rows].view(-1, self.width, values_XK.shape[-1])

    def hide(self, scores_BNN: Tensor, rule: AttentionRule) -> Tensor:
        """Return the scores, lowered for keys that a query may not see."""
        unseen_NN = unseen(self.width, causal=rule.causal, window=rule.window, device=scores_BNN.device)
        parts = [each for each in (self.filler, unseen_NN) if each is not None]
        if not parts:
            return scores_BNN
        hidden = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        scores_GHNN = scores_BNN.view(self.sequences, -1, self.width, self.width)
        scores_GHNN += lowered(hidden, scores_BNN.dtype)
        return scores_BNN


@dataclass(frozen=True, eq=False)
class _Plan:
    """Layout of packed rows and heads [T * H] for all groups [X], and back."""

    groups: tuple[_Group, ...]
    there_X: Tensor
    back: Tensor
    filler_rows: Tensor

    def lay_out(self, *values_THK: Tensor) -> Tensor:
        """Lay out several values, with a copy of a real row for filler [values, X, K]."""
        stacked = torch.stack(values_THK)
        return stacked.flatten(1, 2).index_select(1, self.there_X)

    def lay_back(self, values: Tensor, heads: int) -> Tensor:
        """Return laid-out values [..., X, K] as packed rows [..., T, H, K]."""
        chosen = values.index_select(-2, self.back)
        return chosen.view(*chosen.shape[:-2], -1, heads, chosen.shape[-1])


@lru_cache(maxsize=CACHED_PLANS)
def _plan_of(starts_as_bytes: bytes, heads: int) -> _Plan:
    """Return the plan for some lengths; cached, because every layer of a pass uses the same."""
    offsets = np.frombuffer(starts_as_bytes, dtype=np.int64)
    lengths = np.diff(offsets)
    groups: list[_Group] = []
    there, real, first = [], [], 0
    for members in groups_by_length(lengths, GROUP_COST // heads):
        firsts_G, lengths_G = offsets[:-1][members], lengths[members]
        index_N = np.arange(lengths_G.max())
        real_GN = index_N < lengths_G[:, None]
        # Filler repeats its sequence's first row, which is real and finite, and is hidden as a key.
        token_GN = firsts_G[:, None] + np.where(real_GN, index_N, 0)
        rows_GHN = token_GN[:, None, :] * heads + np.arange(heads)[:, None]
        filler = None if real_GN.all() else torch.from_numpy(~real_GN[:, None, None, :])
        span = slice(first, first + rows_GHN.size)
        groups.append(_Group(len(firsts_G), len(index_N), span, filler))
        there.append(rows_GHN.ravel())
        real.append(np.broadcast_to(real_GN[:, None, :], rows_GHN.shape).ravel())
        first = span.stop
    there_X, real_X = np.concatenate(there), np.concatenate(real)
    # Laying back reads only real rows, each of which is in exactly one group.
    back = np.empty(int(offsets[-1]) * heads, np.int64)
    back[there_X[real_X]] = np.flatnonzero(real_X)
    indices = (torch.from_numpy(each) for each in (there_X, back, np.flatnonzero(~real_X)))
    return _Plan(tuple(groups), *indices)


class _Products(torch.autograd.Function):
    """The forward and backward pass over all groups."""

    @staticmethod
    def forward(  # noqa: PLR0913 - torch's signature, and attention's operands
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, rule: AttentionRule
    ) -> Tensor:
        laid_out_3XK = plan.lay_out(query, key, value)
        mixed_XK = torch.empty_like(laid_out_3XK[0])
        kept = 1 / (1 - real_probability(rule.dropout))
        saved = []
        for group in plan.groups:
            query_BNK, key_BNK, value_BNK = map(group.of, laid_out_3XK)
            # With beta=0 the first operand is not read: this is a product and its scaling in one pass.
            scores_BNN = torch.baddbmm(
                query_BNK.new_empty(1), query_BNK, key_BNK.mT, beta=0, alpha=_scale(query)
            )
            probabilities_BNN = group.hide(scores_BNN, rule).softmax(-1)
            dropped_BNN = None
            if rule.dropout:
                shape, device = probabilities_BNN.shape, probabilities_BNN.device
                dropped_BNN = bernoulli_mask(rule.dropout, shape, device)
            # Kept for the backward pass instead of recomputed: the sequences are short.
            saved += [probabilities_BNN, dropped_BNN]
            _product(_kept(probabilities_BNN, dropped_BNN), value_BNK, kept, group.of(mixed_XK))
        ctx.plan, ctx.rule = plan, rule
        ctx.save_for_backward(laid_out_3XK, *saved)
        return plan.lay_back(mixed_XK, query.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient_THK: Tensor) -> tuple[Tensor | None, ...]:
        laid_out_3XK, *saved = ctx.saved_tensors
        plan, rule = ctx.plan, ctx.rule
        # Filler has a copy of a real row's gradient, which must not count twice for keys and values.
        gradient_XK = plan.lay_out(gradient_THK)[0].index_fill_(0, plan.filler_rows, 0.0)
        gradients_3XK = torch.empty_like(laid_out_3XK)
        kept, scale = 1 / (1 - real_probability(rule.dropout)), _scale(laid_out_3XK)
        for group, probabilities_BNN, dropped_BNN in zip(plan.groups, saved[::2], saved[1::2], strict=True):
            query_BNK, key_BNK, value_BNK = map(group.of, laid_out_3XK)
            to_query, to_key, to_value = map(group.of, gradients_3XK)
            gradient_BNK = group.of(gradient_XK)
            _product(_kept(probabilities_BNN, dropped_BNN).mT, gradient_BNK, kept, to_value)
            to_probabilities_BNN = torch.baddbmm(
                query_BNK.new_empty(1), gradient_BNK, value_BNK.mT, beta=0, alpha=kept
            )
            to_scores_BNN = softmax_backward(_kept(to_probabilities_BNN, dropped_BNN), probabilities_BNN)
            _product(to_scores_BNN, key_BNK, scale, to_query)
            _product(to_scores_BNN.mT, query_BNK, scale, to_key)
        return *plan.lay_back(gradients_3XK, gradient_THK.shape[1]), None, None


def _product(left: Tensor, right: Tensor, factor: float, out: Tensor) -> None:
    torch.baddbmm(out, left, right, beta=0, alpha=factor, out=out)


def _scale(values_K: Tensor) -> float:
    return float(values_K.shape[-1] ** -0.5)


def _kept(values: Tensor, dropped: Tensor | None) -> Tensor:
    return values if dropped is None else values.masked_fill(dropped, 0.0)
