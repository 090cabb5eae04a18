"""Bootstrap confidence intervals of a fraction, from resampled sentences.

Shapes: S sentences, B samples of S sentences each, C columns (relations, genders).
"""

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.seeds import stream

SAMPLES = 1000
TAIL = 2.5
"""Per cent of the samples outside the interval on either side."""
BLOCK = 100

Counts = NDArray[np.float64]


def bootstrap_intervals(right_SC: Counts, total_SC: Counts, *, seed: int) -> tuple[Counts, Counts]:
    """Return the lower and upper ends [C] of the 95 % intervals of sum(right) / sum(total)."""
    sentences, chance = len(right_SC), stream(seed, "bootstrap")
    equal_S = np.full(sentences, 1 / sentences)
    fractions = []
    for _ in range(SAMPLES // BLOCK):
        times_BS = chance.multinomial(sentences, equal_S, size=BLOCK).astype(np.float64)
        with np.errstate(invalid="ignore"):
            fractions.append((times_BS @ right_SC) / (times_BS @ total_SC))
    low_C, high_C = np.nanpercentile(np.concatenate(fractions), [TAIL, 100 - TAIL], axis=0)
    return low_C, high_C
