"""The kernels of `short_attention.py`: one program computes one head of one sequence, in both passes.

Shapes: T packed tokens, H heads, K head width, S sequences, N tokens of one sequence, filler included.

All scores of a head fit into registers, so that the softmax is seen whole: nothing is kept for the backward
pass, which is one kernel without atomics and writes each gradient once. Scores and softmax are fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.triton_dropout import keeps, samples

FORWARD_LAUNCH: dict[str, int] = {"num_warps": 8}
BACKWARD_LAUNCH: dict[str, int] = {"num_warps": 8, "maxnreg": 128}
WIDE_BACKWARD_LAUNCH: dict[str, int] = {"num_warps": 8}
"""With 8 warps a tile of scores takes 64 registers of a thread, with 4 too many. Of 128 registers each, two
programs fit on a multiprocessor, and one waits for memory while the other computes; a few values spill. Of
heads wider than 64 only one fits anyway."""
SMALLEST_TILE = 32
UNALIGNED = ["starts", "seed"]
"""Read one by one, wherever they lie: another address must not ask for another kernel within a recording."""


def forward(
    projected_T3HK: Tensor,
    starts_S1: Tensor,
    seed: Tensor | None,
    *,
    longest: int,
    dropped: int,
    launch: dict[str, int] = FORWARD_LAUNCH,
) -> Tensor:
    """The mix [T, H, K]."""
    tokens, _, heads, width = projected_T3HK.shape
    mixed_THK = projected_T3HK.new_empty(tokens, heads, width)
    short_attention_forward[(starts_S1.shape[0] - 1) * heads,](
        *(projected_T3HK, starts_S1, seed, mixed_THK, width**-0.5),
        HEADS=heads,
        WIDTH=width,
        TILE=_tile(longest),
        DROPPED=dropped,
        **launch,
    )
    return mixed_THK


def backward(
    gradient_THK: Tensor,
    operands: tuple[Tensor, Tensor, Tensor | None],
    *,
    longest: int,
    dropped: int,
    launch: dict[str, int] | None = None,
) -> Tensor:
    """The gradient of the whole projection [T, 3, H, K]."""
    projected_T3HK, starts_S1, seed = operands
    to_projected_T3HK = torch.empty_like(projected_T3HK)
    heads, width = projected_T3HK.shape[2:]
    usual = BACKWARD_LAUNCH if width <= 64 else WIDE_BACKWARD_LAUNCH
    short_attention_backward[(starts_S1.shape[0] - 1) * heads,](
        *(gradient_THK, projected_T3HK, starts_S1, seed, to_projected_T3HK, width**-0.5),
        HEADS=heads,
        WIDTH=width,
        TILE=_tile(longest),
        DROPPED=dropped,
        **(launch or usual),
    )
    return to_projected_T3HK


def _tile(longest: int) -> int:
    return max(SMALLEST_TILE, 1 << (longest - 1).bit_length())


@triton.jit(do_not_specialize=UNALIGNED)
def short_attention_forward(
    projected,
    starts,
    seed,
    mixed,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DROPPED: tl.constexpr,
):
    _, _, length = _head_of_sequence(starts, HEADS)
    # A shorter sequence takes a smaller tile: its scores are a quarter, then a sixteenth.
    if TILE == 128:
        if length > 64:
            _mix(projected, starts, seed, mixed, scale, HEADS, WIDTH, 128, DROPPED)
    if TILE >= 64:
        if (length > 32) & (length <= 64):
            _mix(projected, starts, seed, mixed, scale, HEADS, WIDTH, 64, DROPPED)
    if (length > 0) & (length <= 32):
        _mix(projected, starts, seed, mixed, scale, HEADS, WIDTH, 32, DROPPED)


@triton.jit(do_not_specialize=UNALIGNED)
def short_attention_backward(
    gradient,
    projected,
    starts,
    seed,
    to_projected,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DROPPED: tl.constexpr,
):
    _, _, length = _head_of_sequence(starts, HEADS)
    if TILE == 128:
        if length > 64:
            _differentiate(gradient, projected, starts, seed, to_projected, scale, HEADS, WIDTH, 128, DROPPED)
    if TILE >= 64:
        if (length > 32) & (length <= 64):
            _differentiate(gradient, projected, starts, seed, to_projected, scale, HEADS, WIDTH, 64, DROPPED)
    if (length > 0) & (length <= 32):
        _differentiate(gradient, projected, starts, seed, to_projected, scale, HEADS, WIDTH, 32, DROPPED)


@triton.jit
def _head_of_sequence(starts, HEADS: tl.constexpr):
    """What this program computes: head, first row and length. Heads of a sequence lie side by side."""
    sequence = tl.program_id(0) // HEADS
    start = tl.load(starts + sequence)
    return tl.program_id(0) % HEADS, start, tl.load(starts + sequence + 1) - start


@triton.jit
def _mix(
    projected,
    starts,
    seed,
    mixed,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DROPPED: tl.constexpr,
):
    head, start, length = _head_of_sequence(starts, HEADS)
    real_N1 = (tl.arange(0, TILE) < length)[:, None]
    query_at = projected + _places(start, head, 3 * HEADS, WIDTH, TILE)
    query_NK = tl.load(query_at, mask=real_N1, other=0.0)
    key_NK = tl.load(query_at + HEADS * WIDTH, mask=real_N1, other=0.0)
    value_NK = tl.load(query_at + 2 * HEADS * WIDTH, mask=real_N1, other=0.0)
    if DROPPED > 0:  # computed while the rows are on their way
        samples_NN = _samples(seed, start, head, HEADS, TILE)
    weights_NN, totals_N = _softmax(query_NK, key_NK, scale, length, TILE)
    if DROPPED > 0:
        weights_NN = tl.where(keeps(samples_NN, DROPPED), weights_NN, 0.0)
    # Scaling the mix [N, K] costs less than scaling the weights [N, N].
    scales_N = 65536.0 / (65536 - DROPPED) / totals_N
    mixed_NK = tl.dot(weights_NN.to(value_NK.dtype), value_NK) * scales_N[:, None]
    mixed_at = mixed + _places(start, head, HEADS, WIDTH, TILE)
    tl.store(mixed_at, mixed_NK.to(mixed.dtype.element_ty), mask=real_N1)


@triton.jit
def _differentiate(
    gradient,
    projected,
    starts,
    seed,
    to_projected,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DROPPED: tl.constexpr,
):
    head, start, length = _head_of_sequence(starts, HEADS)
    real_N1 = (tl.arange(0, TILE) < length)[:, None]
    places_NK = _places(start, head, 3 * HEADS, WIDTH, TILE)
    key_offset = HEADS * WIDTH
    query_NK = tl.load(projected + places_NK, mask=real_N1, other=0.0)
    key_NK = tl.load(projected + places_NK + key_offset, mask=real_N1, other=0.0)
    value_NK = tl.load(projected + places_NK + 2 * key_offset, mask=real_N1, other=0.0)
    gradient_at = gradient + _places(start, head, HEADS, WIDTH, TILE)
    gradient_NK = tl.load(gradient_at, mask=real_N1, other=0.0)
    half = query_NK.dtype

    if DROPPED > 0:  # computed while the rows are on their way
        samples_NN = _samples(seed, start, head, HEADS, TILE)
    weights_NN, totals_N = _softmax(query_NK, key_NK, scale, length, TILE)
    probabilities_NN = weights_NN * (1.0 / totals_N)[:, None]
    # Below 0 where dropped: two of [N, N] fit into registers, and a mask beside them does not.
    if DROPPED > 0:
        probabilities_NN = tl.where(keeps(samples_NN, DROPPED), probabilities_NN, -probabilities_NN)
    kept_scale = 65536.0 / (65536 - DROPPED)
    kept_NN = tl.maximum(probabilities_NN, 0.0).to(half)
    to_value_NK = tl.dot(tl.trans(kept_NN), gradient_NK) * kept_scale
    tl.store(to_projected + places_NK + 2 * key_offset, to_value_NK.to(half), mask=real_N1)

    to_kept_NN = tl.dot(gradient_NK, tl.trans(value_NK))
    to_kept_NN = tl.where(probabilities_NN > 0, to_kept_NN, 0.0)
    probabilities_NN = tl.abs(probabilities_NN)
    common_N = tl.sum(probabilities_NN * to_kept_NN, 1)
    to_scores_NN = (probabilities_NN * (to_kept_NN - common_N[:, None])).to(half)
    to_query_NK = tl.dot(to_scores_NN, key_NK) * (scale * kept_scale)
    tl.store(to_projected + places_NK, to_query_NK.to(half), mask=real_N1)
    to_key_NK = tl.dot(tl.trans(to_scores_NN), query_NK) * (scale * kept_scale)
    tl.store(to_projected + places_NK + key_offset, to_key_NK.to(half), mask=real_N1)


@triton.jit
def _places(start, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Where a head's rows of a sequence lie among rows of so many heads [N, K]."""
    first = (start.to(tl.int64) * HEADS + head) * WIDTH
    return first + tl.arange(0, TILE)[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _softmax(query_NK, key_NK, scale, length, TILE: tl.constexpr):
    """What each query gives each key [N, N], at most 1, and the sum of it for each query."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores_NN = tl.dot(query_NK, tl.trans(key_NK))
    scores_NN = tl.where((tl.arange(0, TILE) < length)[None, :], scores_NN, -float("inf"))
    highest_N = tl.max(scores_NN, 1)
    weights_NN = tl.exp2(scores_NN * (scale * LOG2_E) - (highest_N * (scale * LOG2_E))[:, None])
    return weights_NN, tl.sum(weights_NN, 1)


@triton.jit
def _samples(seed, start, head, HEADS: tl.constexpr, TILE: tl.constexpr):
    """A random number for each score [N, N], whatever the tile: 16 counters for each token and head."""
    row_N = (start + tl.arange(0, TILE)) * HEADS + head
    counters = row_N[:, None, None] * 16 + tl.arange(0, TILE // 32)[None, :, None] * 4
    numbers = samples(tl.load(seed), counters + tl.arange(0, 4)[None, None, :])
    # A thread of the tensor cores holds pairs of neighbours 8 columns apart. The numbers of a counter go to
    # such places, so that each thread can make its own.
    return tl.reshape(tl.permute(numbers, (0, 1, 3, 4, 2, 5)), (TILE, TILE))
