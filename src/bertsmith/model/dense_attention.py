"""Attention over one dense group of sequences, both passes: by the fused CPU kernel, or written out.

Shapes: G sequences of a group, N rows of each of them (filler included), H heads, K head width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bertsmith.model.dropping import drawn_below, real_share


class Operands(NamedTuple):
    """What attention is computed from."""

    query_GHNK: Tensor
    key_GHNK: Tensor
    value_GHNK: Tensor


class Saved(NamedTuple):
    """What a backward pass needs besides the operands."""

    gradient_GHNK: Tensor
    mixed_GHNK: Tensor
    normalisers_GHN: Tensor
    """The logarithm of each softmax's denominator, before dropout."""


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """The problem of one group."""

    operands: Operands
    bias: Tensor | None
    """Added to the scores [G or 1, 1, N, N]: what `lowered` makes of hidden keys; None where all are seen."""
    causal: bool
    """Later keys are hidden, though no bias says so."""
    dropout: float
    stream: torch.Generator | None
    """Where dropout draws from, the same for both passes; None without dropout."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """The mix, and the normalisers [G, H, N]."""
        if not self._suits_fused_kernel():
            return self._written_out_forward()
        mixed_GHNK, normalisers_GHN = self._fused(self.bias)
        if self.stream is None:
            return mixed_GHNK, normalisers_GHN
        # The fused kernel knows no dropout, but it knows hidden keys: the mix of the kept keys alone is too
        # large by what the dropped ones had in the softmax, and the two normalisers say how much that is.
        mixed_GHNK, of_kept_GHN = self._fused(self._bias_of_dropped())
        share_GHN = (of_kept_GHN - normalisers_GHN).exp_() / (1 - real_share(self.dropout))
        return (mixed_GHNK * share_GHN[..., None]).to(mixed_GHNK.dtype), normalisers_GHN

    def backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        if not self._suits_fused_kernel():
            return self._written_out_backward(saved)
        if self.stream is None:
            return self._fused_backward(self.operands, saved, self.bias)
        # With probabilities P, kept ones M and c = gradient . mix, the gradient of the scores is
        # P * (M * gradient @ values' - c): one pass without c over the kept keys, one with nothing else.
        query, key, value = self.operands
        gradient, mixed, normalisers = saved
        nothing = torch.zeros_like(mixed)
        kept = Saved(gradient / (1 - real_share(self.dropout)), nothing, normalisers)
        bias_of_dropped = self._bias_of_dropped()
        to_query, to_key, to_value = self._fused_backward(self.operands, kept, bias_of_dropped)
        without_values = Operands(query, key, nothing)
        more_to_query, more_to_key, _ = self._fused_backward(without_values, saved, self.bias)
        return to_query.add_(more_to_query), to_key.add_(more_to_key), to_value

    def _suits_fused_kernel(self) -> bool:
        return self.operands.query_GHNK.device.type == "cpu"

    def _fused(self, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self.operands, 0.0, self.causal, attn_mask=bias
        )
        return mixed

    def _fused_backward(
        self, operands: Operands, saved: Saved, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, mixed, normalisers = saved
        gradients: tuple[Tensor, Tensor, Tensor]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, *operands, mixed, normalisers, 0.0, self.causal), attn_mask=bias
        )
        return gradients

    def _written_out_forward(self) -> tuple[Tensor, Tensor]:
        probabilities_GHNN, dropped_GHNN = self._probabilities(), self._dropped()
        if dropped_GHNN is not None:
            probabilities_GHNN.masked_fill_(dropped_GHNN, 0.0)
        value = self.operands.value_GHNK
        mixed_GHNK = (probabilities_GHNN.to(value.dtype) @ value).mul_(1 / (1 - real_share(self.dropout)))
        return mixed_GHNK, probabilities_GHNN.new_zeros(value.shape[:3])  # the backward pass needs none

    def _written_out_backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.operands
        gradient = saved.gradient_GHNK * (1 / (1 - real_share(self.dropout)))
        probabilities_GHNN, dropped_GHNN = self._probabilities(), self._dropped()
        through_values_GHNN = (gradient @ value.mT).to(probabilities_GHNN.dtype)
        kept_GHNN = probabilities_GHNN
        if dropped_GHNN is not None:
            through_values_GHNN.masked_fill_(dropped_GHNN, 0.0)
            kept_GHNN = probabilities_GHNN.masked_fill(dropped_GHNN, 0.0)
        to_scores_GHNN = torch._softmax_backward_data(
            through_values_GHNN, probabilities_GHNN, -1, probabilities_GHNN.dtype
        ).to(query.dtype)
        to_query, to_key = to_scores_GHNN @ key, to_scores_GHNN.mT @ query
        return (
            to_query.mul_(self._scale()),
            to_key.mul_(self._scale()),
            kept_GHNN.to(value.dtype).mT @ gradient,
        )

    def _scale(self) -> float:
        return float(self.operands.query_GHNK.shape[-1] ** -0.5)

    def _probabilities(self) -> Tensor:
        scores_GHNN = (self.operands.query_GHNK @ self.operands.key_GHNK.mT).mul_(self._scale())
        exact = exact_type(scores_GHNN.dtype)
        return (scores_GHNN if self.bias is None else scores_GHNN.add_(self.bias)).softmax(-1, dtype=exact)

    def _bias_of_dropped(self) -> Tensor:
        """The bias with the dropped keys hidden, too [G, H, N, N]."""
        query, dropped_GHNN = self.operands.query_GHNK, self._dropped()
        assert dropped_GHNN is not None, "only asked for under dropout"
        others = query.new_zeros(()) if self.bias is None else self.bias
        return torch.where(dropped_GHNN, query.new_full((), lowest(query.dtype)), others)

    def _dropped(self) -> Tensor | None:
        """Which probabilities are dropped [G, H, N, N], if any."""
        if self.stream is None:
            return None
        groups, heads, length, _ = self.operands.query_GHNK.shape
        shape, device = (groups, heads, length, length), self.operands.query_GHNK.device
        return drawn_below(self.dropout, shape, device, self.stream)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and normalisers: fp32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lowest(dtype: torch.dtype) -> float:
    """The score of a hidden key; minus infinity would make no number of a query that sees no key at all."""
    return torch.finfo(dtype).min / 2


def lowered(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias that hides keys."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, lowest(dtype))


def unseen(length: int, *, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """Which keys a rule hides from a query of one sequence [N, N], or None where it sees all."""
    if not causal and (window < 0 or window >= length - 1):
        return None
    place_N = torch.arange(length, device=device)
    distance_NN = place_N[:, None] - place_N[None, :]
    later = distance_NN < 0 if causal else torch.zeros_like(distance_NN, dtype=torch.bool)
    return later if window < 0 else later | (distance_NN.abs() > window)
