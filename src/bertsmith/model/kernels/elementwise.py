"""Elementwise GELU and dropout for the cases where torch is slow.

On ARM torch computes the derivative of the erf GELU ten times slower than the function. On any CPU it samples
Bernoulli numbers one by one; our code takes four from one number of the same generator.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.model.kernels.torch_internals import ON_ARM


def gelu(values: Tensor) -> Tensor:
    """Compute the erf form of GELU; torch 2.13 computes its derivative ten times slower on ARM."""
    if ON_ARM and values.device.type == "cpu" and values.requires_grad and not torch.compiler.is_compiling():
        activated: Tensor = _Gelu.apply(values)  # type: ignore[no-untyped-call]
        return activated
    return functional.gelu(values)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(values)
        return functional.gelu(values)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (values,) = ctx.saved_tensors
        below = torch.erf(values * math.sqrt(0.5)).add_(1).mul_(0.5)
        density = torch.exp(values.square().mul_(-0.5)).mul_(1 / math.sqrt(2 * math.pi))
        return below.add_(density.mul_(values)).mul_(gradient)


# ---- dropout

VALUES = 2**16
"""Number of values of a 16-bit sample: dropout of 0.1 is really 6554 / 65536."""


def dropout_seed(device: torch.device) -> Tensor:
    """Return a number from torch's generator of the device, for masks that both passes compute from it."""
    return torch.randint(2**63 - 1, (), device=device)


def bernoulli_mask(
    probability: float, shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Return True with `real_probability(probability)`, independently; by default from torch's generator."""
    count = torch.Size(shape).numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    samples = words.view(torch.int16)[:count].view(*shape)
    return samples < dropped_values(probability) - VALUES // 2


def real_probability(probability: float) -> float:
    """Return the actual probability of `bernoulli_mask`."""
    return dropped_values(probability) / VALUES


def dropped_values(probability: float) -> int:
    """Return the number of sample values that are dropped; never all, as 16 bits cannot represent that."""
    return min(round(probability * VALUES), VALUES - 1)


class Dropout(nn.Dropout):
    """torch's dropout, sampled faster on a CPU."""

    def forward(self, values: Tensor) -> Tensor:
        ours = values.device.type == "cpu" and self.training and 0 < self.p < 1
        if not ours or torch.compiler.is_compiling():  # the compiler fuses torch's own and cannot trace ours
            return super().forward(values)
        dropped = bernoulli_mask(self.p, values.shape, values.device)
        kept = values.new_full((), 1 / (1 - real_probability(self.p)))
        return values * torch.where(dropped, values.new_zeros(()), kept)
