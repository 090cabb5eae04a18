"""A linear layer with GELU behind it: plain, and on CUDA with bias and activation as one kernel.

Shapes: T rows, D width, I inner width.

The compiler computes the activation again for the backward pass and writes it a second time, and sums up
the bias's gradient in a pass of its own. The kernel is an operator, whose output is kept; it sums on the way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.model.elementwise import gelu
from bertsmith.model.triton_ready import triton_runs_on


def linear_gelu(values_TD: Tensor, linear: nn.Module) -> Tensor:
    """GELU of a linear layer, by the kernel where it runs."""
    # An adapter inside of it, or another layer in its place, computes for itself.
    if type(linear) is nn.Linear and linear.bias is not None and kernel_takes(values_TD):
        return biased_gelu(functional.linear(values_TD, linear.weight), linear.bias)
    return gelu(linear(values_TD))


def biased_gelu(product_TI: Tensor, bias_I: Tensor) -> Tensor:
    """GELU of product and bias, by the kernel, in the product's type."""
    activated_TI: Tensor = _forward(product_TI, bias_I)
    return activated_TI


def kernel_takes(values_TD: Tensor) -> bool:
    """Whether the kernel is worth it: in a training step, in any precision but double."""
    learns = torch.is_grad_enabled() and values_TD.dtype != torch.float64
    return learns and triton_runs_on(values_TD.device)


@torch.library.custom_op("bertsmith::biased_gelu", mutates_args=())
def _forward(product: Tensor, bias: Tensor) -> Tensor:
    from bertsmith.model.biased_gelu_triton import forward

    return forward(product.contiguous(), bias)


@_forward.register_fake
def _forward_shape(product: Tensor, _bias: Tensor) -> Tensor:
    return torch.empty_like(product)


@torch.library.custom_op("bertsmith::biased_gelu_backward", mutates_args=())
def _backward(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from bertsmith.model.biased_gelu_triton import backward

    return backward(gradient.contiguous(), product.contiguous(), bias)


@_backward.register_fake
def _backward_shapes(_gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(product), bias.new_empty(bias.shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    product, bias = ctx.saved_tensors
    to_product, to_bias = _backward(gradient, product, bias)
    return to_product, to_bias.to(bias.dtype)


_forward.register_autograd(_gradients, setup_context=_keep)
