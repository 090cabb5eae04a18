"""The kernels of `tiled.py`: scores are processed tile by tile, as in flash attention.

Shapes: T packed tokens, H heads, K head width, S sequences, M queries and N keys of one tile, W words of 32
bits, one for each key.

One program has a tile of a sequence's queries for one head and passes over the keys; in the backward pass
another kernel has a tile of keys and passes over the queries. So scores are computed twice there, but no two
programs write to the same place, nothing waits in memory, and sums are the same each time. Scores and softmax
are fp32. Kept for the backward pass are the normaliser of each softmax, as a power of 2, and one bit for each
score, the dropout mask: random numbers twice more would take a third of the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.attention.short_triton import (
    LOG2_E,
    UNALIGNED,
    Gradients,
    Tile,
    differentiate_into,
    head_of_sequence,
    mix_into,
    slot_of,
    store_sum,
)
from bertsmith.model.attention.tiled import MAX_LENGTH, words_of
from bertsmith.model.kernels.triton_dropout import kept_words
from bertsmith.packed import SHORT_LENGTH

FORWARD_LAUNCH: dict[str, int] = {
    "QUERIES": 64,
    "KEYS": 64,
    "num_warps": 4,
    "num_stages": 2,
    "maxnreg": 128,
}
BACKWARD_LAUNCHES: dict[str, dict[str, int]] = {
    "queries": {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    "keys": {"QUERIES": 32, "KEYS": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 128},
}
"""Launch options by the kind of a program's tile.

Three or four programs fit on a multiprocessor, and while some wait others compute.
"""
COUNTERS = tl.constexpr(MAX_LENGTH // 16)
"""Random counters for each token and head: 16 keys each, up to 512 keys."""
WORDS = tl.constexpr(words_of(1))
"""Words of bits for each token and head: 32 keys each, up to 512 keys."""
WHOLE, SHORT = tl.constexpr(SHORT_LENGTH), Tile(0, SHORT_LENGTH)
"""Shorter sequences among longer ones are left to the kernels of `short_triton.py`."""

Operands = tuple[Tensor, Tensor, Tensor | None]
"""Projection [T, 3, H, K], starts of sequences [S1], seed of dropout."""
Saved = tuple[Tensor, Tensor, Tensor]
"""The mix [T, H, K], normalisers [T, H], and bits of what dropout keeps [T, H, W], none without dropout."""


def forward(
    operands: Operands, *, longest: int, dropped: int, launch: dict[str, int] = FORWARD_LAUNCH
) -> Saved:
    """Return the mix, and the values that the backward pass needs."""
    projected_T3HK, starts_S1, seed = operands
    assert longest <= MAX_LENGTH, "dropout masks of neighbours would be the same"
    tokens, _, heads, width = projected_T3HK.shape
    mixed_THK = projected_T3HK.new_empty(tokens, heads, width)
    normalisers_TH = projected_T3HK.new_empty((tokens, heads), dtype=torch.float32)
    kept_THW = projected_T3HK.new_empty((tokens, heads, words_of(dropped)), dtype=torch.int32)
    tiles = triton.cdiv(longest, launch["QUERIES"])
    short = (projected_T3HK, (None, None), starts_S1, seed)
    mix_into(mixed_THK, short, tile=SHORT, dropped=dropped, counters=COUNTERS.value)
    with torch.cuda.device_of(projected_T3HK):
        tiled_attention_forward[(starts_S1.shape[0] - 1) * heads * tiles,](
            *(projected_T3HK, starts_S1, seed, mixed_THK, normalisers_TH, kept_THW, width**-0.5),
            tiles,
            HEADS=heads,
            WIDTH=width,
            DROPPED=dropped,
            **launch,
        )
    return mixed_THK, normalisers_TH, kept_THW


def backward(
    gradient_THK: Tensor,
    operands: Operands,
    saved: Saved,
    *,
    longest: int,
    dropped: int,
    summed: bool = False,
    launches: dict[str, dict[str, int]] = BACKWARD_LAUNCHES,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the whole projection [T, 3, H, K], and its sum over all rows, if requested."""
    projected_T3HK, starts_S1, seed = operands
    tokens, _, heads, width = projected_T3HK.shape
    sequences, rows = starts_S1.shape[0] - 1, {each: launches[each][each.upper()] for each in launches}
    gradients = Gradients(projected_T3HK, sequences, summed=summed, slot=min(rows.values()))
    short = (projected_T3HK, (None, None), starts_S1, seed)
    differentiate_into(gradients, gradient_THK, short, tile=SHORT, dropped=dropped, counters=COUNTERS.value)
    # The common part of the gradients of a query's scores: the first kernel stores it for the second.
    common_TH = projected_T3HK.new_empty((tokens, heads), dtype=torch.float32)
    kernels = {"queries": (tiled_attention_to_queries, saved), "keys": (tiled_attention_to_keys, saved[1:])}
    with torch.cuda.device_of(projected_T3HK):
        for each, (kernel, read) in kernels.items():
            tiles = triton.cdiv(longest, rows[each])
            kernel[sequences * heads * tiles,](
                *(gradient_THK, projected_T3HK, *read, starts_S1),
                *(gradients.to_projected_T3HK, common_TH, gradients.sums_S3HK, width**-0.5, tiles),
                HEADS=heads,
                WIDTH=width,
                SLOT=gradients.slot,
                DROPPED=dropped,
                **launches[each],
            )
    return gradients.to_projected_T3HK, gradients.sums_3HK()


