"""Weights in whole numbers of 8 or 4 bits, and the layers that hold them.

Shapes: I inputs, O outputs, G groups of inputs with a separate step, V words, E embedding width.

A weight is a whole number times the size of a step. For 8-bit products the inputs of a layer are rounded,
too, and their range in calibration is stored with the weights; to save memory, the weights are enough. Such a
layer computes the product with the values that its numbers represent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

SMOOTHING = 0.85
"""Fraction of the inputs' spread that moves into the weights (alpha of SmoothQuant; Xiao et al. 2022).

Published is 0.5, for models of billions of weights. With it the last states of bertsmith-small for pairs of
MRPC are off by 17 %, with 0.6, 0.8, 0.85, 0.9 and 1 by 12, 6.8, 6.6, 6.6 and 8.3 %; others are alike.
"""
MIN_MAGNITUDE = 1e-5
"""Weights and inputs that are smaller are treated as if they were this large."""
HIGHEST = {8: 127, 4: 7}
"""Largest whole number by bits; the range is the same on both sides of 0."""
GROUP_INPUTS = 32
"""Inputs that share a step at 4 bits; with one for a whole row, steps would be too coarse."""
NARROWED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Fractions of a 4-bit group's range that are tried: cutting off its ends can cost less than wide steps."""


@dataclass(frozen=True, slots=True)
class EightBitSteps:
    """Conversion of real numbers to 8 bits: steps of one size, counted from a zero that may be shifted."""

    size: float
    zero: int
    dtype: torch.dtype

    def quantise(self, counted: Tensor) -> Tensor:
        """Return numbers counted in steps as 8-bit ones, clamped to the range; they are overwritten."""
        # -128 is left out, so that the range is the same on both sides of 0.
        lowest, highest = (0, 255) if self.dtype == torch.uint8 else (-127, 127)
        shifted = counted.round_() if self.zero == 0 else counted.round_().add_(self.zero)
        return shifted.clamp_(lowest, highest).to(self.dtype)


@dataclass(frozen=True, slots=True)
class InputRange:
    """Range of a linear layer's inputs during calibration."""

    lowest: float
    highest: float
    largest_I: Tensor
    """Largest absolute value of each input."""

    def steps(self) -> EightBitSteps:
        """Return unsigned steps over the whole range: for activations, mostly on one side of 0."""
        # With 0 outside of the range, the shifted zero would not fit into 8 bits.
        lowest, highest = min(self.lowest, 0.0), max(self.highest, 0.0)
        size = max(highest - lowest, MIN_MAGNITUDE) / 255
        return EightBitSteps(size, round(-lowest / size), torch.uint8)

    def joined(self, other: "InputRange") -> "InputRange":
        """Return the range of both."""
        largest_I = torch.maximum(self.largest_I, other.largest_I)
        return InputRange(min(self.lowest, other.lowest), max(self.highest, other.highest), largest_I)


# ---- layers that hold whole numbers


class _InSteps(nn.Module):
    """A layer with a weight of whole numbers; its scales stay in fp32, whatever the layer computes in."""

    whole: Tensor
    scales_OG: Tensor
    dtype: torch.dtype = torch.float32
    """Type of the real weights that it returns."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales_OG = self.scales_OG
        self.scales_OG = scales_OG.to(self.dtype)  # if only the device changes, the layer's type stays
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Scales of 16 bits would change every weight of a row by up to 0.4 %: half a step of the largest.
        self.dtype, self.scales_OG = self.scales_OG.dtype, scales_OG.to(self.scales_OG.device)
        return self


class QuantisedLinear(_InSteps, nn.Linear):
    """A linear layer with a weight of whole numbers in steps, with or without the data for 8-bit products."""

    whole: Tensor
    """int8 [O, I], or two 4-bit numbers in each byte, uint8 [O, I / 2]."""
    per_input_I: Tensor | None

    def __init__(
        self,
        whole: Tensor,
        scales_OG: Tensor,
        bias_O: Tensor | None,
        *,
        steps: EightBitSteps | None = None,
        per_input_I: Tensor | None = None,
    ) -> None:
        """Take `steps`: of inputs of 8-bit products; `per_input_I`: steps per unit of each, else of all."""
        nn.Module.__init__(self)  # a new weight would be discarded
        self.out_features, self.in_features = len(whole), whole.shape[1] * (8 // bits_of(whole))
        self.steps = steps
        self.register_buffer("whole", whole)
        self.register_buffer("scales_OG", scales_OG)
        self.register_buffer("per_input_I", per_input_I)
        self.register_parameter("bias", None if bias_O is None else nn.Parameter(bias_O, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return real weights, computed from the numbers each time: storing only the numbers saves memory."""
        factors_I = None
        if self.steps is not None and self.per_input_I is not None:
            factors_I = self.per_input_I.float() * self.steps.size
        return dequantised(self.whole, self.scales_OG, factors_I).to(self.dtype)


