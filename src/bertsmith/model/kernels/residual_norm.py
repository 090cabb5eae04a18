"""LayerNorm of a residual sum with dropout, the joint of post-norm blocks: plain, and as one kernel on CUDA.

Shapes: T rows, D their width, I the width of a linear layer's inputs.

The compiler samples a number for each value, keeps mask, sum and normalised rows for the backward pass and,
under autocast, stores the residual in fp32. The kernel reads and writes each row once in the precision of the
products and keeps only mean and deviation; intermediate values are fp32. It also sums the gradient of the
bias of the linear layer before it, which would be another pass over all rows.
"""

from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn import functional

from bertsmith.model.kernels.elementwise import dropout_seed, dropped_values
from bertsmith.model.kernels.torch_internals import learns_bias
from bertsmith.model.kernels.triton_ready import needs_operator, triton_runs_on

MAX_WIDTH = 1024
"""Maximum width; wider rows spill the registers of one warp in the forward pass, of two in the backward."""


def residual_norm(
    residual_TD: Tensor, values_TI: Tensor, linear: nn.Module, norm: nn.Module, dropout: nn.Dropout
) -> Tensor:
    """Return the normalised sum of a residual and the output of a linear layer, the branch.

    The kernel returns the type of the branch.
    """
    if not (isinstance(norm, nn.LayerNorm) and kernel_takes(residual_TD, values_TI, norm)):
        normed_TD: Tensor = norm(residual_TD + dropout(linear(values_TI)))
        return normed_TD
    probability = dropout.p if dropout.training else 0.0
    if not learns_bias(linear):
        return fused_residual_norm(residual_TD, linear(values_TI), norm, probability)
    branch_TD = functional.linear(values_TI, linear.weight, linear.bias.detach())
    return fused_residual_norm(residual_TD, branch_TD, norm, probability, linear.bias)


def kernel_takes(residual_TD: Tensor, values_TI: Tensor, norm: nn.LayerNorm) -> bool:
    """True if the kernel supports these: half or single precision, rows of ordinary width, both weights."""
    known = {torch.bfloat16, torch.float16, torch.float32}
    fits = values_TI.dtype in known and residual_TD.dtype in known and residual_TD.shape[-1] <= MAX_WIDTH
    return fits and norm.bias is not None and triton_runs_on(residual_TD.device)


def fused_residual_norm(
    residual_TD: Tensor,
    branch_TD: Tensor,
    norm: nn.LayerNorm,
    dropout: float,
    branch_bias_D: Tensor | None = None,
) -> Tensor:
    """Compute it by the kernel, which samples from torch's generator of the device: one seed for a call.

    A bias is passed if the branch has it without its gradient, which is summed here.
    """
    dropped = dropped_values(dropout)
    seed = dropout_seed(branch_TD.device) if dropped else None
    forward = _forward_operator if needs_operator() else _forward
    operands = (residual_TD, branch_TD, norm.weight, norm.bias, seed, branch_bias_D)
    normed_TD: Tensor = forward(*operands, norm.eps, dropped)[0]
    return normed_TD


def _forward(  # noqa: PLR0913 - an operator takes tensors and numbers
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    branch_bias: Tensor | None,  # noqa: ARG001 - the branch has it already; the backward pass gives its gradient
    eps: float,
    dropped: int,
) -> tuple[Tensor, Tensor]:
    from bertsmith.model.kernels.residual_norm_triton import forward

    operands = (residual.contiguous(), branch.contiguous(), weight, bias)
    return forward(operands, seed, eps=eps, dropped=dropped)


_forward_operator = library.custom_op("bertsmith::residual_norm", _forward, mutates_args=())


@_forward_operator.register_fake
def _forward_shapes(_residual: Tensor, branch: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    # `len` would specialise the graph to this number of rows.
    return torch.empty_like(branch), branch.new_empty((2, branch.shape[0]), dtype=torch.float32)


@library.custom_op("bertsmith::residual_norm_backward", mutates_args=())
def _backward(  # noqa: PLR0913
    gradient: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    statistics: Tensor,
    seed: Tensor | None,
    dropped: int,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from bertsmith.model.kernels.residual_norm_triton import backward

    operands = (residual.contiguous(), branch.contiguous(), weight)
    return backward(gradient.contiguous(), operands, (statistics, seed), dropped=dropped, summed=summed)


@_backward.register_fake
def _backward_shapes(  # noqa: PLR0913
    _gradient: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    _statistics: Tensor,
    _seed: Tensor | None,
    dropped: int,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = weight.new_empty((3 if summed else 2, *weight.shape), dtype=torch.float32)
    same = not dropped and residual.dtype == branch.dtype
    to_residual = residual.new_empty((0, *residual.shape[1:])) if same else torch.empty_like(residual)
    return to_residual, torch.empty_like(branch), sums


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    residual, branch, weight, _, seed, branch_bias, _, dropped = inputs
    ctx.save_for_backward(residual, branch, weight, output[1], seed)
    ctx.dropped = dropped
    ctx.branch_bias_type = None if branch_bias is None else branch_bias.dtype


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: if layers are recomputed, a second reading is an error
    summed = ctx.needs_input_grad[5]  # the branch's bias
    to_residual, to_branch, sums = _backward(gradient, *saved, ctx.dropped, summed)
    if not ctx.dropped and to_residual.dtype == to_branch.dtype:
        to_residual = to_branch  # written once
    to_weight, to_bias = sums[:2].to(saved[2].dtype).unbind(0)
    to_branch_bias = sums[2].to(ctx.branch_bias_type) if summed else None
    return to_residual, to_branch, to_weight, to_bias, None, to_branch_bias, None, None


_forward_operator.register_autograd(_gradients, setup_context=_keep)
