"""Linear layers of 8-bit products: weights by output, inputs by the range that calibration saw.

Shapes: T rows, I inputs, O outputs.

A transformer's inputs differ much in size from each other, and one step for all would round most of them
away. What makes them alike is divided out as they are rounded, and multiplied into the weights beforehand,
where each output has a step of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.model.packed_linear import FUSED, Activation

SMOOTHING = 0.6
"""How much of the inputs' spread moves into the weights (alpha of SmoothQuant; Xiao et al. 2022)."""
LEAST = 1e-5
"""Weights and inputs that are smaller are treated as if they were this large."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How real numbers become 8-bit ones: in steps of one size, counted from a zero that may be shifted."""

    size: float
    zero: int
    dtype: torch.dtype

    def whole(self, counted: Tensor) -> Tensor:
        """Numbers counted in steps, as 8-bit ones, what is too far out cut off; they are written over."""
        lowest, highest = (0, 255) if self.dtype == torch.uint8 else (-127, 127)
        shifted = counted.round_() if self.zero == 0 else counted.round_().add_(self.zero)
        return shifted.clamp_(lowest, highest).to(self.dtype)


@dataclass(frozen=True, slots=True)
class InputRange:
    """What calibration saw of a linear layer's inputs."""

    lowest: float
    highest: float
    largest_I: Tensor
    """Of each input, by its absolute value."""

    def steps(self) -> Steps:
        """Unsigned steps over the whole range: for what an activation gives, most of it on one side of 0."""
        lowest, highest = min(self.lowest, 0.0), max(self.highest, 0.0)
        size = max(highest - lowest, LEAST) / 255
        return Steps(size, round(-lowest / size), torch.uint8)


class Int8Linear:
    """A linear layer that rounds its inputs, or takes them rounded, and can give its activation rounded."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, steps: Steps, per_input_I: Tensor, to: Steps | None
    ) -> None:
        """`per_input_I`: steps in a unit of each input; `to`: the steps in which an activation is given."""
        self._scales_O = weight_OI.abs().amax(1).clamp(min=LEAST / 127) / 127
        whole_OI = (weight_OI / self._scales_O[:, None]).round().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(whole_OI, None)
        self._zeros_O = torch.zeros(len(whole_OI), dtype=torch.int32)
        self._bias = None if bias_O is None else bias_O.detach().float()
        self._steps, self._per_input_I, self._to = steps, per_input_I, to

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        return self._product(values_TI, self._per_input_I.dtype)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation, rounded where it could be computed on the way."""
        if activation.name not in FUSED:
            return activation.function(self(values_TI))
        return self._product(values_TI, self._per_input_I.dtype, *FUSED[activation.name], to=self._to)

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and something else."""
        return self._product(values_TI, residual_TO.dtype).add_(residual_TO)

    def _product(
        self,
        values_TI: Tensor,
        dtype: torch.dtype,
        activation: str = "none",
        form: str = "",
        *,
        to: Steps | None = None,
    ) -> Tensor:
        steps = self._steps
        rounded = values_TI.dtype == steps.dtype
        whole_TI = values_TI if rounded else steps.whole(values_TI * self._per_input_I)
        output = (1.0, 0, dtype) if to is None else (to.size, to.zero, to.dtype)
        weight = (self._weight, self._scales_O, self._zeros_O, self._bias)
        inputs = (whole_TI.contiguous(), steps.size, steps.zero)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(*inputs, *weight, *output, activation, [], form)
        return product


def smoothed_linear(
    linear: nn.Linear, seen: InputRange, dtype: torch.dtype, *, to: Steps | None = None
) -> Int8Linear:
    """A linear layer that rounds its inputs, each by a step of its own."""
    largest_I = seen.largest_I.clamp(min=LEAST)
    weight_OI = linear.weight.detach().float()
    by_weight_I = weight_OI.abs().amax(0).clamp(min=LEAST)
    alike_I = largest_I**SMOOTHING / by_weight_I ** (1 - SMOOTHING)
    steps = Steps(float((largest_I / alike_I).max()) / 127, 0, torch.int8)
    per_input_I = (1 / (alike_I * steps.size)).to(dtype)
    # The weights make up for the factors as they are applied, rounded to this precision.
    adjusted_OI = weight_OI / (per_input_I.float() * steps.size)
    return Int8Linear(adjusted_OI, linear.bias, steps=steps, per_input_I=per_input_I, to=to)


def linear_after_activation(linear: nn.Linear, steps: Steps, dtype: torch.dtype) -> Int8Linear:
    """A linear layer that takes its inputs as they were rounded after an activation."""
    per_input_I = torch.full((linear.in_features,), 1 / steps.size, dtype=dtype)
    weight_OI = linear.weight.detach().float()
    return Int8Linear(weight_OI, linear.bias, steps=steps, per_input_I=per_input_I, to=None)
