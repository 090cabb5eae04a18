"""Our Triton kernels beside what they replace: what the compiler makes, torch's sums, and flash attention.

    python bench/kernel_speed.py --json kernels.json
    python bench/kernel_speed.py --kernels tiled tiled-without-dropout

Each pass of each kernel at the size of a BERT-Base step in bf16 with dropout 0.1, and of rotary attention
without dropout. What counts is the time of its kernels on the GPU, as torch.profiler sees them, without what
Python needs to start them. The compiler has fp32 residuals, as under autocast, and flash attention's backward
pass includes the copy of three gradients into one, and the compiler's turning of queries and keys where
positions are rotary. "ours" is how the kernels are launched today; the rows below it are other ways to launch
them.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from rounds import Results, forget, parser_of
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bertsmith.model.attention import short_triton, tiled_triton
from bertsmith.model.attention.attend import flash_attention
from bertsmith.model.attention.rotary import Rotary
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.kernels import fused_gelu_triton, partial_sums_triton, residual_norm_triton
from bertsmith.model.kernels.elementwise import dropped_values
from bertsmith.objectives import word_losses_triton
from bertsmith.packed import Layout

DROPOUT = 0.1
DROPPED = dropped_values(DROPOUT)
CALLS = 10
NORM_LAUNCHES = {
    "forward": [(1, 8), (1, 32), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16)],
    "backward": [(1, 4), (1, 12), (2, 4), (2, 8), (4, 4), (4, 7), (8, 3)],
}
GELU_LAUNCHES = [(4, 16), (2, 16), (8, 4), (8, 6), (8, 10)]
"""Warps of a program, and programs for each multiprocessor."""
ATTENTION_LAUNCHES: dict[int, list[dict[str, int]]] = {
    32: [{"num_warps": 1}, {"num_warps": 2}, {"num_warps": 4}, {"num_warps": 8, "maxnreg": 128}],
    64: [{"num_warps": 2}, {"num_warps": 4}, {"num_warps": 8, "maxnreg": 128}],
    128: [{"num_warps": 4}, {"num_warps": 8}, {"num_warps": 8, "maxnreg": 112}],
}
"""By the tile of scores."""
WORD_LAUNCHES = {
    "forward": [(512, 1), (1024, 1), (1024, 2), (2048, 2), (2048, 4), (4096, 8)],
    "backward": [(2048, 4), (4096, 4), (8192, 8)],
}
"""Words of a block, and warps."""
SUM_LAUNCHES = [(256, 16, 8), (512, 16, 8), (256, 32, 8), (128, 32, 8), (128, 16, 4), (64, 64, 8)]
"""Rows and columns of a tile, and warps."""
TILED_LAUNCHES = {
    "forward": [(128, 64, 8, 2, 128), (128, 64, 4, 3, None), (64, 64, 4, 3, None), (64, 64, 4, 2, 128)],
    "queries": [(128, 64, 8, 2, None), (128, 64, 8, 3, 128), (64, 64, 4, 2, 128), (64, 64, 4, 3, None)],
    "keys": [
        *((64, 128, 8, 2, None), (32, 128, 8, 3, 128), (32, 128, 4, 3, None), (64, 64, 4, 2, None)),
        *((64, 64, 4, 2, 168), (32, 64, 4, 3, 168), (32, 64, 4, 3, 128)),
    ],
}
"""Queries and keys of a tile, warps, stages, registers at most. Backward, two kernels are launched by what
they have a tile of."""
Contenders = Iterator[tuple[str, dict[str, Callable[[], object]]]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kernels", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # a backward pass is repeated
    results = Results(options.json, "calls")
    for cases in (CASES[name](options) for name in options.kernels):
        for work, contenders in cases:
            rates: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(options.rounds):
                for name, call in contenders.items():
                    rates[name].append(1 / seconds_of(call))
            milliseconds = {name: 1e3 / max(each) for name, each in rates.items()}
            results.add(work, rates, **{"ms at best": milliseconds})


def seconds_of(call: Callable[[], object]) -> float:
    """The time of all kernels that a call starts, after one that may compile."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = [
        each
        for each in watched.events()
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation  # a name over many kernels
    ]
    return sum(each.time_range.elapsed_us() for each in kernels) / 1e6 / CALLS


