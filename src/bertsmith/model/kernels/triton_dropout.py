"""Random numbers of Triton kernels: dropout masks that both passes compute from a seed, or bits to keep.

Only kernels load this: Triton is part of torch for CUDA, and nothing else may depend on it.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""Rounds of Philox 4x32: the fewest that pass every test of BigCrush (Salmon et al. 2011)."""


@triton.jit
def samples(seed, counters):
    """Return eight 32-bit numbers per counter, on three more axes of 2; their upper 16 bits are random."""
    one, two, three, four = tl.randint4x(seed, counters, n_rounds=ROUNDS)
    words = tl.join(tl.join(one, two), tl.join(three, four)).to(tl.uint32, bitcast=True)
    return tl.join(words << 16, words)


@triton.jit
def keeps(samples, DROPPED: tl.constexpr):
    """Return a mask of the values that dropout keeps if it drops `DROPPED` of 2**16."""
    THRESHOLD: tl.constexpr = DROPPED * 65536
    return samples >= THRESHOLD


@triton.jit
def score_samples(seed, row, COUNTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a random number for each score of these rows; this many counters for each row."""
    first = row[:, None, None] * COUNTERS + tl.arange(0, 4)[None, None, :]
    # A thread of the tensor cores holds pairs of neighbours 8 columns apart. The numbers of a counter are
    # assigned to such places, so that each thread can make its own.
    if COLUMNS < 64:
        numbers = samples(seed, first + tl.arange(0, COLUMNS // 32)[None, :, None] * 4)
        scores = tl.reshape(tl.permute(numbers, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))
    else:
        numbers = shared_samples(seed, first + tl.arange(0, COLUMNS // 64)[None, :, None] * 4)
        scores = tl.reshape(tl.permute(numbers, (0, 1, 3, 4, 5, 2, 6)), (ROWS, COLUMNS))
    return scores


@triton.jit
def shared_samples(seed, counters):
    """Return sixteen numbers of 32 bits for each counter, on four more axes of 2; upper 16 bits are random.

    These begin at each byte of a number of Philox and wrap around: each drops just as often as it should. Two
    of them share a byte, which decides one case in 256 of the first: their correlation is at most 1/256, and
    0.0017 if a tenth is dropped.
    """
    one, two, three, four = tl.randint4x(seed, counters, n_rounds=ROUNDS)
    words = tl.join(tl.join(one, two), tl.join(three, four)).to(tl.uint32, bitcast=True)
    return tl.join(tl.join(words, words << 8), tl.join(words << 16, (words << 24) | (words >> 8)))


@triton.jit
def kept_words(seed, row, first, DROPPED: tl.constexpr, COUNTERS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a bit for each score of these rows, from a first column on, in words of 32: 1 if it is kept."""
    word = first // 16 + tl.arange(0, COLUMNS // 32)[None, :, None] * 2
    counters = row[:, None, None] * COUNTERS + word + tl.arange(0, 2)[None, None, :]
    one, two, three, four = tl.randint4x(seed, counters, n_rounds=ROUNDS)
    bits = _kept_four(one, DROPPED) | (_kept_four(two, DROPPED) << 4)
    bits |= (_kept_four(three, DROPPED) << 8) | (_kept_four(four, DROPPED) << 12)
    return tl.sum(bits << (tl.arange(0, 2) * 16)[None, None, :], 2)


@triton.jit
def _kept_four(numbers, DROPPED: tl.constexpr):
    """Return four bits, by the `shared_samples` of each number."""
    words = numbers.to(tl.uint32, bitcast=True)
    bits = keeps(words, DROPPED).to(tl.int32) | (keeps(words << 8, DROPPED).to(tl.int32) << 1)
    bits |= keeps(words << 16, DROPPED).to(tl.int32) << 2
    return bits | (keeps((words << 24) | (words >> 8), DROPPED).to(tl.int32) << 3)
