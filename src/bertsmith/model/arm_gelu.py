"""GELU whose derivative is quick on ARM, where torch 2.13 computes it ten times slower than the function."""

import math
import platform

import torch
from torch import Tensor
from torch.nn import functional

ON_ARM = platform.machine() in ("aarch64", "arm64")


def gelu(values: Tensor) -> Tensor:
    """The erf form of GELU."""
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
