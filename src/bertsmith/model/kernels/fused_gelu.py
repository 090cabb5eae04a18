"""GELU after a linear layer, with its bias or with a gate: plain, and as one kernel for each pass on CUDA.

Shapes: T rows, D width, I inner width, J = 2 I if one half gates the other.

The compiler computes the activation again for the backward pass and writes it a second time, and sums the
bias's gradient in a separate pass; with a gate it computes the gradients of both halves for each of them. The
kernels are operators with a stored output; they read and write each value once and sum on the way.

Without gradients, cuBLAS can fuse GELU into a product in bf16, which saves that pass. It is the tanh form, of
a product in fp32: the two differ by less than 0.0005, in mean square by much less than the change from
rounding the product to bf16 first, as otherwise.
"""

from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn import functional

from bertsmith.model.kernels.elementwise import gelu
from bertsmith.model.kernels.torch_internals import is_plain, linear_tanh_gelu
from bertsmith.model.kernels.triton_ready import needs_operator, triton_runs_on


def linear_gelu(values_TD: Tensor, linear: nn.Module) -> Tensor:
    """Return GELU of a linear layer, by the kernel if it runs, in inference by the product itself."""
    if is_plain(linear) and linear.bias is not None:
        if kernel_takes(values_TD):
            return biased_gelu(functional.linear(values_TD, linear.weight), linear.bias)
        if product_takes(values_TD, linear.weight):
            return linear_tanh_gelu(values_TD, linear.weight, linear.bias)
    return gelu(linear(values_TD))


def gated_gelu(halves_TJ: Tensor) -> Tensor:
    """Return GELU of the first half times the second, by the kernel if it runs, also without gradients."""
    if gate_kernel_takes(halves_TJ):
        return fused_gated_gelu(halves_TJ)
    inner_TI, gate_TI = halves_TJ.chunk(2, dim=-1)
    return gelu(inner_TI) * gate_TI


def biased_gelu(product_TI: Tensor, bias_I: Tensor) -> Tensor:
    """Return GELU of product and bias, by the kernel, in the product's type."""
    activated_TI: Tensor = _biased_forward(product_TI, bias_I)
    return activated_TI


def fused_gated_gelu(halves_TJ: Tensor) -> Tensor:
    """Return GELU of the first half times the second, by the kernel, in their type."""
    forward = _gated_operator if needs_operator() else _gated_forward
    gated_TI: Tensor = forward(halves_TJ)
    return gated_TI


def kernel_takes(values_TD: Tensor) -> bool:
    """True if the kernel is worthwhile: in a training step, in any precision except double."""
    return torch.is_grad_enabled() and gate_kernel_takes(values_TD)


def gate_kernel_takes(halves_TJ: Tensor) -> bool:
    """True if the kernel with a gate runs: in any precision except double."""
    return halves_TJ.dtype != torch.float64 and triton_runs_on(halves_TJ.device)


def product_takes(values_TD: Tensor, weight_ID: Tensor) -> bool:
    """True if a product may compute GELU: on CUDA, in bf16, without gradients."""
    narrow = values_TD.dtype == weight_ID.dtype == torch.bfloat16
    return narrow and values_TD.is_cuda and not torch.is_grad_enabled()


@library.custom_op("bertsmith::biased_gelu", mutates_args=())
def _biased_forward(product: Tensor, bias: Tensor) -> Tensor:
    from bertsmith.model.kernels.fused_gelu_triton import biased_forward

    return biased_forward(product.contiguous(), bias)


@_biased_forward.register_fake
def _biased_forward_shape(product: Tensor, _bias: Tensor) -> Tensor:
    return torch.empty_like(product)


@library.custom_op("bertsmith::biased_gelu_backward", mutates_args=())
def _biased_backward(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from bertsmith.model.kernels.fused_gelu_triton import biased_backward

    return biased_backward(gradient.contiguous(), product.contiguous(), bias)


@_biased_backward.register_fake
def _biased_backward_shapes(_gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(product), bias.new_empty(bias.shape, dtype=torch.float32)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs)


def _biased_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    product, bias = ctx.saved_tensors
    to_product, to_bias = _biased_backward(gradient, product, bias)
    return to_product, to_bias.to(bias.dtype)


_biased_forward.register_autograd(_biased_gradients, setup_context=_keep_inputs)


def _gated_forward(halves: Tensor) -> Tensor:
    from bertsmith.model.kernels.fused_gelu_triton import gated_forward

    return gated_forward(halves.contiguous())


_gated_operator = library.custom_op("bertsmith::gated_gelu", _gated_forward, mutates_args=())


@_gated_operator.register_fake
def _gated_forward_shape(halves: Tensor) -> Tensor:
    return halves.new_empty((halves.shape[0], halves.shape[1] // 2))


@library.custom_op("bertsmith::gated_gelu_backward", mutates_args=())
def _gated_backward(gradient: Tensor, halves: Tensor) -> Tensor:
    from bertsmith.model.kernels.fused_gelu_triton import gated_backward

    return gated_backward(gradient.contiguous(), halves.contiguous())


@_gated_backward.register_fake
def _gated_backward_shape(_gradient: Tensor, halves: Tensor) -> Tensor:
    return torch.empty_like(halves)


def _gated_gradients(ctx: Any, gradient: Tensor) -> Tensor:
    (halves,) = ctx.saved_tensors
    to_halves: Tensor = _gated_backward(gradient, halves)
    return to_halves


_gated_operator.register_autograd(_gated_gradients, setup_context=_keep_inputs)
