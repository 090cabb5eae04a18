"""Vectors of texts: how near they are to each other, and the file that numpy opens."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bertsmith.core.arrays import GrowingNpy
from bertsmith.core.files import atomic_path

Doubles = NDArray[np.float64]
Vectors = Sequence[Sequence[float]] | ArrayLike

MIN_LENGTH = 1e-12


def cosines(vectors: Vectors) -> Doubles:
    """The cosine of each two vectors."""
    rows = unit(vectors)
    return np.clip(rows @ rows.T, -1.0, 1.0)


def unit(vectors: Vectors) -> Doubles:
    """The vectors with a length of 1; one of zeros stays as it is."""
    rows = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    made: Doubles = rows / np.maximum(lengths, MIN_LENGTH)
    return made


def write_vectors(target: Path, chunks: Iterable[Tensor], *, width: int) -> int:
    """How many vectors were written: the .npy file grows by each chunk [n, width], and appears when whole."""
    with atomic_path(target) as temporary, GrowingNpy(temporary, "<f4", row_shape=(width,)) as file:
        for chunk in chunks:
            file.append(chunk.numpy())
    return file.rows
