"""Blocks from a column of text in a Parquet file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.corpus.documents import Block, Reading

_ROWS_AT_ONCE = 256  # a batch: some hundred kilobytes of prose


def parquet_blocks(path: Path, reading: Reading, *, block_bytes: int) -> Iterator[Block]:
    """The blocks of a Parquet file: whole batches of rows, until they make up block_bytes."""
    row, held = 1, list[bytes]()
    with _opened(path) as file:
        bytes_per_row = path.stat().st_size / max(file.metadata.num_rows, 1)
        for texts in text_batches(file, path, reading.field):
            held += texts
            if sum(map(len, held)) >= block_bytes:
                yield _block(held, str(path), reading, row, bytes_per_row)
                row, held = row + len(held), []
    if held:
        yield _block(held, str(path), reading, row, bytes_per_row)


def parquet_strings(path: Path) -> Iterator[str]:
    """Every text in every text column of a Parquet file; bytes that are not UTF-8 are replaced."""
    with _opened(path) as file:
        columns = [field.name for field in file.schema_arrow if _holds_text(field.type)]
        for column in columns:
            for texts in text_batches(file, path, column):
                yield from (text.decode("utf-8", "replace") for text in texts)


def text_batches(file: Any, path: Path, column: str) -> Iterator[list[bytes]]:
    """The UTF-8 texts of a column, batch by batch; a missing value is an empty text."""
    from pyarrow import large_binary  # type: ignore[import-untyped]

    names = file.schema_arrow.names
    if column not in names:
        remedy = f"choose one of its columns with --field: {', '.join(names)}"
        raise UserError(f"has no column {column!r}", where=str(path), remedy=remedy)
    if not _holds_text(file.schema_arrow.field(column).type):
        raise UserError(
            f"column {column!r} is no text", where=str(path), remedy="choose another with --field"
        )
    # As bytes: text that is not UTF-8 is found by who decodes it, and named with its row.
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column]):
        yield [text or b"" for text in batch.column(0).cast(large_binary()).to_pylist()]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        remedy = "pip install 'bertsmith[data]'"
        raise UserError("reading Parquet needs pyarrow", where=str(path), remedy=remedy) from error
    try:
        # Streamed through a small buffer: a whole row group can be gigabytes.
        with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    except (ArrowException, OSError) as error:
        what = f"is not a whole Parquet file ({error})"
        raise UserError(what, where=str(path), remedy="fetch it again, or choose another --format") from error


def _holds_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _block(rows: list[bytes], source: str, reading: Reading, first_row: int, bytes_per_row: float) -> Block:
    ends, end = [], 0
    for row in rows:
        end += len(row)
        ends.append(end)
    file_bytes = round(len(rows) * bytes_per_row)
    return Block(b"".join(rows), source, first_row, 0, reading, tuple(ends), file_bytes)