def norm_cases(options: argparse.Namespace) -> Contenders:
    """Both passes of dropout, residual sum and LayerNorm."""
    shape, half = (options.tokens, options.width), torch.bfloat16
    residual, branch, gradient = (torch.randn(shape, device="cuda", dtype=half) for _ in range(3))
    norm = nn.LayerNorm(options.width, eps=1e-12).cuda()
    seed = torch.randint(2**63 - 1, (), device="cuda")
    operands = (residual, branch, norm.weight.detach(), norm.bias.detach())
    forward = partial(residual_norm_triton.forward, operands, seed, eps=norm.eps, dropped=DROPPED)
    saved = (forward()[1], seed)
    backward = partial(
        residual_norm_triton.backward, gradient, operands[:3], saved, dropped=DROPPED, summed=True
    )

    @torch.compile(dynamic=False)
    def compiled(residual: Tensor, branch: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        # Under autocast a norm is fp32, and the product behind it takes it rounded.
        normed = norm(residual + nn.functional.dropout(branch + bias, DROPOUT))
        return normed, normed.to(half)

    bias = torch.zeros(options.width, device="cuda", dtype=half, requires_grad=True)
    leaves = (residual.float().requires_grad_(), branch.clone().requires_grad_(), bias)
    outputs, upstream = compiled(*leaves), (gradient.float(), gradient)
    theirs = {
        "forward": lambda: compiled(*leaves),
        "backward": lambda: torch.autograd.grad(
            outputs, (*leaves, norm.weight, norm.bias), upstream, retain_graph=True
        ),
    }
    for name, ours in (("forward", forward), ("backward", backward)):
        others = {
            f"{warps} warps, {programs} programs": partial(
                ours, launch={"num_warps": warps}, programs=programs
            )
            for warps, programs in NORM_LAUNCHES[name]
        }
        yield f"norm, {name}", {"ours": ours, "compiler": theirs[name], **others}


def gelu_cases(options: argparse.Namespace) -> Contenders:
    """Both passes of GELU; the compiler's backward pass computes it again, for the product behind it."""
    shape = (options.tokens, 4 * options.width)
    product, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(shape[1], device="cuda")

    @torch.compile(dynamic=False)
    def compiled_backward(gradient: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        to_values = torch.ops.aten.gelu_backward(gradient, values)
        return to_values, nn.functional.gelu(values), to_values.sum(0)

    compiled = torch.compile(nn.functional.gelu, dynamic=False)
    theirs = {
        "forward": partial(compiled, product),  # the product before it adds the bias
        "backward": partial(compiled_backward, gradient, product),
    }
    ours = {
        "forward": partial(fused_gelu_triton.biased_forward, product, bias),
        "backward": partial(fused_gelu_triton.biased_backward, gradient, product, bias),
    }
    yield from beside_launches("bias and GELU", ours, theirs)


def gated_cases(options: argparse.Namespace) -> Contenders:
    """Both passes of GELU with a gate; the compiler's computes both again for the product behind it."""
    width = 8 * options.width // 3
    halves = torch.randn(options.tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(options.tokens, width, device="cuda", dtype=torch.bfloat16)

    @torch.compile(dynamic=False)
    def compiled(halves: Tensor) -> Tensor:
        inner, gate = halves.chunk(2, dim=-1)
        return nn.functional.gelu(inner) * gate

    @torch.compile(dynamic=False)
    def compiled_backward(gradient: Tensor, halves: Tensor) -> tuple[Tensor, ...]:
        inner, gate = halves.chunk(2, dim=-1)
        activated = nn.functional.gelu(inner)
        to_inner = torch.ops.aten.gelu_backward(gradient * gate, inner)
        return torch.cat((to_inner, gradient * activated), -1), activated * gate

    theirs = {"forward": partial(compiled, halves), "backward": partial(compiled_backward, gradient, halves)}
    ours = {
        "forward": partial(fused_gelu_triton.gated_forward, halves),
        "backward": partial(fused_gelu_triton.gated_backward, gradient, halves),
    }
    yield from beside_launches("GELU with a gate", ours, theirs)


def beside_launches(
    name: str, ours: Mapping[str, partial[Any]], theirs: Mapping[str, partial[Any]]
) -> Contenders:
    """Both passes of a GELU beside other launches of it and the compiler's."""
    for each in ours:
        others = {
            f"{warps} warps, {programs} programs": partial(
                ours[each], launch={"num_warps": warps}, programs=programs
            )
            for warps, programs in GELU_LAUNCHES
        }
        yield f"{name}, {each}", {"ours": ours[each], "compiler": theirs[each], **others}


def attention_cases(options: argparse.Namespace, dropout: float, rotary: Rotary | None = None) -> Contenders:
    """Both passes of attention by each tile, over sequences that are all full and over a mix."""
    cases = [
        (longest, *case)
        for longest in ATTENTION_LAUNCHES
        for case in full_and_mixed(options.tokens, longest).items()
    ]
    for longest, work, lengths in cases:
        forget()
        starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        positions = torch.cat([torch.arange(length) for length in lengths]).cuda()
        layout, rule = Layout(starts, longest), AttentionRule(dropout=dropout)
        shape = (sum(lengths), 3, options.heads, options.width // options.heads)
        projected = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        gradient = torch.randn_like(projected[:, 0])
        turns = (None, None) if rotary is None else rotary.turns(positions, projected)
        seed = torch.randint(2**63 - 1, (), device="cuda") if dropout else None
        operands = (projected, turns, starts, seed)
        arguments = {"longest": longest, "dropped": dropped_values(dropout)}
        forward = partial(short_triton.forward, operands, **arguments)
        backward = partial(short_triton.backward, gradient, operands, **arguments)
        flash = partial(flash_within, layout, rule, rotary, positions)
        leaf = projected.clone().requires_grad_()
        theirs = {
            "forward": partial(flash, projected),
            "backward": partial(torch.autograd.grad, flash(leaf), leaf, gradient, retain_graph=True),
        }
        kind = "attention" if rotary is None else "rotary attention"
        for name, ours in (("forward", forward), ("backward", backward)):
            others = {str(launch): partial(ours, launch=launch) for launch in ATTENTION_LAUNCHES[longest]}
            if name == "backward" and rotary is None:
                others["with the sum of the bias"] = partial(ours, summed=True)
            yield f"{kind}, {work}, {name}", {"ours": ours, "flash": theirs[name], **others}


def word_cases(options: argparse.Namespace) -> Contenders:
    """Both passes of the losses of words, 15 % of the tokens."""
    rows, words = int(0.15 * options.tokens), 30_528
    scores = torch.randn(rows, words, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(words, (rows,), device="cuda")
    upstream = torch.rand(rows, device="cuda")

    @torch.compile(dynamic=False)
    def compiled(scores: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.float()
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        return losses, scores.detach().argmax(-1) == labels

    leaf = scores.clone().requires_grad_()
    losses, _ = compiled(leaf)
    theirs = {
        "forward": lambda: compiled(leaf),
        "backward": lambda: torch.autograd.grad(losses, leaf, upstream, retain_graph=True),
    }
    normalisers = word_losses_triton.forward(scores, labels)[2]
    ours = {
        "forward": partial(word_losses_triton.forward, scores, labels),
        "backward": partial(word_losses_triton.backward, upstream, scores, labels, normalisers),
    }
    for name, call in ours.items():
        others = {
            f"blocks of {block:,}, {warps} warps": partial(call, launch={"BLOCK": block, "num_warps": warps})
            for block, warps in WORD_LAUNCHES[name]
        }
        yield f"losses of words, {name}", {"ours": call, "compiler": theirs[name], **others}


def sum_cases(options: argparse.Namespace) -> Contenders:
    """What programs of a norm, of a GELU and of attention leave of a sum, added up."""
    width = options.width
    for work, shape in {
        "norm": (2, 12 * 132, width),
        "bias and GELU": (1, 132, 4 * width),
        "attention": (1, options.tokens // 128, 3 * width),
    }.items():
        partial_sums = torch.randn(shape, device="cuda")
        others = {
            f"{rows} x {columns}, {warps} warps": partial(
                partial_sums_triton.total,
                partial_sums,
                launch={"ROWS": rows, "COLUMNS": columns, "num_warps": warps},
            )
            for rows, columns, warps in SUM_LAUNCHES
        }
        ours, theirs = partial(partial_sums_triton.total, partial_sums), partial(torch.sum, partial_sums, 1)
        yield f"sums of programs, {work}", {"ours": ours, "torch": theirs, **others}


def full_and_mixed(tokens: int, longest: int) -> dict[str, list[int]]:
    """Lengths that are all the longest, any up to it, and such that are shorter on average."""
    rng = random.Random(1)
    mix: list[int] = []
    while sum(mix) < tokens:
        mix.append(rng.randint(1, longest))
    short = [min(rng.randint(1, longest), rng.randint(1, longest)) for _ in range(3 * tokens // longest)]
    return {
        f"{longest} tokens": [longest] * (tokens // longest),
        f"1 to {longest} tokens": mix,
        f"1 to {longest} tokens, most short": short,
    }


def tiled_cases(options: argparse.Namespace, dropout: float) -> Contenders:
    """Both passes of attention over longer sequences, in tiles."""
    for work, lengths in full_and_mixed(options.tokens, 512).items():
        forget()
        starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        shape = (sum(lengths), 3, options.heads, options.width // options.heads)
        projected = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        gradient = torch.randn_like(projected[:, 0])
        operands = (projected, starts, torch.randint(2**63 - 1, (), device="cuda") if dropout else None)
        arguments = {"longest": 512, "dropped": dropped_values(dropout)}
        forward = partial(tiled_triton.forward, operands, **arguments)
        backward = partial(tiled_triton.backward, gradient, operands, forward(), **arguments)
        ours = {"forward": forward, "backward": partial(backward, summed=True)}
        layout, rule = Layout(starts, 512), AttentionRule(dropout=dropout)
        flash = partial(flash_within, layout, rule, None, starts)
        leaf = projected.clone().requires_grad_()
        theirs = {
            "forward": partial(flash, projected),
            "backward": partial(torch.autograd.grad, flash(leaf), leaf, gradient, retain_graph=True),
        }
        usual = tiled_triton.BACKWARD_LAUNCHES
        others = {
            "forward": {told: partial(forward, launch=launch) for told, launch in tiled_launches("forward")},
            "backward": {
                f"{each}: {told}": partial(ours["backward"], launches={**usual, each: launch})
                for each in usual
                for told, launch in tiled_launches(each)
            },
        }
        for name, call in ours.items():
            sides = {"ours": call, "flash": theirs[name], **others[name]}
            yield f"attention in tiles, {work}, dropout {dropout:g}, {name}", sides


def tiled_launches(name: str) -> Iterator[tuple[str, dict[str, int]]]:
    for queries, keys, warps, stages, registers in TILED_LAUNCHES[name]:
        told = f"{queries} x {keys}, {warps} warps, {stages} stages"
        launch = {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}
        if registers is not None:
            told, launch = f"{told}, {registers} registers", {**launch, "maxnreg": registers}
        yield told, launch


CASES: dict[str, Callable[[argparse.Namespace], Contenders]] = {
    "norm": norm_cases,
    "gelu": gelu_cases,
    "gated": gated_cases,
    "sums": sum_cases,
    "words": word_cases,
    "attention": lambda options: attention_cases(options, DROPOUT),
    "rotary": lambda options: attention_cases(options, 0.0, Rotary(10_000.0)),
    "tiled": lambda options: tiled_cases(options, DROPOUT),
    "tiled-without-dropout": lambda options: tiled_cases(options, 0.0),
}


@torch.compile(dynamic=False)
def flash_within(
    layout: Layout, rule: AttentionRule, rotary: Rotary | None, positions: Tensor, projected: Tensor
) -> Tensor:
    """Flash attention and what stands around it in a compiled step."""
    query, key, value = projected.unbind(1)
    if rotary is not None:
        query, key = rotary(query, key, positions)
    return flash_attention(query, key, value, layout, rule)


if __name__ == "__main__":
    main()
