"""How near vectors are to each other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]
Vectors = Sequence[Sequence[float]] | ArrayLike

SMALLEST_LENGTH = 1e-12


def cosines(vectors: Vectors) -> Numbers:
    """The cosine of each two vectors."""
    rows = unit(vectors)
    return np.clip(rows @ rows.T, -1.0, 1.0)


def unit(vectors: Vectors) -> Numbers:
    """The vectors with a length of 1; one of zeros stays as it is."""
    rows = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    made: Numbers = rows / np.maximum(lengths, SMALLEST_LENGTH)
    return made
