"""The linear layers of an inference network: weights that are packed once, or of 8 or 4 bits.

Shapes: T packed tokens or rows, I inputs, O outputs.

A constant weight can be stored in oneDNN's fastest layout, and a linear layer can fuse its activation or
residual, which saves a pass over the outputs. Training could use neither: the packed form lacks a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bertsmith.model.inference.quantised_weights import GROUP_INPUTS, EightBitSteps, QuantisedLinear, bits_of
from bertsmith.model.kernels import torch_internals
from bertsmith.model.lora import LoraLinear

FUSED = {"gelu": ("gelu", "none"), "relu": ("relu", "")}
"""Activations that oneDNN can fuse, with its names for them."""
UNSIGNED_MIDDLE = 128
"""Difference of unsigned and signed 8-bit numbers: their highest bit."""


# ---- a linear layer with packed weights


def can_pack(dtype: torch.dtype) -> bool:
    """True if oneDNN supports products of this precision on this machine."""
    if dtype == torch.bfloat16:
        return torch_internals.has_bf16_products()
    return dtype == torch.float32 and torch_internals.has_onednn()


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation after a linear layer, by name and as a function."""

    name: str
    function: Callable[[Tensor], Tensor]


class InferenceLinear(Protocol):
    """Interface of a linear layer in an inference block."""

    def __call__(self, values_TI: Tensor) -> Tensor:
        """Return the product."""
        ...

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the product, in the form that the next layer takes."""
        ...

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return the sum of the product and a residual."""
        ...


