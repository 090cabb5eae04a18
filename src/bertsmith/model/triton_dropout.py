"""Random numbers of Triton kernels: dropout masks that both passes compute from a seed, or bits to keep.

Loaded by kernels alone: Triton comes with torch for CUDA, and nothing else may ask for it.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""Of Philox 4x32: the fewest that pass every test of BigCrush (Salmon et al. 2011)."""


@triton.jit
def samples(seed, counters):
    """Eight numbers of 32 bits for each counter, along three more axes of 2; random are the upper 16 bits."""
    one, two, three, four = tl.randint4x(seed, counters, n_rounds=ROUNDS)
    words = tl.join(tl.join(one, two), tl.join(three, four)).to(tl.uint32, bitcast=True)
    return tl.join(words << 16, words)


@triton.jit
def keeps(samples, DROPPED: tl.constexpr):
    """Where dropout keeps a value, if it drops so many in 2**16."""
    THRESHOLD: tl.constexpr = DROPPED * 65536
    return samples >= THRESHOLD


@triton.jit
def score_samples(seed, row, first, COUNTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A random number for each score of these rows, from a first column on; so many counters for each row."""
    column = first // 8 + tl.arange(0, COLUMNS // 32)[None, :, None] * 4
    numbers = samples(seed, row[:, None, None] * COUNTERS + column + tl.arange(0, 4)[None, None, :])
    # A thread of the tensor cores holds pairs of neighbours 8 columns apart. The numbers of a counter go to
    # such places, so that each thread can make its own.
    return tl.reshape(tl.permute(numbers, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))


@triton.jit
def kept_words(seed, row, first, DROPPED: tl.constexpr, COUNTERS: tl.constexpr, COLUMNS: tl.constexpr):
    """A bit for each score of these rows, from a first column on, in words of 32: whether it is kept."""
    word = first // 8 + tl.arange(0, COLUMNS // 32)[None, :, None] * 4
    counters = row[:, None, None] * COUNTERS + word + tl.arange(0, 4)[None, None, :]
    one, two, three, four = tl.randint4x(seed, counters, n_rounds=ROUNDS)
    bits = _kept_pair(one, DROPPED) | (_kept_pair(two, DROPPED) << 2)
    bits |= (_kept_pair(three, DROPPED) << 4) | (_kept_pair(four, DROPPED) << 6)
    return tl.sum(bits << (tl.arange(0, 4) * 8)[None, None, :], 2)


@triton.jit
def _kept_pair(numbers, DROPPED: tl.constexpr):
    """Two bits, of the lower and the upper 16 bits of each number."""
    words = numbers.to(tl.uint32, bitcast=True)
    return keeps(words << 16, DROPPED).to(tl.int32) | (keeps(words, DROPPED).to(tl.int32) << 1)