@triton.jit(do_not_specialize=UNALIGNED)
def tiled_attention_forward(
    projected,
    starts,
    seed,
    mixed,
    normalisers,
    kept,
    scale,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPPED: tl.constexpr,
):
    # Tiles that read the same keys are side by side.
    program, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * QUERIES
    head, start, length = head_of_sequence(program, starts, HEADS)
    if (length > WHOLE) & (first < length):
        query_M = first + tl.arange(0, QUERIES)
        real_M1 = (query_M < length)[:, None]
        row_M = (start + query_M) * HEADS + head
        queries = projected + _first(start, head, 3 * HEADS, WIDTH)
        query_MK = tl.load(queries + _offsets(query_M, 3 * HEADS, WIDTH), mask=real_M1, other=0.0)
        highest_M = tl.full([QUERIES], -float("inf"), tl.float32)
        totals_M = tl.zeros([QUERIES], tl.float32)
        mixed_MK = tl.zeros([QUERIES, WIDTH], tl.float32)
        if DROPPED > 0:
            drawn_from = tl.load(seed)
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
                words_MW = kept_words(drawn_from, row_M, first_key, DROPPED, COUNTERS, KEYS)
                tl.store(kept + _words(row_M[:, None], first_key, KEYS), words_MW, mask=real_M1)
                weights_MN = tl.where(_keeps(words_MW, QUERIES, KEYS), weights_MN, 0.0)
            mixed_MK = tl.dot(weights_MN.to(value_NK.dtype), value_NK, mixed_MK * shrink_M[:, None])
            highest_M = higher_M
        mixed_MK *= (65536.0 / (65536 - DROPPED) / totals_M)[:, None]
        mixed_at = mixed + _first(start, head, HEADS, WIDTH) + _offsets(query_M, HEADS, WIDTH)
        tl.store(mixed_at, mixed_MK.to(mixed.dtype.element_ty), mask=real_M1)
        tl.store(normalisers + row_M, highest_M + tl.log2(totals_M), mask=query_M < length)


