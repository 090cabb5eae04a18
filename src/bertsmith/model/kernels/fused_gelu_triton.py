"""The kernels of `fused_gelu.py`: programs share the rows of a few columns, and sum the bias's gradient.

Shapes: T rows, I their width, J = 2 I the width of a row with its gate, P programs.

Φ is computed by a polynomial with an error of 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26); the derivative
needs its exponential as well. The library's erf would take longer than reading and writing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.kernels.partial_sums_triton import total
from bertsmith.model.kernels.triton_ready import multiprocessors

ROWS, COLUMNS = 4, 512
"""Size of a tile: two loads of 16 bytes for each of 128 threads."""
FORWARD_LAUNCH: dict[str, int] = {"num_warps": 4}
BACKWARD_LAUNCH: dict[str, int] = {"num_warps": 8}
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 12, 6
"""Programs per multiprocessor, over all columns: they run at once, and each leaves one partial sum."""


def biased_forward(
    product_TI: Tensor,
    bias_I: Tensor,
    *,
    launch: dict[str, int] = FORWARD_LAUNCH,
    programs: int = FORWARD_PROGRAMS,
) -> Tensor:
    """Compute GELU of product and bias, in the product's type."""
    activated_TI = torch.empty_like(product_TI)
    rows, width = product_TI.shape
    with torch.cuda.device_of(product_TI):
        biased_gelu_forward[_grid(product_TI, programs)](
            *(product_TI, bias_I, activated_TI, rows), WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, **launch
        )
    return activated_TI


def biased_backward(
    gradient_TI: Tensor,
    product_TI: Tensor,
    bias_I: Tensor,
    *,
    launch: dict[str, int] = BACKWARD_LAUNCH,
    programs: int = BACKWARD_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Compute gradients of the product, and of the bias in fp32."""
    to_product_TI = torch.empty_like(product_TI)
    rows, width = product_TI.shape
    grid = _grid(product_TI, programs)
    partial_PI = torch.empty(grid[0], width, dtype=torch.float32, device=product_TI.device)
    with torch.cuda.device_of(product_TI):
        biased_gelu_backward[grid](
            *(gradient_TI, product_TI, bias_I, to_product_TI, partial_PI, rows),
            WIDTH=width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            **launch,
        )
    return to_product_TI, total(partial_PI[None])[0]


def gated_forward(
    halves_TJ: Tensor, *, launch: dict[str, int] = FORWARD_LAUNCH, programs: int = FORWARD_PROGRAMS
) -> Tensor:
    """Compute GELU of the first half of each row times the second."""
    rows, width = halves_TJ.shape[0], halves_TJ.shape[1] // 2
    gated_TI = halves_TJ.new_empty(rows, width)
    with torch.cuda.device_of(halves_TJ):
        gated_gelu_forward[_grid(gated_TI, programs)](
            *(halves_TJ, gated_TI, rows), WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, **launch
        )
    return gated_TI


def gated_backward(
    gradient_TI: Tensor,
    halves_TJ: Tensor,
    *,
    launch: dict[str, int] = BACKWARD_LAUNCH,
    programs: int = BACKWARD_PROGRAMS,
) -> Tensor:
    """Compute gradients of both halves."""
    to_halves_TJ = torch.empty_like(halves_TJ)
    rows, width = gradient_TI.shape
    with torch.cuda.device_of(halves_TJ):
        gated_gelu_backward[_grid(gradient_TI, programs)](
            *(gradient_TI, halves_TJ, to_halves_TJ, rows), WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, **launch
        )
    return to_halves_TJ


def _grid(values_TI: Tensor, for_each: int) -> tuple[int, int]:
    """Return the programs that share the rows, and blocks of columns; the same for every number of rows."""
    blocks = -(-values_TI.shape[1] // COLUMNS)
    return max(1, for_each * multiprocessors(values_TI.device) // blocks), blocks


@triton.jit(do_not_specialize=["rows"])
def biased_gelu_forward(
    product, bias, activated, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    bias_C = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        real = (row < rows)[:, None] & inside[None, :]
        values = tl.load(product + at, mask=real, other=0.0).to(tl.float32) + bias_C[None, :]
        below, _ = _normal(values)
        tl.store(activated + at, (values * below).to(activated.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def biased_gelu_backward(
    gradient,
    product,
    bias,
    to_product,
    partial_sums,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    bias_C = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        real = (row < rows)[:, None] & inside[None, :]
        upstream = tl.load(gradient + at, mask=real, other=0.0).to(tl.float32)
        values = tl.load(product + at, mask=real, other=0.0).to(tl.float32) + bias_C[None, :]
        below, density = _normal(values)
        to_values = upstream * (below + values * density)
        tl.store(to_product + at, to_values.to(to_product.dtype.element_ty), mask=real)
        sums += to_values
    tl.store(partial_sums + tl.program_id(0) * WIDTH + column, tl.sum(sums, 0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_gelu_forward(halves, gated, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        at_inner = at + row.to(tl.int64)[:, None] * WIDTH
        real = (row < rows)[:, None] & inside[None, :]
        inner = tl.load(halves + at_inner, mask=real, other=0.0).to(tl.float32)
        gate = tl.load(halves + at_inner + WIDTH, mask=real, other=0.0).to(tl.float32)
        below, _ = _normal(inner)
        tl.store(gated + at, (inner * below * gate).to(gated.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def gated_gelu_backward(
    gradient, halves, to_halves, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        at_inner = at + row.to(tl.int64)[:, None] * WIDTH
        real = (row < rows)[:, None] & inside[None, :]
        upstream = tl.load(gradient + at, mask=real, other=0.0).to(tl.float32)
        inner = tl.load(halves + at_inner, mask=real, other=0.0).to(tl.float32)
        gate = tl.load(halves + at_inner + WIDTH, mask=real, other=0.0).to(tl.float32)
        below, density = _normal(inner)
        to_inner = upstream * gate * (below + inner * density)
        to_gate = upstream * inner * below
        tl.store(to_halves + at_inner, to_inner.to(to_halves.dtype.element_ty), mask=real)
        tl.store(to_halves + at_inner + WIDTH, to_gate.to(to_halves.dtype.element_ty), mask=real)


@triton.jit
def _normal(values):
    """Return the cumulative probability of the normal distribution, and its density."""
    bell = tl.exp2(values * values * -0.7213475204444817)  # exp(-values**2 / 2)
    near = tl.rsqrt(1.0 + 0.23164187806706785 * tl.abs(values))  # 0.3275911 / sqrt(2)
    near *= near  # faster than a division, which handles special numbers that do not occur here
    tail = 1.421413741 + near * (-1.453152027 + near * 1.061405429)
    tail = 0.5 * bell * near * (0.254829592 + near * (-0.284496736 + near * tail))
    return tl.where(values < 0, tail, 1.0 - tail), bell * 0.3989422804014327
