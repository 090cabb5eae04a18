"""Add up partial sums of programs, one row each, in a fixed order.

Shapes: B sums, P programs that left a part of each, D their width.

There are few columns and many rows: torch's sum then has few programs, and each waits for row after row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH: dict[str, int] = {"ROWS": 256, "COLUMNS": 16, "num_warps": 8}
"""Launch options: each thread has a few loads in flight, and there are more programs than multiprocessors."""


def total(partial_BPD: Tensor, *, launch: dict[str, int] = LAUNCH) -> Tensor:
    """Return the sum over programs [B, D] of contiguous fp32."""
    sums, rows, width = partial_BPD.shape
    totals_BD = partial_BPD.new_empty(sums, width)
    with torch.cuda.device_of(partial_BPD):
        sum_of_rows[triton.cdiv(width, launch["COLUMNS"]), sums](
            partial_BPD, totals_BD, rows, WIDTH=width, **launch
        )
    return totals_BD


@triton.jit(do_not_specialize=["rows"])
def sum_of_rows(partial_sums, totals, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    partial_sums += tl.program_id(1).to(tl.int64) * rows * WIDTH
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        sums += tl.load(partial_sums + at, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
    tl.store(totals + tl.program_id(1) * WIDTH + column, tl.sum(sums, 0), mask=inside)
