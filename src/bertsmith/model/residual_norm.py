"""LayerNorm of a residual sum with dropout, the joint of post-norm blocks: plain, and as one kernel on CUDA.

Shapes: T rows, D their width.

The compiler samples a number for each value, keeps mask, sum and normalised rows for the backward pass and,
under autocast, holds the residual in fp32. The kernel reads and writes each row once in the precision of the
products and keeps only mean and deviation; what it computes in between is fp32.
"""

from typing import Any

import torch
from torch import Tensor, library, nn

from bertsmith.model.elementwise import dropout_seed, dropped_values
from bertsmith.model.triton_ready import needs_operator, triton_runs_on

MAX_WIDTH = 1024
"""Of a wider row, the registers of one warp spill."""


def residual_norm(residual_TD: Tensor, branch_TD: Tensor, norm: nn.Module, dropout: nn.Dropout) -> Tensor:
    """The normalised sum, by the kernel where it runs; it has the branch's type there."""
    if isinstance(norm, nn.LayerNorm) and kernel_takes(residual_TD, branch_TD, norm):
        probability = dropout.p if dropout.training else 0.0
        return fused_residual_norm(residual_TD, branch_TD, norm, probability)
    normed_TD: Tensor = norm(residual_TD + dropout(branch_TD))
    return normed_TD


def kernel_takes(residual_TD: Tensor, branch_TD: Tensor, norm: nn.LayerNorm) -> bool:
    """Whether the kernel computes these: half or single precision, rows of ordinary width, both weights."""
    known = {torch.bfloat16, torch.float16, torch.float32}
    fits = branch_TD.dtype in known and residual_TD.dtype in known and branch_TD.shape[-1] <= MAX_WIDTH
    return fits and norm.bias is not None and triton_runs_on(branch_TD.device)


def fused_residual_norm(residual_TD: Tensor, branch_TD: Tensor, norm: nn.LayerNorm, dropout: float) -> Tensor:
    """The same by the kernel, which samples from torch's generator of the device: one seed for a call."""
    dropped = dropped_values(dropout)
    seed = dropout_seed(branch_TD.device) if dropped else None
    forward = _forward_operator if needs_operator() else _forward
    normed_TD: Tensor = forward(residual_TD, branch_TD, norm.weight, norm.bias, seed, norm.eps, dropped)[0]
    return normed_TD


def _forward(  # noqa: PLR0913 - an operator takes tensors and numbers
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    eps: float,
    dropped: int,
) -> tuple[Tensor, Tensor]:
    from bertsmith.model.residual_norm_triton import forward

    operands = (residual.contiguous(), branch.contiguous(), weight, bias)
    return forward(operands, seed, eps=eps, dropped=dropped)


_forward_operator = library.custom_op("bertsmith::residual_norm", _forward, mutates_args=())


@_forward_operator.register_fake
def _forward_shapes(_residual: Tensor, branch: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    # `len` would tie the graph to this very number of rows.
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
) -> tuple[Tensor, Tensor, Tensor]:
    from bertsmith.model.residual_norm_triton import backward

    operands = (residual.contiguous(), branch.contiguous(), weight)
    return backward(gradient.contiguous(), operands, (statistics, seed), dropped=dropped)


@_backward.register_fake
def _backward_shapes(  # noqa: PLR0913
    _gradient: Tensor,
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    _statistics: Tensor,
    _seed: Tensor | None,
    dropped: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = weight.new_empty((2, *weight.shape), dtype=torch.float32)
    same = not dropped and residual.dtype == branch.dtype
    to_residual = residual.new_empty((0, *residual.shape[1:])) if same else torch.empty_like(residual)
    return to_residual, torch.empty_like(branch), sums


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    residual, branch, weight, _, seed, _, dropped = inputs
    ctx.save_for_backward(residual, branch, weight, output[1], seed)
    ctx.dropped = dropped


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: where layers are recomputed, a second reading is an error
    to_residual, to_branch, to_weights = _backward(gradient, *saved, ctx.dropped)
    if not ctx.dropped and to_residual.dtype == to_branch.dtype:
        to_residual = to_branch  # written once
    to_weight, to_bias = to_weights.to(saved[2].dtype).unbind(0)
    return to_residual, to_branch, to_weight, to_bias, None, None, None


_forward_operator.register_autograd(_gradients, setup_context=_keep)
