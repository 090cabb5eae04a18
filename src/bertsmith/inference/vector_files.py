"""Vectors in a file that numpy opens, written as they come."""

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from torch import Tensor

from bertsmith.ground.files import atomic_path


def write_vectors(target: Path, chunks: Iterable[Tensor], *, width: int) -> int:
    """How many vectors were written: the .npy file grows by each chunk [n, width], and appears when whole."""
    rows = 0
    with atomic_path(target) as temporary, temporary.open("wb") as file:
        _write_header(file, (0, width))
        begin = file.tell()
        for chunk in chunks:
            file.write(chunk.numpy().astype("<f4").tobytes())
            rows += len(chunk)
        file.seek(0)
        _write_header(file, (rows, width))
        assert file.tell() == begin, "numpy leaves room in a header for the rows to grow"
    return rows


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    facts = {"descr": np.dtype("<f4").str, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, facts)