class PackedLinear:
    """A linear layer in the precision of its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch_internals.pack_linear_weight(linear.weight.detach().contiguous())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def __call__(self, values_TI: Tensor) -> Tensor:
        """Return the product."""
        return torch_internals.packed_linear(values_TI, self._weight, self._bias)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the product."""
        if activation.name in FUSED:
            return torch_internals.packed_linear(values_TI, self._weight, self._bias, *FUSED[activation.name])
        if activation.name == "relu2":
            rectified = torch_internals.packed_linear(values_TI, self._weight, self._bias, *FUSED["relu"])
            return rectified.square_()
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return the sum of the product and a residual."""
        return torch_internals.packed_linear_plus(values_TI, residual_TO, self._weight, self._bias)


class AdaptedLinear:
    """A linear layer with adapters; adapters of other tasks may use the same layer."""

    def __init__(self, linear: LoraLinear, frozen: InferenceLinear) -> None:
        self._adapters, self.frozen = linear, frozen

    def __call__(self, values_TI: Tensor) -> Tensor:
        """Return the product."""
        return self._adapters.adapted(self.frozen(values_TI), values_TI)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the product, which has to wait for the adapters."""
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return the sum of the product and a residual."""
        return self._adapters.adapted(self.frozen.plus(values_TI, residual_TO), values_TI)


# ---- a linear layer of 8-bit products: weights by output, inputs by their range in calibration


class Int8Linear:
    """A linear layer that rounds its inputs, or takes them rounded, and can return its activation rounded."""

    def __init__(
        self, linear: QuantisedLinear, dtype: torch.dtype, *, to: EightBitSteps | None = None
    ) -> None:
        """Build it; `dtype`: of inputs and outputs; `to`: the steps of a returned activation."""
        assert linear.steps is not None and bits_of(linear.whole) == 8, "the layer must be calibrated"
        self._steps, self._to = linear.steps, to
        self._weight = torch_internals.QuantisedWeight(
            torch_internals.pack_int8_weight(linear.whole),
            linear.scales_OG[:, 0],
            zeros_O=torch.zeros(len(linear.whole), dtype=torch.int32),
            bias_O=None if linear.bias is None else linear.bias.detach().float(),
        )
        self._per_input_I = _steps_per_input(linear).to(dtype)
        self._moves_up = linear.steps.dtype == torch.int8 and not torch_internals.multiplies_signed_inputs()

    def __call__(self, values_TI: Tensor) -> Tensor:
        """Return the product."""
        return self._product(values_TI, self._per_input_I.dtype)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the product, rounded if it can be fused."""
        if activation.name in FUSED:
            return self._product(values_TI, self._per_input_I.dtype, *FUSED[activation.name], to=self._to)
        if activation.name == "relu2":
            return self._product(values_TI, self._per_input_I.dtype, *FUSED["relu"]).square_()
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return the sum of the product and a residual."""
        return self._product(values_TI, residual_TO.dtype).add_(residual_TO)

    def _product(
        self,
        values_TI: Tensor,
        dtype: torch.dtype,
        activation: str = "none",
        form: str = "",
        *,
        to: EightBitSteps | None = None,
    ) -> Tensor:
        whole_TI, zero = _rounded(values_TI, self._steps, self._per_input_I), self._steps.zero
        if self._moves_up:
            whole_TI, zero = whole_TI.view(torch.uint8) ^ UNSIGNED_MIDDLE, zero + UNSIGNED_MIDDLE
        output = (1.0, 0, dtype) if to is None else (to.size, to.zero, to.dtype)
        inputs = torch_internals.Quantised(whole_TI.contiguous(), self._steps.size, zero)
        return torch_internals.int8_linear(inputs, self._weight, output, activation, form)


def _steps_per_input(linear: QuantisedLinear) -> Tensor:
    """Return the number of steps in one unit of each input [I]."""
    assert linear.steps is not None, "the layer must be calibrated"
    if linear.per_input_I is not None:
        return linear.per_input_I
    return torch.full((linear.in_features,), 1 / linear.steps.size)


def _rounded(values_TI: Tensor, steps: EightBitSteps, per_input_I: Tensor) -> Tensor:
    """Return inputs as 8-bit numbers; activations may already be such."""
    return steps.quantise(values_TI * per_input_I) if values_TI.is_floating_point() else values_TI


class SignedInt8Linear:
    """8-bit linear layer for ARM, where only signed numbers with one scale per weight matrix are fast.

    A scale for each output or unsigned inputs cost more than ten times the product there
    (`docs/shrinking.md`). So outputs are counted in steps, the bias compensates for shifted inputs, and
    scales, and with them activation and residual, are applied after the product.
    """

    def __init__(
        self, linear: QuantisedLinear, dtype: torch.dtype, *, to: EightBitSteps | None = None
    ) -> None:
        """Build it; `dtype`: of outputs; `to`: the steps of a returned activation."""
        assert linear.steps is not None and bits_of(linear.whole) == 8, "the layer must be calibrated"
        self._steps, self._to, self._dtype = linear.steps, to, dtype
        # In any precision of the folder: the factors were rounded to bf16, their products must not be.
        self._per_input_I = _steps_per_input(linear).float()
        self._scales_O = linear.scales_OG[:, 0] * linear.steps.size
        zero = linear.steps.zero - (UNSIGNED_MIDDLE if linear.steps.dtype == torch.uint8 else 0)
        bias_O = 0.0 if linear.bias is None else linear.bias.detach().float()
        self._weight = torch_internals.QuantisedWeight(
            torch_internals.pack_int8_weight(linear.whole),
            scales_O=torch.ones(1),
            zeros_O=torch.zeros(1, dtype=torch.int32),
            bias_O=bias_O / self._scales_O - zero * linear.whole.sum(1),
        )

    def __call__(self, values_TI: Tensor) -> Tensor:
        """Return the product."""
        return self._product(values_TI).to(self._dtype)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the product, rounded if the next layer takes it rounded."""
        activated_TO = activation.function(self._product(values_TI))
        if self._to is None:
            return activated_TO.to(self._dtype)
        return self._to.quantise(activated_TO * (1 / self._to.size))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return the sum of the product and a residual."""
        return torch.addcmul(residual_TO, self._counted(values_TI), self._scales_O).to(self._dtype)

    def _product(self, values_TI: Tensor) -> Tensor:
        return self._counted(values_TI).mul_(self._scales_O)

    def _counted(self, values_TI: Tensor) -> Tensor:
        """Return the product in steps of each output."""
        whole_TI = _rounded(values_TI, self._steps, self._per_input_I)
        if whole_TI.dtype == torch.uint8:
            whole_TI = (whole_TI ^ UNSIGNED_MIDDLE).view(torch.int8)
        inputs = torch_internals.Quantised(whole_TI.contiguous(), 1.0, 0)
        return torch_internals.int8_linear(inputs, self._weight, (1.0, 0, torch.float32))


# ---- a linear layer of 4-bit weights


class FourBitLinear:
    """A linear layer with weights that stay at 4 bits; each row of inputs is rounded to 8 on the fly."""

    def __init__(self, linear: QuantisedLinear) -> None:
        self._sizes = (GROUP_INPUTS, linear.in_features, linear.out_features)
        bias_O = None if linear.bias is None else linear.bias.detach()
        self._weight = torch_internals.pack_4bit_weight(linear.whole, linear.scales_OG, bias_O, self._sizes)

    def __call__(self, values_TI: Tensor) -> Tensor:
        """Return the product."""
        return torch_internals.linear_4bit(values_TI.contiguous(), self._weight, self._sizes)

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the product."""
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """Return the sum of the product and a residual."""
        return self(values_TI).add_(residual_TO)


def takes_4bit_products(linear: nn.Linear) -> bool:
    """True if this machine has fast products for the 4-bit weights of a layer."""
    if not isinstance(linear, QuantisedLinear) or bits_of(linear.whole) != 4:
        return False
    is_grouped = linear.scales_OG.shape[1] * GROUP_INPUTS == linear.in_features
    return is_grouped and linear.dtype == torch.float32 and torch_internals.has_4bit_products()