@triton.jit(do_not_specialize=UNALIGNED)
def tiled_attention_to_queries(
    gradient,
    projected,
    mixed,
    normalisers,
    kept,
    starts,
    to_projected,
    common,
    sums,
    scale,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SLOT: tl.constexpr,
    DROPPED: tl.constexpr,
):
    program, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * QUERIES
    head, start, length = head_of_sequence(program, starts, HEADS)
    if (length > WHOLE) & (first < length):
        half = gradient.dtype.element_ty
        kept_scale = 65536.0 / (65536 - DROPPED)
        query_M = first + tl.arange(0, QUERIES)
        real_M1 = (query_M < length)[:, None]
        row_M = (start + query_M) * HEADS + head
        start_of_head = _first(start, head, 3 * HEADS, WIDTH)
        query_at_MK = start_of_head + _offsets(query_M, 3 * HEADS, WIDTH)
        keys = projected + start_of_head + HEADS * WIDTH
        mixed_at_MK = _first(start, head, HEADS, WIDTH) + _offsets(query_M, HEADS, WIDTH)
        query_MK = tl.load(projected + query_at_MK, mask=real_M1, other=0.0)
        gradient_MK = tl.load(gradient + mixed_at_MK, mask=real_M1, other=0.0)
        mixed_MK = tl.load(mixed + mixed_at_MK, mask=real_M1, other=0.0)
        normaliser_M = tl.load(normalisers + row_M, mask=query_M < length, other=0.0)
        common_M = tl.sum(gradient_MK.to(tl.float32) * mixed_MK.to(tl.float32), 1)
        tl.store(common + row_M, common_M, mask=query_M < length)
        to_query_MK = tl.zeros([QUERIES, WIDTH], tl.float32)
        for first_key in range(0, length, KEYS):
            key_N = first_key + tl.arange(0, KEYS)
            real_N1 = (key_N < length)[:, None]
            offsets_NK = _offsets(key_N, 3 * HEADS, WIDTH)
            key_NK = tl.load(keys + offsets_NK, mask=real_N1, other=0.0)
            value_NK = tl.load(keys + HEADS * WIDTH + offsets_NK, mask=real_N1, other=0.0)
            scores_MN = _scores(query_MK, key_NK, scale, key_N < length)
            probabilities_MN = tl.exp2(scores_MN - normaliser_M[:, None])
            to_kept_MN = tl.dot(gradient_MK, tl.trans(value_NK)) * kept_scale
            if DROPPED > 0:
                words_MW = tl.load(kept + _words(row_M[:, None], first_key, KEYS), mask=real_M1, other=0)
                to_kept_MN = tl.where(_keeps(words_MW, QUERIES, KEYS), to_kept_MN, 0.0)
            to_scores_MN = (probabilities_MN * (to_kept_MN - common_M[:, None])).to(half)
            to_query_MK = tl.dot(to_scores_MN, key_NK, to_query_MK)
        to_query_MK *= scale
        tl.store(to_projected + query_at_MK, to_query_MK.to(half), mask=real_M1)
        store_sum(sums, to_query_MK, slot_of(program, start, first, HEADS, SLOT), head, 0, HEADS, WIDTH)