class QuantisedEmbedding(_InSteps, nn.Embedding):
    """A table of 8-bit numbers with a step for each row."""

    def __init__(self, whole_VE: Tensor, scales_V1: Tensor) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = whole_VE.shape
        self.register_buffer("whole", whole_VE)
        self.register_buffer("scales_OG", scales_V1)

    def forward(self, input: Tensor) -> Tensor:
        return dequantised(self.whole[input], self.scales_OG[input]).to(self.dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the whole table as real numbers."""
        return dequantised(self.whole, self.scales_OG).to(self.dtype)


QuantisedLayer = QuantisedLinear | QuantisedEmbedding


def bits_of(whole: Tensor) -> int:
    """Return the number of bits of a number."""
    return 8 if whole.dtype == torch.int8 else 4


def dequantised(whole: Tensor, scales_OG: Tensor, factors_I: Tensor | None = None) -> Tensor:
    """Return the weights [O, I] that whole numbers represent."""
    numbers_OI = whole if bits_of(whole) == 8 else _unpacked(whole)
    grouped_OGN = numbers_OI.view(*scales_OG.shape, -1)
    weight_OI = (grouped_OGN * scales_OG[..., None]).flatten(-2)
    return weight_OI if factors_I is None else weight_OI * factors_I


def _packed(whole_OI: Tensor) -> Tensor:
    """Pack two 4-bit numbers into a byte, the first in its lower half."""
    unsigned_OI = (whole_OI + 8).to(torch.uint8)
    return unsigned_OI[:, ::2] | (unsigned_OI[:, 1::2] << 4)


def _unpacked(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8) - 8


# ---- rounding


def smoothed(linear: nn.Linear, seen: InputRange) -> QuantisedLinear:
    """Return a layer for 8-bit products that rounds its inputs, each with a separate step.

    A transformer's inputs differ much in size, and one step for all would round most of them away. A factor
    for each input makes them similar: rounding divides by it, and the weights are multiplied by it
    beforehand, with a separate step for each output.
    """
    largest_I = seen.largest_I.clamp(min=MIN_MAGNITUDE)
    weight_OI = linear.weight.detach().float()
    by_weight_I = weight_OI.abs().amax(0).clamp(min=MIN_MAGNITUDE)
    # SmoothQuant's factor of each input: it makes inputs similar without making the weights too different.
    alike_I = largest_I**SMOOTHING / by_weight_I ** (1 - SMOOTHING)
    steps = EightBitSteps(float((largest_I / alike_I).max()) / 127, 0, torch.int8)
    # The weights compensate the factors as they are applied: in bf16, if the machine computes in it.
    per_input_I = (1 / (alike_I * steps.size)).bfloat16().float()
    adjusted_OI = weight_OI / (per_input_I * steps.size)
    return _with_weight(linear, *rounded(adjusted_OI, 8), steps=steps, per_input_I=per_input_I)


def in_steps(linear: nn.Linear, steps: EightBitSteps) -> QuantisedLinear:
    """Return a layer for 8-bit products that takes inputs already rounded after an activation."""
    # Its inputs share one step: a factor for each could not be divided out after the activation.
    return _with_weight(linear, *rounded(linear.weight.detach().float(), 8), steps=steps)


def quantised_for_memory(linear: nn.Linear, bits: int) -> QuantisedLinear:
    """Return a layer of few bits that rounds only its weights; 8 bits if its number of inputs is odd."""
    # Two 4-bit numbers share a byte, and pruning may leave an odd number in a row.
    fitting = 8 if linear.in_features % 2 else bits
    return _with_weight(linear, *rounded(linear.weight.detach().float(), fitting))


def quantised_table(table: nn.Embedding) -> QuantisedEmbedding:
    """Return a table of 8-bit numbers."""
    return QuantisedEmbedding(*rounded(table.weight.detach().float(), 8))


def _with_weight(
    linear: nn.Linear,
    whole: Tensor,
    scales_OG: Tensor,
    *,
    steps: EightBitSteps | None = None,
    per_input_I: Tensor | None = None,
) -> QuantisedLinear:
    bias_O = None if linear.bias is None else linear.bias.detach()
    return QuantisedLinear(whole, scales_OG, bias_O, steps=steps, per_input_I=per_input_I)


def rounded(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers of this many bits, and the sizes of their steps [O, G]."""
    # At 8 bits a scale for each output is free: a product is scaled when its sum is complete.
    fits = weight_OI.shape[1] % GROUP_INPUTS == 0
    groups = weight_OI.shape[1] // GROUP_INPUTS if bits == 4 and fits else 1
    grouped_OGN = weight_OI.view(len(weight_OI), groups, -1)
    largest_OG = grouped_OGN.abs().amax(-1).clamp(min=MIN_MAGNITUDE / 127) / HIGHEST[bits]
    best_OGN, best_OG = _in_steps_of(largest_OG, grouped_OGN, bits), largest_OG
    for fraction in NARROWED if bits == 4 else ():
        tried_OG = largest_OG * fraction
        tried_OGN = _in_steps_of(tried_OG, grouped_OGN, bits)
        better_OG = _squared_errors(tried_OGN, tried_OG, grouped_OGN) < _squared_errors(
            best_OGN, best_OG, grouped_OGN
        )
        best_OG = torch.where(better_OG, tried_OG, best_OG)
        best_OGN = torch.where(better_OG[..., None], tried_OGN, best_OGN)
    whole_OI = best_OGN.flatten(1).to(torch.int8)
    return whole_OI if bits == 8 else _packed(whole_OI), best_OG


def _in_steps_of(scales_OG: Tensor, grouped_OGN: Tensor, bits: int) -> Tensor:
    return (grouped_OGN / scales_OG[..., None]).round().clamp(-HIGHEST[bits], HIGHEST[bits])


def _squared_errors(whole_OGN: Tensor, scales_OG: Tensor, grouped_OGN: Tensor) -> Tensor:
    return (whole_OGN * scales_OG[..., None] - grouped_OGN).square().sum(-1)
