"""The kernels of `tiled_attention.py`: scores are seen tile by tile, as flash attention sees them.

Shapes: T packed tokens, H heads, K head width, S sequences, M queries and N keys of one tile.

Forward, one program mixes a tile of a sequence's queries for one head. Backward, one program has all of a
head of a sequence: for each tile of keys it passes over all queries, and what they get from the tiles before
waits in memory, in fp32. So no two programs write to the same place, and sums come out the same each time.
Scores and softmax are fp32; of a softmax its normaliser is kept, as a power of 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.short_attention_triton import (
    UNALIGNED,
    Gradients,
    differentiate_into,
    head_of_sequence,
    mix_into,
    store_sum,
)
from bertsmith.model.triton_dropout import keeps, score_samples
from bertsmith.packed import SHORT_LENGTH

FORWARD_LAUNCH: dict[str, int] = {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
BACKWARD_LAUNCH: dict[str, int] = {"QUERIES": 128, "KEYS": 128, "num_warps": 8, "num_stages": 1}
"""Forward two programs fit on a multiprocessor. Backward one does: with tiles of half as many keys two would,
but what waits in memory would go there twice as often."""
COUNTERS = tl.constexpr(64)
"""Of dropout for each token and head: 8 keys each, up to 512 of them."""
WHOLE = tl.constexpr(SHORT_LENGTH)
"""Shorter sequences among longer ones are left to the kernels of `short_attention_triton.py`."""

Operands = tuple[Tensor, Tensor, Tensor | None]
"""Projection [T, 3, H, K], starts of sequences [S1], seed of dropout."""


def forward(
    operands: Operands, *, longest: int, dropped: int, launch: dict[str, int] = FORWARD_LAUNCH
) -> tuple[Tensor, Tensor]:
    """The mix [T, H, K], and for the backward pass the normalisers [T, H]."""
    projected_T3HK, starts_S1, seed = operands
    assert longest <= 8 * COUNTERS.value, "dropout masks of neighbours would be the same"
    tokens, _, heads, width = projected_T3HK.shape
    mixed_THK = projected_T3HK.new_empty(tokens, heads, width)
    normalisers_TH = projected_T3HK.new_empty((tokens, heads), dtype=torch.float32)
    tiles = triton.cdiv(longest, launch["QUERIES"])
    short = (projected_T3HK, (None, None), starts_S1, seed)
    mix_into(mixed_THK, short, longest=WHOLE.value, dropped=dropped, counters=COUNTERS.value)
    with torch.cuda.device_of(projected_T3HK):
        tiled_attention_forward[(starts_S1.shape[0] - 1) * heads * tiles,](
            *(projected_T3HK, starts_S1, seed, mixed_THK, normalisers_TH, width**-0.5),
            tiles,
            HEADS=heads,
            WIDTH=width,
            DROPPED=dropped,
            **launch,
        )
    return mixed_THK, normalisers_TH


def backward(
    gradient_THK: Tensor,
    operands: Operands,
    saved: tuple[Tensor, Tensor],
    *,
    dropped: int,
    summed: bool = False,
    launch: dict[str, int] = BACKWARD_LAUNCH,
) -> tuple[Tensor, Tensor]:
    """The gradient of the whole projection [T, 3, H, K], and its sum over all rows, where asked for."""
    projected_T3HK, starts_S1, seed = operands
    tokens, _, heads, width = projected_T3HK.shape
    sequences, slot = starts_S1.shape[0] - 1, min(launch["QUERIES"], launch["KEYS"])
    gradients = Gradients(projected_T3HK, sequences, summed=summed, slot=slot)
    short = (projected_T3HK, (None, None), starts_S1, seed)
    differentiate_into(
        gradients, gradient_THK, short, longest=WHOLE.value, dropped=dropped, counters=COUNTERS.value
    )
    # What waits in memory: gradients of queries, and what the gradients of a query's scores have in common.
    to_query_THK = projected_T3HK.new_empty((tokens, heads, width), dtype=torch.float32)
    common_TH = projected_T3HK.new_empty((tokens, heads), dtype=torch.float32)
    with torch.cuda.device_of(projected_T3HK):
        tiled_attention_backward[sequences * heads,](
            *(gradient_THK, projected_T3HK, *saved, starts_S1, seed),
            *(gradients.to_projected_T3HK, to_query_THK, common_TH, gradients.sums_S3HK, width**-0.5),
            HEADS=heads,
            WIDTH=width,
            SLOT=slot,
            DROPPED=dropped,
            **launch,
        )
    return gradients.to_projected_T3HK, gradients.sums_3HK()


@triton.jit(do_not_specialize=UNALIGNED)
def tiled_attention_forward(
    projected,
    starts,
    seed,
    mixed,
    normalisers,
    scale,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPPED: tl.constexpr,
):
    # Tiles that read the same keys lie side by side.
    program, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * QUERIES
    head, start, length = head_of_sequence(program, starts, HEADS)
    if (length > WHOLE) & (first < length):
        query_M = first + tl.arange(0, QUERIES)
        real_M1 = (query_M < length)[:, None]
        queries = projected + _first(start, head, 3 * HEADS, WIDTH)
        query_MK = tl.load(queries + _offsets(query_M, 3 * HEADS, WIDTH), mask=real_M1, other=0.0)
        highest_M = tl.full([QUERIES], -float("inf"), tl.float32)
        totals_M = tl.zeros([QUERIES], tl.float32)
        mixed_MK = tl.zeros([QUERIES, WIDTH], tl.float32)
        for first_key in range(0, length, KEYS):
            key_N = first_key + tl.arange(0, KEYS)
            real_N1 = (key_N < length)[:, None]
            offsets_NK = _offsets(key_N, 3 * HEADS, WIDTH)
            key_NK = tl.load(queries + HEADS * WIDTH + offsets_NK, mask=real_N1, other=0.0)
            value_NK = tl.load(queries + 2 * HEADS * WIDTH + offsets_NK, mask=real_N1, other=0.0)
            scores_MN = _scores(query_MK, key_NK, scale, key_N < length)
            higher_M = tl.maximum(highest_M, tl.max(scores_MN, 1))
            shrink_M = tl.exp2(highest_M - higher_M)
            weights_MN = tl.exp2(scores_MN - higher_M[:, None])
            totals_M = totals_M * shrink_M + tl.sum(weights_MN, 1)
            if DROPPED > 0:
                row_M = (start + query_M) * HEADS + head
                samples_MN = score_samples(tl.load(seed), row_M, first_key, COUNTERS, QUERIES, KEYS)
                weights_MN = tl.where(keeps(samples_MN, DROPPED), weights_MN, 0.0)
            mixed_MK = tl.dot(weights_MN.to(value_NK.dtype), value_NK, mixed_MK * shrink_M[:, None])
            highest_M = higher_M
        mixed_MK *= (65536.0 / (65536 - DROPPED) / totals_M)[:, None]
        mixed_at = mixed + _first(start, head, HEADS, WIDTH) + _offsets(query_M, HEADS, WIDTH)
        tl.store(mixed_at, mixed_MK.to(mixed.dtype.element_ty), mask=real_M1)
        at_M = (start + query_M) * HEADS + head
        tl.store(normalisers + at_M, highest_M + tl.log2(totals_M), mask=query_M < length)


@triton.jit(do_not_specialize=UNALIGNED)
def tiled_attention_backward(
    gradient,
    projected,
    mixed,
    normalisers,
    starts,
    seed,
    to_projected,
    to_query,
    common,
    sums,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SLOT: tl.constexpr,
    DROPPED: tl.constexpr,
):
    head, start, length = head_of_sequence(tl.program_id(0), starts, HEADS)
    half = gradient.dtype.element_ty
    kept_scale = 65536.0 / (65536 - DROPPED)
    length = tl.where(length > WHOLE, length, 0)  # so that no tile of a shorter one is computed
    # From here on, all of them begin with the first row of this head.
    projected += _first(start, head, 3 * HEADS, WIDTH)
    to_projected += _first(start, head, 3 * HEADS, WIDTH)
    gradient += _first(start, head, HEADS, WIDTH)
    mixed += _first(start, head, HEADS, WIDTH)
    to_query += _first(start, head, HEADS, WIDTH)
    common += start * HEADS + head
    normalisers += start * HEADS + head

    _keep_commons(gradient, mixed, common, length, HEADS, WIDTH, QUERIES)
    tl.debug_barrier()  # threads read what others wrote
    for first_key in range(0, length, KEYS):
        key_N = first_key + tl.arange(0, KEYS)
        real_N1 = (key_N < length)[:, None]
        key_at_NK = HEADS * WIDTH + _offsets(key_N, 3 * HEADS, WIDTH)
        key_NK = tl.load(projected + key_at_NK, mask=real_N1, other=0.0)
        value_NK = tl.load(projected + HEADS * WIDTH + key_at_NK, mask=real_N1, other=0.0)
        to_key_NK = tl.zeros([KEYS, WIDTH], tl.float32)
        to_value_NK = tl.zeros([KEYS, WIDTH], tl.float32)
        for first in range(0, length, QUERIES):
            query_M = first + tl.arange(0, QUERIES)
            real_M1 = (query_M < length)[:, None]
            query_at_MK, mixed_at_MK = _offsets(query_M, 3 * HEADS, WIDTH), _offsets(query_M, HEADS, WIDTH)
            query_MK = tl.load(projected + query_at_MK, mask=real_M1, other=0.0)
            gradient_MK = tl.load(gradient + mixed_at_MK, mask=real_M1, other=0.0)
            # Of a row behind the last the gradient is 0, and all that comes of it.
            normaliser_M = tl.load(normalisers + query_M * HEADS, mask=query_M < length, other=0.0)
            common_M = tl.load(common + query_M * HEADS, mask=query_M < length, other=0.0)

            scores_MN = _scores(query_MK, key_NK, scale, key_N < length)
            probabilities_MN = tl.exp2(scores_MN - normaliser_M[:, None])
            # Below 0 where dropped: there is no room in registers for a mask.
            if DROPPED > 0:
                row_M = (start + query_M) * HEADS + head
                samples_MN = score_samples(tl.load(seed), row_M, first_key, COUNTERS, QUERIES, KEYS)
                keeps_MN = keeps(samples_MN, DROPPED)
                probabilities_MN = tl.where(keeps_MN, probabilities_MN, -probabilities_MN)
            kept_MN = tl.maximum(probabilities_MN, 0.0).to(half)
            to_value_NK = tl.dot(tl.trans(kept_MN), gradient_MK, to_value_NK)
            to_kept_MN = tl.dot(gradient_MK, tl.trans(value_NK)) * kept_scale
            to_kept_MN = tl.where(probabilities_MN > 0, to_kept_MN, 0.0)
            to_scores_MN = (tl.abs(probabilities_MN) * (to_kept_MN - common_M[:, None])).to(half)
            to_key_NK = tl.dot(tl.trans(to_scores_MN), query_MK, to_key_NK)
            to_query_MK = tl.dot(to_scores_MN, key_NK) * scale

            waiting_at = to_query + mixed_at_MK
            if first_key > 0:
                to_query_MK += tl.load(waiting_at, mask=real_M1, other=0.0)
            if first_key + KEYS < length:
                tl.store(waiting_at, to_query_MK, mask=real_M1)
            else:
                tl.store(to_projected + query_at_MK, to_query_MK.to(half), mask=real_M1)
                store_sum(sums, to_query_MK, start, first, 0, HEADS, WIDTH, SLOT)
        to_key_NK *= scale
        to_value_NK *= kept_scale
        tl.store(to_projected + key_at_NK, to_key_NK.to(half), mask=real_N1)
        tl.store(to_projected + HEADS * WIDTH + key_at_NK, to_value_NK.to(half), mask=real_N1)
        store_sum(sums, to_key_NK, start, first_key, 1, HEADS, WIDTH, SLOT)
        store_sum(sums, to_value_NK, start, first_key, 2, HEADS, WIDTH, SLOT)
        tl.debug_barrier()  # threads read what others wrote


@triton.jit
def _scores(query_MK, key_NK, scale, real_N):
    """Powers of 2 whose quotients are the softmax; a key behind the last has none."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores_MN = tl.dot(query_MK, tl.trans(key_NK)) * (scale * LOG2_E)
    return tl.where(real_N[None, :], scores_MN, -float("inf"))


@triton.jit
def _keep_commons(
    gradient,
    mixed,
    common,
    length,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Store what the gradients of a query's scores have in common, the product of its mix and gradient."""
    for first in range(0, length, QUERIES):
        query_M = first + tl.arange(0, QUERIES)
        at_MK = _offsets(query_M, HEADS, WIDTH)
        real_M1 = (query_M < length)[:, None]
        gradient_MK = tl.load(gradient + at_MK, mask=real_M1, other=0.0).to(tl.float32)
        mixed_MK = tl.load(mixed + at_MK, mask=real_M1, other=0.0).to(tl.float32)
        tl.store(common + query_M * HEADS, tl.sum(gradient_MK * mixed_MK, 1), mask=query_M < length)


@triton.jit
def _first(start, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where a sequence begins for a head, among rows of so many heads."""
    return (start.to(tl.int64) * HEADS + head) * WIDTH


@triton.jit
def _offsets(row, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where rows lie from there on, with all features: 32 bits of a register in place of 64."""
    return row[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