@triton.jit(do_not_specialize=UNALIGNED)
def tiled_attention_to_keys(
    gradient,
    projected,
    normalisers,
    kept,
    starts,
    to_projected,
    common,
    sums,
    scale,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SLOT: tl.constexpr,
    DROPPED: tl.constexpr,
):
    program, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * KEYS
    head, start, length = head_of_sequence(program, starts, HEADS)
    if (length > WHOLE) & (first < length):
        half = gradient.dtype.element_ty
        kept_scale = 65536.0 / (65536 - DROPPED)
        key_N = first + tl.arange(0, KEYS)
        real_N1 = (key_N < length)[:, None]
        start_of_head = _first(start, head, 3 * HEADS, WIDTH)
        key_at_NK = start_of_head + HEADS * WIDTH + _offsets(key_N, 3 * HEADS, WIDTH)
        key_NK = tl.load(projected + key_at_NK, mask=real_N1, other=0.0)
        value_NK = tl.load(projected + HEADS * WIDTH + key_at_NK, mask=real_N1, other=0.0)
        queries, gradients = projected + start_of_head, gradient + _first(start, head, HEADS, WIDTH)
        to_key_NK = tl.zeros([KEYS, WIDTH], tl.float32)
        to_value_NK = tl.zeros([KEYS, WIDTH], tl.float32)
        for first_query in range(0, length, QUERIES):
            query_M = first_query + tl.arange(0, QUERIES)
            real_M1 = (query_M < length)[:, None]
            row_M = (start + query_M) * HEADS + head
            query_MK = tl.load(queries + _offsets(query_M, 3 * HEADS, WIDTH), mask=real_M1, other=0.0)
            gradient_MK = tl.load(gradients + _offsets(query_M, HEADS, WIDTH), mask=real_M1, other=0.0)
            # The gradient of a row after the last is 0, and so is everything computed from it.
            normaliser_M = tl.load(normalisers + row_M, mask=query_M < length, other=0.0)
            common_M = tl.load(common + row_M, mask=query_M < length, other=0.0)
            # Keys first: so intermediate values of scores stay in registers for the following products.
            scores_NM = tl.dot(key_NK, tl.trans(query_MK)) * (scale * LOG2_E)
            probabilities_NM = tl.exp2(scores_NM - normaliser_M[None, :])
            to_kept_NM = tl.dot(value_NK, tl.trans(gradient_MK)) * kept_scale
            kept_NM = probabilities_NM
            if DROPPED > 0:
                words_WM = tl.load(
                    kept + tl.trans(_words(row_M[:, None], first, KEYS)),
                    mask=(query_M < length)[None, :],
                    other=0,
                )
                bits_W32M = words_WM[:, None, :] >> tl.arange(0, 32)[None, :, None]
                keeps_NM = (tl.reshape(bits_W32M, (KEYS, QUERIES)) & 1) != 0
                kept_NM = tl.where(keeps_NM, probabilities_NM, 0.0)
                to_kept_NM = tl.where(keeps_NM, to_kept_NM, 0.0)
            to_value_NK = tl.dot(kept_NM.to(half), gradient_MK, to_value_NK)
            to_scores_NM = (probabilities_NM * (to_kept_NM - common_M[None, :])).to(half)
            to_key_NK = tl.dot(to_scores_NM, query_MK, to_key_NK)
        # A key after the last had a score, too.
        to_key_NK = tl.where(real_N1, to_key_NK * scale, 0.0)
        to_value_NK = tl.where(real_N1, to_value_NK * kept_scale, 0.0)
        tl.store(to_projected + key_at_NK, to_key_NK.to(half), mask=real_N1)
        tl.store(to_projected + HEADS * WIDTH + key_at_NK, to_value_NK.to(half), mask=real_N1)
        store_sum(sums, to_value_NK, slot_of(program, start, first, HEADS, SLOT), head, 2, HEADS, WIDTH)


@triton.jit
def _scores(query_MK, key_NK, scale, real_N):
    """Return powers of 2; their quotients are the softmax. A key after the last has 0."""
    scores_MN = tl.dot(query_MK, tl.trans(key_NK)) * (scale * LOG2_E)
    return tl.where(real_N[None, :], scores_MN, -float("inf"))


@triton.jit
def _words(row_M1, first, KEYS: tl.constexpr):
    """Return the offsets of the bits of these rows and keys [M, W]."""
    return row_M1 * WORDS + first // 32 + tl.arange(0, KEYS // 32)[None, :]


@triton.jit
def _keeps(words_MW, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return a mask of the scores that these bits keep [M, N]."""
    bits_MW32 = words_MW[:, :, None] >> tl.arange(0, 32)[None, None, :]
    return (tl.reshape(bits_MW32, (QUERIES, KEYS)) & 1) != 0


@triton.jit
def _first(start, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the start of a sequence for a head, among rows of `HEADS` heads."""
    return (start.to(tl.int64) * HEADS + head) * WIDTH


@triton.jit
def _offsets(row, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of rows from that start, with all features, in 32 bits instead of 64."""
    return row[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
