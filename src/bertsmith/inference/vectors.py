"""Vectors of texts: pooling, cosines, and files that other tools open.

Shapes: M vectors, D model width.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bertsmith.core.arrays import GrowingNpy
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path
from bertsmith.inference.engine import Engine
from bertsmith.inference.text_reader import TextInput
from bertsmith.model import encoder
from bertsmith.model.folder.sentence_modules import Pooling
from bertsmith.packed import PackedBatch

Doubles = NDArray[np.float64]
Vectors = Sequence[Sequence[float]] | ArrayLike

MIN_LENGTH = 1e-12
POOLS = {
    "mean": encoder.mean_of_rows,
    "cls": encoder.first_of_rows,
    "max": encoder.largest_of_rows,
    "mean_sqrt_len_tokens": encoder.root_mean_of_rows,
    "lasttoken": encoder.last_of_rows,
    "centred": encoder.mean_of_rows,
}
"""Functions from the last states to a vector. The pooler is a head; "centred" then subtracts a direction."""


def pooled_texts(engine: Engine, texts: Sequence[TextInput], pooling: Pooling, *, truncate: bool) -> Tensor:
    """Return a vector for each text [M, D], pooled from its last states."""

    def vectors(batch: PackedBatch) -> Tensor:
        if pooling == "pooler":
            return engine.network.sentence_scores("pooler", batch)
        return POOLS[pooling](engine.network(batch), batch.layout)

    found = engine.vectors(texts, vectors, truncate=truncate)
    return torch.cat(found) if found else torch.empty(0, engine.network.config.width)


def direction_of_no_text(engine: Engine) -> Tensor:
    """Return the mean of an empty text's states, of length 1 [D]; 0 without special tokens."""
    if not len(encoded := engine.tokenizer.encode("")):
        return torch.zeros(engine.network.config.width)

    def mean(batch: PackedBatch) -> list[Tensor]:
        return list(encoder.mean_of_rows(engine.network(batch), batch.layout).float().cpu())

    (mean_D,) = engine.predict_encoded([encoded], mean)
    return torch.nn.functional.normalize(mean_D, dim=-1)


def without_direction(rows_MD: Tensor, direction_D: Tensor) -> Tensor:
    """Return the vectors without their component in a direction of length 1."""
    # Not a matrix product: the rounding of a row must not depend on the number of rows.
    return rows_MD - (rows_MD * direction_D).sum(-1, keepdim=True) * direction_D


def cosines(vectors: Vectors) -> Doubles:
    """Return the cosine of every two vectors."""
    rows = unit(vectors)
    return np.clip(rows @ rows.T, -1.0, 1.0)


def unit(vectors: Vectors) -> Doubles:
    """Return the vectors with a length of 1; a vector of zeros is unchanged."""
    rows = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    made: Doubles = rows / np.maximum(lengths, MIN_LENGTH)
    return made


NumberedVectors = Iterable[tuple[Sequence[int], Tensor]]
"""Chunks of vectors [n, width], each vector with the number of its text."""


def write_vectors(target: Path, chunks: NumberedVectors, *, width: int) -> int:
    """Write vectors chunk by chunk, and return their number; the file appears when it is complete."""
    with atomic_path(target) as temporary:
        return _WRITERS[target.suffix.lower()](temporary, chunks, width)


def check_vector_file(target: Path) -> None:
    """Reject a file name if vectors are not written in its format."""
    if target.suffix.lower() not in _WRITERS:
        remedy = f"name a file that ends in {', '.join(filter(None, _WRITERS))}"
        raise UserError(f"vectors are not written as {target.suffix}", where=str(target), remedy=remedy)
    if _WRITERS[target.suffix.lower()] is _write_parquet:
        _pyarrow(target)


def _write_npy(path: Path, chunks: NumberedVectors, width: int) -> int:
    with GrowingNpy(path, "<f4", row_shape=(width,)) as file:
        for _, vectors in chunks:
            file.append(vectors.numpy())
    return file.rows


def _write_csv(path: Path, chunks: NumberedVectors, width: int) -> int:
    rows = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["number", *range(width)])
        for numbers, vectors in chunks:
            # Nine digits restore every number of fp32 exactly.
            writer.writerows(
                [number, *(f"{each:.9g}" for each in vector)]
                for number, vector in zip(numbers, vectors.tolist(), strict=True)
            )
            rows += len(numbers)
    return rows


def _write_parquet(path: Path, chunks: NumberedVectors, width: int) -> int:
    arrow = _pyarrow(path)
    schema = arrow.schema([("number", arrow.int64()), ("vector", arrow.list_(arrow.float32(), width))])
    rows = 0
    with arrow.parquet.ParquetWriter(path, schema) as file:
        for numbers, vectors in chunks:
            flat = arrow.array(vectors.float().numpy().reshape(-1))
            columns = [arrow.array(numbers, arrow.int64()), arrow.FixedSizeListArray.from_arrays(flat, width)]
            file.write_table(arrow.Table.from_arrays(columns, schema=schema))
            rows += len(numbers)
    return rows


def _pyarrow(target: Path) -> Any:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        remedy = "pip install 'bertsmith[data]', or write .npy"
        raise UserError("writing Parquet needs pyarrow", where=str(target), remedy=remedy) from error
    return pyarrow


_WRITERS: dict[str, Callable[[Path, NumberedVectors, int], int]] = {
    ".npy": _write_npy,
    "": _write_npy,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".pq": _write_parquet,
}
