"""Linear layers for answers on a CPU: weights that do not change any more lie as oneDNN wants them.

Shapes: T rows, I inputs, O outputs.

Each gives the product alone, with its activation, or with a residual added, in one pass over the outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

FUSED = {"gelu": ("gelu", "none"), "relu": ("relu", "")}
"""Activations that oneDNN computes on the way, with its name for their form."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this precision here."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16_products())


def has_bf16_products() -> bool:
    """Whether this CPU multiplies in bf16; one that imitates it is a hundred times slower."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_int8_products() -> bool:
    """Whether this CPU multiplies 8-bit numbers four at a time; without that, fp32 is faster."""
    return bool(torch.cpu._is_vnni_supported())


@dataclass(frozen=True, slots=True)
class Activation:
    """What comes after a linear layer, by name and as a function."""

    name: str
    function: Callable[[Tensor], Tensor]


class FrozenLinear(Protocol):
    """What a frozen block asks of a linear layer."""

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        ...

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation, in the form that the next layer takes."""
        ...

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and something else."""
        ...


class PackedLinear:
    """A linear layer in the precision of its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def __call__(self, values_TI: Tensor) -> Tensor:
        """The product."""
        return self._product(values_TI, "none", "")

    def activated(self, values_TI: Tensor, activation: Activation) -> Tensor:
        """The product after an activation."""
        if activation.name in FUSED:
            return self._product(values_TI, *FUSED[activation.name])
        return activation.function(self(values_TI))

    def plus(self, values_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """The sum of the product and something else."""
        added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            values_TI, residual_TO, self._weight, self._bias, "add"
        )
        return added

    def _product(self, values_TI: Tensor, activation: str, form: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            values_TI, self._weight, self._bias, activation, [], form
        )
        return product
