"""What fp8 could gain: the products of a training step in bf16 and in fp8, and what it costs to make fp8.

    python bench/fp8_products.py --json fp8.json
    python bench/fp8_products.py --width 1024 --inner 4096 --layers 24

For each linear layer of an encoder the three products of a step, forward, gradient of the input and gradient
of the weight, in bf16 and, by `torch._scaled_mm`, in fp8, in two ways:

- one scale for a matrix (e4m3; gradients e5m2), all three products. They read both factors along the summed
  side, so that inputs and gradients are needed in two layouts. Both are made in one compiled pass, with a
  scale that is known from the steps before (delayed scaling) or with one that is found first.
- a scale for each row (e4m3), forward and the gradient of the input; that of the weight stays bf16, so that
  one layout of inputs and gradients is enough, made with its scales in a compiled pass that needs to know
  nothing.

What is left of the gain is told for a step, weights included.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from profile_step import median_seconds
from rounds import Results, forget, parser_of
from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (FORWARD, BACKWARD)}


class Linear(NamedTuple):
    """A linear layer: [tokens, inputs] x [inputs, outputs]."""

    name: str
    inputs: int
    outputs: int


def main() -> None:
    options = parse()
    rows = [measured(linear, options) for linear in linears(options)]
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key != "layer"}
    rows.append({"layer": f"a step, {options.layers} layers", **total})
    show(rows)
    known, found = (total["fp8 products"] + total[f"casts, scale {how}"] for how in ("known", "found"))
    by_row = total["fp8 by row, bf16 weights"] + total["casts by row"]
    print(f"\na step of {total['bf16']:.1f} ms of products would take {known:.1f} ms with delayed scaling,")
    print(f"{found:.1f} ms with scales that are found first and {by_row:.1f} ms with a scale for each row")
    Results(options.json, "ms", rows=rows).write()


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--inner", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=12)
    return parser.parse_args()


def linears(options: argparse.Namespace) -> list[Linear]:
    """The linear layers of a block."""
    width, inner = options.width, options.inner
    return [
        Linear("query, key, value", width, 3 * width),
        Linear("attention's output", width, width),
        Linear("feed-forward, up", width, inner),
        Linear("feed-forward, down", inner, width),
    ]


def measured(linear: Linear, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds in a step, all blocks together."""
    device, tokens = options.device, options.tokens
    inputs, gradients, weight = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((tokens, linear.inputs), (tokens, linear.outputs), (linear.outputs, linear.inputs))
    )

    def milliseconds(work: Callable[[], object]) -> float:
        return 1e3 * options.layers * median_seconds(work, device)

    in_bf16 = (
        milliseconds(lambda: inputs @ weight.T),
        milliseconds(lambda: gradients @ weight),
        milliseconds(lambda: gradients.T @ inputs),
    )
    scale = torch.ones((), device=device)
    (inputs_8, inputs_T8), (weight_8, weight_T8) = (both(each, scale, FORWARD) for each in (inputs, weight))
    gradients_8, gradients_T8 = both(gradients, scale, BACKWARD)
    in_fp8 = (
        milliseconds(lambda: product(inputs_8, weight_8, scale)),
        milliseconds(lambda: product(gradients_8, weight_T8, scale)),
        milliseconds(lambda: product(gradients_T8, inputs_T8, scale)),
    )
    by_row = [rows_of(each) for each in (inputs, weight, gradients, weight.T)]
    in_rows = (
        milliseconds(lambda: product_of_rows(*by_row[:2])),
        milliseconds(lambda: product_of_rows(*by_row[2:])),
        in_bf16[2],
    )
    forget()
    cast_rows = torch.compile(rows_of, dynamic=False)
    row_casts = sum(milliseconds(partial(cast_rows, each)) for each in (inputs, weight, gradients, weight.T))
    shown = ((inputs, FORWARD), (weight, FORWARD), (gradients, BACKWARD))

    def casts(cast: Callable[[Tensor, Tensor, torch.dtype], object]) -> float:
        forget()
        compiled = torch.compile(cast, dynamic=False)
        return sum(milliseconds(partial(compiled, each, scale, dtype)) for each, dtype in shown)

    return {
        "layer": linear.name,
        "bf16": sum(in_bf16),
        "fp8 products": sum(in_fp8),
        "casts, scale known": casts(both),
        "casts, scale found": casts(both_by_their_largest),
        "fp8 by row, bf16 weights": sum(in_rows),
        "casts by row": row_casts,
    }


def product(left_8: Tensor, right_8: Tensor, scale: Tensor) -> Tensor:
    """left x right^T, both of which lie in memory along the summed side."""
    return torch._scaled_mm(
        left_8, right_8.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def both(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, and its transpose."""
    narrow = (values.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return narrow, narrow.T.contiguous()


def both_by_their_largest(values: Tensor, _: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same with a scale that the largest value fits."""
    return both(values, LARGEST[dtype] / values.abs().amax().float().clamp(min=1e-12), dtype)


def rows_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 whose rows have a scale each, and what they are to be multiplied by."""
    unit = values.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST[FORWARD]
    return (values.float() / unit).to(FORWARD).contiguous(), unit


def product_of_rows(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """left x right^T, both with a scale for each row."""
    (left_8, left_unit), (right_8, right_unit) = left, right
    scales = {"scale_a": left_unit, "scale_b": right_unit.T}
    return torch._scaled_mm(left_8, right_8.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def show(rows: list[dict[str, Any]]) -> None:
    """The table, in milliseconds."""
    names = list(rows[0])
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        cells = (row[name] if name == "layer" else f"{row[name]:.2f}" for name in names)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
