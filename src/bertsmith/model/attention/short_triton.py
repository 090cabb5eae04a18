"""The kernels of `short.py`: one program computes one head of one sequence, in both passes.

Shapes: T packed tokens, H heads, K head width, F = K / 2 pairs of features, S sequences, N tokens of one
sequence, filler included.

All scores of a head fit into registers, so the softmax is computed at once: nothing is kept for the backward
pass, which is one kernel without atomics and writes each gradient once. Scores and softmax are fp32. With
cosines and sines, queries and keys are turned as they are read, like `rotary.py` does, and their gradients
are turned back as they are written. Without them, the backward pass can also sum the gradients of each head's
rows for the bias of the projection.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.model.kernels.partial_sums_triton import total
from bertsmith.model.kernels.triton_dropout import keeps, score_samples

LAUNCHES: dict[int, dict[str, int]] = {
    32: {"num_warps": 1},
    64: {"num_warps": 4},
    128: {"num_warps": 8, "maxnreg": 128},
}
"""Launch options by the tile of scores.

With 8 warps a tile of 128 takes 64 registers of a thread, with 4 too many. With 128 registers each, two
programs fit on a multiprocessor, and one waits for memory while the other computes; in the backward pass a
few values spill. Smaller tiles have fewer warps, so that more programs fit.
"""
WIDE_BACKWARD_LAUNCH: dict[str, int] = {"num_warps": 8}
"""Launch options for heads wider than 64; only one fits anyway."""
SMALLEST_TILE = 32
COUNTERS = 8
"""Random counters for each token and head: 16 keys each, up to 128 keys."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""Constants for powers of 2, which a GPU computes natively."""
UNALIGNED = ["starts", "seed"]
"""Read one by one, at any alignment: another address must not require another kernel when recording."""


class Tile(NamedTuple):
    """Scores of queries by keys, and the sequences that a launch with it computes."""

    above: int
    """Length above which this size is used."""
    size: int
    """Maximum number of rows and columns of scores."""


Operands = tuple[Tensor, tuple[Tensor | None, Tensor | None], Tensor, Tensor | None]
"""Projection [T, 3, H, K], cosines and sines [T, F] or neither, starts of sequences [S1], seed of dropout."""


def forward(
    operands: Operands, *, longest: int, dropped: int, launch: dict[str, int] | None = None
) -> Tensor:
    """Compute the mix [T, H, K]."""
    tokens, _, heads, width = operands[0].shape
    mixed_THK = operands[0].new_empty(tokens, heads, width)
    for tile in _tiles(operands, longest):
        mix_into(mixed_THK, operands, tile=tile, dropped=dropped, counters=COUNTERS, launch=launch)
    return mixed_THK


def mix_into(
    mixed_THK: Tensor,
    operands: Operands,
    *,
    tile: Tile,
    dropped: int,
    counters: int,
    launch: dict[str, int] | None = None,
) -> None:
    """Write the mix of the tile's sequences, with this many counters of dropout for each token."""
    projected_T3HK, turns_TF, starts_S1, seed = operands
    heads, width = projected_T3HK.shape[2:]
    with torch.cuda.device_of(projected_T3HK):
        short_attention_forward[(starts_S1.shape[0] - 1) * heads,](
            *(projected_T3HK, *turns_TF, starts_S1, seed, mixed_THK, width**-0.5),
            HEADS=heads,
            WIDTH=width,
            ABOVE=tile.above,
            TILE=tile.size,
            COUNTERS=counters,
            DROPPED=dropped,
            **(launch or LAUNCHES[tile.size]),
        )


