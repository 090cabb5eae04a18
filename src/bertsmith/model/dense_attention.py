"""Attention over one dense group of sequences, both passes: by the fused CPU kernel, or written out.

Shapes: G sequences of a group, N rows of each of them (filler included), H heads, K head width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DRAWS = 2**16
"""Dropout compares whole numbers of so many values: four of them come from one draw of the generator."""


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
    causal: bool
    window: int
    filler_GN: Tensor | None
    """Which rows only fill a sequence up; None where all are equally long."""
    dropout: float
    stream: torch.Generator | None
    """Where dropout draws from, the same for both passes; None without dropout."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """The mix, and the normalisers [G, H, N]."""
        if not _fused_kernel_takes(self.operands):
            return self._written_out_forward()
        if self.stream is None:
            return _fused(self.operands, self._bias(), causal=self._plain_causal())
        # The fused kernel knows no dropout, but it knows hidden keys: the mix of the kept keys alone is too
        # large by what the dropped ones had in the softmax, and the two normalisers say how much that is.
        _, normalisers_GHN = _fused(self.operands, self._bias())
        mixed_GHNK, of_kept_GHN = _fused(self.operands, self._bias_of_dropped(self.stream))
        share_GHN = (of_kept_GHN - normalisers_GHN).exp() / (1 - _dropped_share(self.dropout))
        return (mixed_GHNK * share_GHN[..., None]).to(mixed_GHNK.dtype), normalisers_GHN

    def backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        if not _fused_kernel_takes(self.operands):
            return self._written_out_backward(saved)
        if self.stream is None:
            return _fused_backward(self.operands, saved, self._bias(), causal=self._plain_causal())
        # With probabilities P, kept ones M and c = gradient . mix, the gradient of the scores is
        # P * (M * gradient @ values' - c): one pass without c over the kept keys, one with nothing else.
        query, key, value = self.operands
        gradient, mixed, normalisers = saved
        kept = Saved(gradient / (1 - _dropped_share(self.dropout)), torch.zeros_like(mixed), normalisers)
        to_query, to_key, to_value = _fused_backward(self.operands, kept, self._bias_of_dropped(self.stream))
        nothing = Operands(query, key, torch.zeros_like(value))
        to_query_too, to_key_too, _ = _fused_backward(nothing, saved, self._bias())
        return to_query + to_query_too, to_key + to_key_too, to_value

    def _written_out_forward(self) -> tuple[Tensor, Tensor]:
        scores_GHNN = self._scores()
        normalisers_GHN = scores_GHNN.logsumexp(-1)
        kept_GHNN = (scores_GHNN - normalisers_GHN[..., None]).exp() * self._kept()
        value_GHNK = self.operands.value_GHNK
        return kept_GHNN.to(value_GHNK.dtype) @ value_GHNK, normalisers_GHN

    def _written_out_backward(self, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.operands
        gradient, mixed, normalisers_GHN = saved
        probabilities_GHNN = (self._scores() - normalisers_GHN[..., None]).exp()
        kept = self._kept()
        exact = probabilities_GHNN.dtype
        through_values_GHNN = (gradient @ value.mT).to(exact) * kept
        # softmax' derivative; the row sum of probability x gradient equals gradient . mix, dropout included.
        carried_GHN = (gradient.to(exact) * mixed.to(exact)).sum(-1)
        to_scores_GHNN = probabilities_GHNN * (through_values_GHNN - carried_GHN[..., None]) * self._scale()
        to_scores_GHNN = to_scores_GHNN.to(query.dtype)
        to_value = (probabilities_GHNN * kept).to(gradient.dtype).mT @ gradient
        return to_scores_GHNN @ key, to_scores_GHNN.mT @ query, to_value

    def _scale(self) -> float:
        return float(self.operands.query_GHNK.shape[-1] ** -0.5)

    def _scores(self) -> Tensor:
        scores_GHNN = (self.operands.query_GHNK @ self.operands.key_GHNK.mT) * self._scale()
        scores_GHNN = scores_GHNN.to(exact_type(scores_GHNN.dtype))
        hidden = self._hidden()
        return scores_GHNN if hidden is None else scores_GHNN.masked_fill(hidden, _lowest(scores_GHNN.dtype))

    def _kept(self) -> Tensor | float:
        """What each probability is multiplied by: 0 where dropped, else 1 / (1 - dropout)."""
        if self.stream is None:
            return 1.0
        dropped_GHNN = self._dropped(self.stream)
        exact = exact_type(self.operands.query_GHNK.dtype)
        return (~dropped_GHNN).to(exact) / (1 - _dropped_share(self.dropout))

    def _bias(self) -> Tensor | None:
        """What hides keys from the fused kernel, or None where every query sees every key."""
        hidden = None if self._plain_causal() else self._hidden()
        return None if hidden is None else self._lowered(hidden)

    def _plain_causal(self) -> bool:
        """Whether the fused kernel hides the keys by itself, which it does without computing them."""
        return self.causal and self.window < 0 and self.filler_GN is None and self.stream is None

    def _bias_of_dropped(self, stream: torch.Generator) -> Tensor:
        dropped_GHNN, hidden = self._dropped(stream), self._hidden()
        return self._lowered(dropped_GHNN if hidden is None else dropped_GHNN | hidden)

    def _lowered(self, hidden: Tensor) -> Tensor:
        dtype = self.operands.query_GHNK.dtype
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, _lowest(dtype))

    def _hidden(self) -> Tensor | None:
        """Which keys a query may not see [G or 1, 1, N, N], or None where it sees all."""
        unseen_NN = self._unseen()
        if self.filler_GN is None:
            return None if unseen_NN is None else unseen_NN[None, None]
        length = self.filler_GN.shape[1]
        filler = self.filler_GN[:, None, None, :].expand(-1, 1, length, -1)
        return filler if unseen_NN is None else filler | unseen_NN

    def _unseen(self) -> Tensor | None:
        length, device = self.operands.query_GHNK.shape[2], self.operands.query_GHNK.device
        if not self.causal and (self.window < 0 or self.window >= length - 1):
            return None
        place_N = torch.arange(length, device=device)
        distance_NN = place_N[:, None] - place_N[None, :]
        later = distance_NN < 0 if self.causal else torch.zeros_like(distance_NN, dtype=torch.bool)
        return later if self.window < 0 else later | (distance_NN.abs() > self.window)

    def _dropped(self, stream: torch.Generator) -> Tensor:
        """Which probabilities are dropped [G, H, N, N]."""
        groups, heads, length, _ = self.operands.query_GHNK.shape
        shape, device = (groups, heads, length, length), self.operands.query_GHNK.device
        count = groups * heads * length * length
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
        words.random_(-(2**63), None, generator=stream)
        draws = words.view(torch.int16)[:count].view(shape)
        return draws < round(self.dropout * DRAWS) - DRAWS // 2


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and normalisers: fp32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lowest(dtype: torch.dtype) -> float:
    """The score of a hidden key; minus infinity would make no number of a query that sees no key at all."""
    return torch.finfo(dtype).min / 2


def _dropped_share(dropout: float) -> float:
    """The probability with which `_dropped` really drops."""
    return round(dropout * DRAWS) / DRAWS


def _fused_kernel_takes(operands: Operands) -> bool:
    return operands.query_GHNK.device.type == "cpu"


def _fused(operands: Operands, bias: Tensor | None, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    mixed: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, 0.0, causal, attn_mask=bias
    )
    return mixed


def _fused_backward(
    operands: Operands, saved: Saved, bias: Tensor | None, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        saved.gradient_GHNK,
        *operands,
        saved.mixed_GHNK,
        saved.normalisers_GHN,
        0.0,
        causal,
        attn_mask=bias,
    )
    return gradients
