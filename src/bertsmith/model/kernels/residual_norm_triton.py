"""The kernels of `residual_norm.py`: each warp processes whole rows and keeps them in registers.

Shapes: T rows, D their width, P programs, B sums.

A row is read once and written once. The backward pass recomputes sum and mask from the inputs, which costs as
many bytes as a stored sum would and is exact. Sums and statistics are fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.kernels.partial_sums_triton import total
from bertsmith.model.kernels.triton_dropout import keeps, samples
from bertsmith.model.kernels.triton_ready import multiprocessors

FORWARD_LAUNCH: dict[str, int] = {"num_warps": 1}
"""Launch options: one warp sums a row without waiting for others."""
FORWARD_PROGRAMS = 16
"""Programs per multiprocessor: all run at once, none is left over, and each leaves one partial sum."""


def backward_launch(width: int) -> tuple[dict[str, int], int]:
    """Return the launch options of the backward pass for rows of this width, and the number of programs.

    One warp does not have enough registers for a wider row with its sums.
    """
    return ({"num_warps": 1, "maxnreg": 168}, 12) if width <= 768 else ({"num_warps": 2}, 6)


def forward(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    seed: Tensor | None,
    *,
    eps: float,
    dropped: int,
    launch: dict[str, int] = FORWARD_LAUNCH,
    programs: int = FORWARD_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Compute the normalised rows in the branch's type, and mean and reciprocal deviation of each [2, T]."""
    residual_TD, branch_TD, weight_D, bias_D = operands
    rows, width = branch_TD.shape
    output_TD = torch.empty_like(branch_TD)
    statistics_2T = torch.empty(2, rows, dtype=torch.float32, device=branch_TD.device)
    with torch.cuda.device_of(branch_TD):
        residual_norm_forward[programs * multiprocessors(branch_TD.device),](
            *(residual_TD, branch_TD, weight_D, bias_D, seed, output_TD, statistics_2T, rows, eps),
            DROPPED=dropped,
            WIDTH=width,
            BLOCK=_block(width),
            **launch,
        )
    return output_TD, statistics_2T


def backward(
    gradient_TD: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor | None],
    *,
    dropped: int,
    summed: bool,
    launch: dict[str, int] | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of residual and branch, and of weight, bias and with `summed` the branch's bias.

    The latter are one [2 or 3, D]. The residual's gradient is empty if it equals the branch's.
    """
    residual_TD, branch_TD, weight_D = operands
    statistics_2T, seed = saved
    rows, width = branch_TD.shape
    same = not dropped and residual_TD.dtype == branch_TD.dtype
    to_residual_TD = residual_TD.new_empty((0 if same else rows, width))
    to_branch_TD = torch.empty_like(branch_TD)
    usual_launch, usual_programs = backward_launch(width)
    # The same for every number of rows, so that sums have the same bits.
    count = (programs or usual_programs) * multiprocessors(branch_TD.device)
    partial_BPD = torch.empty(3 if summed else 2, count, width, dtype=torch.float32, device=branch_TD.device)
    with torch.cuda.device_of(branch_TD):
        residual_norm_backward[count,](
            *(gradient_TD, residual_TD, branch_TD, weight_D, seed, statistics_2T),
            *(None if same else to_residual_TD, to_branch_TD, partial_BPD, rows),
            DROPPED=dropped,
            SUMMED=summed,
            WIDTH=width,
            BLOCK=_block(width),
            **(launch or usual_launch),
        )
    return to_residual_TD, to_branch_TD, total(partial_BPD)


def _block(width: int) -> int:
    # Eight values of dropout are drawn at once.
    return max(8, int(triton.next_power_of_2(width)))


@triton.jit(do_not_specialize=["rows", "seed"])
def residual_norm_forward(
    residual,
    branch,
    weight,
    bias,
    seed,
    output,
    statistics,
    rows,
    eps,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    bias_D = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * WIDTH
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = first + column
        sum_D, _ = _residual_sum(residual, branch, seed, row, at, inside, DROPPED, BLOCK)
        mean = tl.sum(sum_D, 0) / WIDTH
        centred_D = tl.where(inside, sum_D - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred_D * centred_D, 0) / WIDTH + eps)
        normed_D = centred_D * scale * weight_D + bias_D
        tl.store(output + at, normed_D.to(output.dtype.element_ty), mask=inside)
        tl.store(statistics + row, mean)
        tl.store(statistics + rows + row, scale)
        first += tl.num_programs(0) * WIDTH


@triton.jit(do_not_specialize=["rows", "seed"])
def residual_norm_backward(
    gradient,
    residual,
    branch,
    weight,
    seed,
    statistics,
    to_residual,
    to_branch,
    partial_sums,
    rows,
    DROPPED: tl.constexpr,
    SUMMED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    to_weight_D = tl.zeros((BLOCK,), tl.float32)
    to_bias_D = tl.zeros((BLOCK,), tl.float32)
    to_branch_bias_D = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * WIDTH
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = first + column
        gradient_D = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        sum_D, kept_D = _residual_sum(residual, branch, seed, row, at, inside, DROPPED, BLOCK)
        mean = tl.load(statistics + row)
        scale = tl.load(statistics + rows + row)
        normed_D = tl.where(inside, (sum_D - mean) * scale, 0.0)
        to_normed_D = gradient_D * weight_D
        along_mean = tl.sum(to_normed_D, 0) / WIDTH
        along_scale = tl.sum(to_normed_D * normed_D, 0) / WIDTH
        to_sum_D = (to_normed_D - along_mean - normed_D * along_scale) * scale
        if to_residual is not None:
            tl.store(to_residual + at, to_sum_D.to(to_residual.dtype.element_ty), mask=inside)
        if DROPPED > 0:
            to_sum_D = tl.where(kept_D, to_sum_D * (65536.0 / (65536 - DROPPED)), 0.0)
        tl.store(to_branch + at, to_sum_D.to(to_branch.dtype.element_ty), mask=inside)
        to_weight_D += gradient_D * normed_D
        to_bias_D += gradient_D
        if SUMMED:
            to_branch_bias_D += to_sum_D
        first += tl.num_programs(0) * WIDTH
    partial = partial_sums + tl.program_id(0) * WIDTH + column
    tl.store(partial, to_weight_D, mask=inside)
    tl.store(partial + tl.num_programs(0) * WIDTH, to_bias_D, mask=inside)
    if SUMMED:
        tl.store(partial + 2 * tl.num_programs(0) * WIDTH, to_branch_bias_D, mask=inside)


@triton.jit
def _residual_sum(residual, branch, seed, row, at, inside, DROPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row of the residual plus the dropped-out branch, and the dropout mask."""
    residual_D = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    branch_D = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    kept_D = inside
    if DROPPED > 0:
        # A thread holds eight neighbours, as it loads them: the numbers of one counter.
        counters = row * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        kept_D = keeps(tl.reshape(samples(tl.load(seed), counters), (BLOCK,)), DROPPED)
        branch_D = tl.where(kept_D, branch_D * (65536.0 / (65536 - DROPPED)), 0.0)
    return residual_D + branch_D, kept_D
