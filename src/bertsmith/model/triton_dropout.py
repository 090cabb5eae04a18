"""Random numbers of Triton kernels: dropout masks that both passes compute from a seed and keep nowhere.

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