def backward(
    gradient_THK: Tensor,
    operands: Operands,
    *,
    longest: int,
    dropped: int,
    summed: bool = False,
    launch: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the whole projection [T, 3, H, K], and its sum over all rows, if requested."""
    projected_T3HK, turns_TF, starts_S1, _ = operands
    assert not summed or turns_TF == (None, None), "gradients of turned rows cannot be summed"
    gradients = Gradients(projected_T3HK, starts_S1.shape[0] - 1, summed=summed)
    for tile in _tiles(operands, longest):
        differentiate_into(
            gradients,
            gradient_THK,
            operands,
            tile=tile,
            dropped=dropped,
            counters=COUNTERS,
            launch=launch,
        )
    return gradients.to_projected_T3HK, gradients.sums_3HK()


class Gradients:
    """Memory for the gradients of a projection, and for the sums of their rows, if requested.

    There is one sum for each sequence or, with a slot for this many rows, one for each slot of each sequence.
    The keys' sum stays 0: a value added to all keys does not change a softmax.
    """

    def __init__(self, projected_T3HK: Tensor, sequences: int, *, summed: bool, slot: int = 0) -> None:
        self.to_projected_T3HK = torch.empty_like(projected_T3HK)
        self.slot = slot
        self._shape = projected_T3HK.shape[1:]
        # The maximum number of slots, however the rows are spread over sequences. Slots without rows stay 0.
        slots = sequences + (projected_T3HK.shape[0] // slot if slot else 0)
        every = (slots, *self._shape)
        self.sums_S3HK = projected_T3HK.new_zeros(every, dtype=torch.float32) if summed else None

    def sums_3HK(self) -> Tensor:
        """Return the sum over all rows; undefined if it was not requested."""
        if self.sums_S3HK is None:
            return self.to_projected_T3HK.new_empty(self._shape, dtype=torch.float32)
        return total(self.sums_S3HK.flatten(1)[None]).view(self._shape)


def differentiate_into(
    gradients: Gradients,
    gradient_THK: Tensor,
    operands: Operands,
    *,
    tile: Tile,
    dropped: int,
    counters: int,
    launch: dict[str, int] | None = None,
) -> None:
    """Write the gradients of sequences that the tile is for."""
    projected_T3HK, turns_TF, starts_S1, seed = operands
    heads, width = projected_T3HK.shape[2:]
    usual = LAUNCHES[tile.size] if width <= 64 else WIDE_BACKWARD_LAUNCH
    with torch.cuda.device_of(projected_T3HK):
        short_attention_backward[(starts_S1.shape[0] - 1) * heads,](
            *(gradient_THK, projected_T3HK, *turns_TF, starts_S1, seed, gradients.to_projected_T3HK),
            *(gradients.sums_S3HK, width**-0.5),
            HEADS=heads,
            WIDTH=width,
            ABOVE=tile.above,
            TILE=tile.size,
            SLOT=gradients.slot,
            COUNTERS=counters,
            DROPPED=dropped,
            **(launch or usual),
        )


def _tiles(operands: Operands, longest: int) -> tuple[Tile, ...]:
    """Return the tiles for sequences of up to this many tokens."""
    tokens, sequences = operands[0].shape[0], operands[2].shape[0] - 1
    size = max(SMALLEST_TILE, 1 << (longest - 1).bit_length())
    # If sequences are short on average, a separate launch for them gains more than it costs. Only shapes are
    # checked: a recording must fit every batch of these shapes.
    if size == 128 and tokens <= 64 * sequences:
        return Tile(0, 64), Tile(64, 128)
    return (Tile(0, size),)


@triton.jit(do_not_specialize=UNALIGNED)
def short_attention_forward(
    projected,
    cosine,
    sine,
    starts,
    seed,
    mixed,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ABOVE: tl.constexpr,
    TILE: tl.constexpr,
    COUNTERS: tl.constexpr,
    DROPPED: tl.constexpr,
):
    tensors = (projected, cosine, sine, starts, seed, mixed)
    _, _, length = head_of_sequence(tl.program_id(0), starts, HEADS)
    # A shorter sequence gets a smaller tile: a quarter of the scores, then a sixteenth. Sequences too long
    # for any tile are left to `tiled_triton.py`.
    if TILE == 128:
        if (length > 64) & (length <= 128):
            _mix(*tensors, scale, HEADS, WIDTH, 128, COUNTERS, DROPPED)
    if TILE >= 64 and ABOVE < 64:
        if (length > 32) & (length <= 64):
            _mix(*tensors, scale, HEADS, WIDTH, 64, COUNTERS, DROPPED)
    if ABOVE < 32:
        if (length > 0) & (length <= 32):
            _mix(*tensors, scale, HEADS, WIDTH, 32, COUNTERS, DROPPED)


@triton.jit(do_not_specialize=UNALIGNED)
def short_attention_backward(
    gradient,
    projected,
    cosine,
    sine,
    starts,
    seed,
    to_projected,
    sums,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ABOVE: tl.constexpr,
    TILE: tl.constexpr,
    SLOT: tl.constexpr,
    COUNTERS: tl.constexpr,
    DROPPED: tl.constexpr,
):
    tensors = (gradient, projected, cosine, sine, starts, seed, to_projected, sums)
    _, _, length = head_of_sequence(tl.program_id(0), starts, HEADS)
    if TILE == 128:
        if (length > 64) & (length <= 128):
            _differentiate(*tensors, scale, HEADS, WIDTH, 128, SLOT, COUNTERS, DROPPED)
    if TILE >= 64 and ABOVE < 64:
        if (length > 32) & (length <= 64):
            _differentiate(*tensors, scale, HEADS, WIDTH, 64, SLOT, COUNTERS, DROPPED)
    if ABOVE < 32:
        if (length > 0) & (length <= 32):
            _differentiate(*tensors, scale, HEADS, WIDTH, 32, SLOT, COUNTERS, DROPPED)


@triton.jit
def head_of_sequence(program, starts, HEADS: tl.constexpr):
    """Return a program's head, first row and length. Heads of a sequence are side by side."""
    sequence = program // HEADS
    start = tl.load(starts + sequence)
    return program % HEADS, start, tl.load(starts + sequence + 1) - start


@triton.jit
def _mix(
    projected,
    cosine,
    sine,
    starts,
    seed,
    mixed,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COUNTERS: tl.constexpr,
    DROPPED: tl.constexpr,
):
    head, start, length = head_of_sequence(tl.program_id(0), starts, HEADS)
    real_N1 = (tl.arange(0, TILE) < length)[:, None]
    query_at = projected + _rows(start, head, 3 * HEADS, WIDTH, TILE)
    query_NK = _turned(query_at, cosine, sine, start, real_N1, WIDTH, TILE)
    key_NK = _turned(query_at + HEADS * WIDTH, cosine, sine, start, real_N1, WIDTH, TILE)
    feature_1K = tl.arange(0, WIDTH)[None, :]
    value_NK = tl.load(query_at + 2 * HEADS * WIDTH + feature_1K, mask=real_N1, other=0.0)
    if DROPPED > 0:  # computed while the rows are loading
        samples_NN = _samples(seed, start, head, HEADS, TILE, COUNTERS)
    weights_NN, totals_N = _softmax(query_NK, key_NK, scale, length, TILE)
    if DROPPED > 0:
        weights_NN = tl.where(keeps(samples_NN, DROPPED), weights_NN, 0.0)
    # Scaling the mix [N, K] costs less than scaling the weights [N, N].
    scales_N = 65536.0 / (65536 - DROPPED) / totals_N
    mixed_NK = tl.dot(weights_NN.to(value_NK.dtype), value_NK) * scales_N[:, None]
    mixed_at = mixed + _rows(start, head, HEADS, WIDTH, TILE) + feature_1K
    tl.store(mixed_at, mixed_NK.to(mixed.dtype.element_ty), mask=real_N1)


@triton.jit
def _differentiate(
    gradient,
    projected,
    cosine,
    sine,
    starts,
    seed,
    to_projected,
    sums,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SLOT: tl.constexpr,
    COUNTERS: tl.constexpr,
    DROPPED: tl.constexpr,
):
    head, start, length = head_of_sequence(tl.program_id(0), starts, HEADS)
    real_N1 = (tl.arange(0, TILE) < length)[:, None]
    query_N1 = _rows(start, head, 3 * HEADS, WIDTH, TILE)
    key_N1, value_N1 = query_N1 + HEADS * WIDTH, query_N1 + 2 * HEADS * WIDTH
    feature_1K = tl.arange(0, WIDTH)[None, :]
    query_NK = _turned(projected + query_N1, cosine, sine, start, real_N1, WIDTH, TILE)
    key_NK = _turned(projected + key_N1, cosine, sine, start, real_N1, WIDTH, TILE)
    value_NK = tl.load(projected + value_N1 + feature_1K, mask=real_N1, other=0.0)
    gradient_at = gradient + _rows(start, head, HEADS, WIDTH, TILE) + feature_1K
    gradient_NK = tl.load(gradient_at, mask=real_N1, other=0.0)
    half = query_NK.dtype

    if DROPPED > 0:  # computed while the rows are loading
        samples_NN = _samples(seed, start, head, HEADS, TILE, COUNTERS)
    weights_NN, totals_N = _softmax(query_NK, key_NK, scale, length, TILE)
    probabilities_NN = weights_NN * (1.0 / totals_N)[:, None]
    # Negative if dropped: two of [N, N] fit into registers, but not with an additional mask.
    if DROPPED > 0:
        probabilities_NN = tl.where(keeps(samples_NN, DROPPED), probabilities_NN, -probabilities_NN)
    kept_scale = 65536.0 / (65536 - DROPPED)
    slot = slot_of(tl.program_id(0), start, 0, HEADS, SLOT)
    kept_NN = tl.maximum(probabilities_NN, 0.0).to(half)
    to_value_NK = tl.dot(tl.trans(kept_NN), gradient_NK) * kept_scale
    tl.store(to_projected + value_N1 + feature_1K, to_value_NK.to(half), mask=real_N1)
    store_sum(sums, to_value_NK, slot, head, 2, HEADS, WIDTH)

    to_kept_NN = tl.dot(gradient_NK, tl.trans(value_NK))
    to_kept_NN = tl.where(probabilities_NN > 0, to_kept_NN, 0.0)
    probabilities_NN = tl.abs(probabilities_NN)
    common_N = tl.sum(probabilities_NN * to_kept_NN, 1)
    to_scores_NN = (probabilities_NN * (to_kept_NN - common_N[:, None])).to(half)
    to_query_NK = tl.dot(to_scores_NN, key_NK) * (scale * kept_scale)
    _store_turned_back(to_projected + query_N1, to_query_NK, cosine, sine, start, real_N1, WIDTH, TILE)
    store_sum(sums, to_query_NK, slot, head, 0, HEADS, WIDTH)
    to_key_NK = tl.dot(tl.trans(to_scores_NN), query_NK) * (scale * kept_scale)
    _store_turned_back(to_projected + key_N1, to_key_NK, cosine, sine, start, real_N1, WIDTH, TILE)


@triton.jit
def slot_of(program, start, first, HEADS: tl.constexpr, SLOT: tl.constexpr):
    """Return the sum that a program's rows belong to; `first` is their offset in the sequence."""
    sequence = program // HEADS
    return sequence + start // SLOT + first // SLOT if SLOT > 0 else sequence


@triton.jit
def store_sum(sums, gradient_NK, slot, head, PART: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the sum of a head's rows, if sums are requested. Rows after the last of a sequence are 0."""
    if sums is not None:
        at = ((slot * 3 + PART) * HEADS + head) * WIDTH + tl.arange(0, WIDTH)
        tl.store(sums + at, tl.sum(gradient_NK, 0))


@triton.jit
def _rows(start, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Return the offsets of a head's rows of a sequence among rows of `HEADS` heads [N, 1]."""
    first = (start.to(tl.int64) * HEADS + head) * WIDTH
    return first + tl.arange(0, TILE)[:, None] * (HEADS * WIDTH)


@triton.jit
def _turned(rows_at, cosine, sine, start, real_N1, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Return a head's queries or keys [N, K] at these rows, turned if there are cosines and sines."""
    if cosine is None:
        turned_NK = tl.load(rows_at + tl.arange(0, WIDTH)[None, :], mask=real_N1, other=0.0)
    else:
        cosine_NF, sine_NF = _turns(cosine, sine, start, real_N1, WIDTH // 2, TILE)
        first_at = rows_at + tl.arange(0, WIDTH // 2)[None, :]
        first_NF = tl.load(first_at, mask=real_N1, other=0.0).to(tl.float32)
        second_NF = tl.load(first_at + WIDTH // 2, mask=real_N1, other=0.0).to(tl.float32)
        # As sums over pairs: for plain elementwise code, Triton converts every factor to the layout of the
        # tensor cores, which takes 144 registers instead of 107.
        turned_first_NF = tl.sum(tl.join(first_NF * cosine_NF, -second_NF * sine_NF), 2)
        turned_second_NF = tl.sum(tl.join(second_NF * cosine_NF, first_NF * sine_NF), 2)
        half = rows_at.dtype.element_ty
        halves_NF2 = tl.join(turned_first_NF.to(half), turned_second_NF.to(half))
        turned_NK = tl.reshape(tl.permute(halves_NF2, (0, 2, 1)), (TILE, WIDTH))
    return turned_NK


@triton.jit
def _store_turned_back(
    rows_at, gradient_NK, cosine, sine, start, real_N1, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Store the gradient of queries or keys, turned back if they were turned."""
    half = rows_at.dtype.element_ty
    if cosine is None:
        tl.store(rows_at + tl.arange(0, WIDTH)[None, :], gradient_NK.to(half), mask=real_N1)
    else:
        # Loaded again: the registers are full while the scores are in them.
        cosine_NF, sine_NF = _turns(cosine, sine, start, real_N1, WIDTH // 2, TILE)
        halves_N2F = tl.reshape(gradient_NK.to(half), (TILE, 2, WIDTH // 2))
        first_NF, second_NF = tl.split(tl.permute(halves_N2F, (0, 2, 1)))
        first_at = rows_at + tl.arange(0, WIDTH // 2)[None, :]
        back_NF = first_NF * cosine_NF + second_NF * sine_NF
        tl.store(first_at, back_NF.to(half), mask=real_N1)
        back_NF = second_NF * cosine_NF - first_NF * sine_NF
        tl.store(first_at + WIDTH // 2, back_NF.to(half), mask=real_N1)


@triton.jit
def _turns(cosine, sine, start, real_N1, PAIRS: tl.constexpr, TILE: tl.constexpr):
    """Return cosine and sine [N, F] of a sequence's tokens, in fp32 like all computations with them."""
    places_NF = _rows(start, 0, 1, PAIRS, TILE) + tl.arange(0, PAIRS)[None, :]
    cosine_NF = tl.load(cosine + places_NF, mask=real_N1, other=0.0)
    sine_NF = tl.load(sine + places_NF, mask=real_N1, other=0.0)
    return cosine_NF.to(tl.float32), sine_NF.to(tl.float32)


@triton.jit
def _softmax(query_NK, key_NK, scale, length, TILE: tl.constexpr):
    """Return the exponentials of each query and key [N, N], at most 1, and their sum for each query."""
    scores_NN = tl.dot(query_NK, tl.trans(key_NK))
    scores_NN = tl.where((tl.arange(0, TILE) < length)[None, :], scores_NN, -float("inf"))
    highest_N = tl.max(scores_NN, 1)
    weights_NN = tl.exp2(scores_NN * (scale * LOG2_E) - (highest_N * (scale * LOG2_E))[:, None])
    return weights_NN, tl.sum(weights_NN, 1)


@triton.jit
def _samples(seed, start, head, HEADS: tl.constexpr, TILE: tl.constexpr, COUNTERS: tl.constexpr):
    """Return a random number for each score [N, N]: this many counters for each token and head."""
    row_N = (start + tl.arange(0, TILE)) * HEADS + head
    return score_samples(tl.load(seed), row_N, COUNTERS, TILE, TILE)
