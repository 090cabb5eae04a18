"""Read paths as blocks of documents: find the files, detect their format, and cut them.

- text: an empty line between documents, a sentence or a paragraph on each line
- jsonl: one JSON object per line, the text in one of its fields
- parquet: one document per row, the text in one of its columns
- wiki: output of WikiExtractor, `<doc id= url= title=>` to `</doc>` (with --json it writes jsonl)

Parquet is detected by the file name; wiki and jsonl by the file name or the beginning of the text.

All but parquet may be compressed with gzip, bzip2, xz or Zstandard. Blocks depend on the files alone.
"""

import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES, compression_of, open_text_bytes
from bertsmith.corpus.documents import (
    DOCUMENT_BYTES,
    Block,
    Document,
    EncodingErrors,
    Layout,
    Reading,
    documents_of,
    end_of_piece,
)

__all__ = ["Block", "Document", "TextFormat", "documents_of", "find_sources", "read_blocks", "size_on_disk"]

TextFormat = Literal["auto", "text", "jsonl", "parquet", "wiki"]

STANDARD_INPUT = Path("-")
_LAYOUTS: dict[str, Layout] = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",  # the names of C4's files
    ".parquet": "parquet",
    ".pq": "parquet",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STARTS: dict[Layout, re.Pattern[bytes]] = {
    "wiki": re.compile(rb"<doc "),
    "jsonl": re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:'),  # an object and its first key: not prose
}
RECORD_BYTES = 64 << 20  # a longer JSON line or wiki page means another kind of file, or a broken one

_BORDERS: dict[Layout, re.Pattern[bytes]] = {
    "text": re.compile(rb"\n[ \t\r\f\v]*\n"),
    "jsonl": re.compile(rb"\n"),
    "wiki": re.compile(rb"\n</doc>[ \t\r]*\n"),
}
_FIRST_STEP = 1 << 16  # bytes to read beyond a block to find its border; doubled until one is found
_ROWS_AT_ONCE = 256  # rows per batch: some hundred kilobytes of prose


# ---- which files


def find_sources(paths: Sequence[str]) -> list[Path]:
    """Return the files that the paths name: files, folders, glob patterns, "-" for standard input."""
    if not paths:
        raise UserError(
            "missing input texts", remedy="name files, folders, patterns, or - for standard input"
        )
    sources = []
    for path in paths:
        source = Path(path).expanduser()
        if source == STANDARD_INPUT or (source.exists() and not source.is_dir()):
            sources.append(source)
            continue
        if source.is_dir():
            found, what = _below(source), "is a folder without text files"
        else:
            what = "does not exist, and does not match any file as a pattern"
            # Not Path.glob, which rejects absolute patterns and finds hidden files.
            matches = map(Path, glob.glob(str(source), recursive=True))  # noqa: PTH207
            found = {file for match in matches for file in (_below(match) if match.is_dir() else [match])}
        if not found:
            remedy = (
                f"name the files themselves; folders are searched for {' '.join(_LAYOUTS)}, compressed or not"
            )
            raise UserError(what, where=path, remedy=remedy)
        sources += sorted(found)
    return sources


def size_on_disk(sources: Sequence[Path]) -> int:
    """Return the bytes of all files together, equal to the sum of `file_bytes`; 0 for standard input."""
    return sum(source.stat().st_size for source in sources if source.is_file())


def _below(folder: Path) -> set[Path]:
    """Return the visible files below a folder with names that indicate text."""

    def raise_unreadable(error: OSError) -> None:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=str(error.filename), remedy="check its permissions") from error

    found = set()
    for parent, folders, names in os.walk(folder, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (name for name in names if not name.startswith(".")):
            bare = _without_compression(Path(name))
            if bare.suffix.lower() in _LAYOUTS or re.fullmatch(r"wiki_\d+", bare.name):  # WikiExtractor's
                found.add(Path(parent, name))
    return found


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path


# ---- blocks of any file


def read_blocks(
    sources: Sequence[Path],
    *,
    format: TextFormat = "auto",
    field: str = "text",
    errors: EncodingErrors = "strict",
    block_bytes: int = 1 << 20,
) -> Iterator[Block]:
    """Yield the blocks of all files in order, each with whole documents and about block_bytes of text."""
    for source in sources:
        layout = (
            _LAYOUTS.get(_without_compression(source).suffix.lower(), "text") if format == "auto" else format
        )
        if layout == "parquet":
            if source == STANDARD_INPUT or source.suffix.lower() in COMPRESSED_SUFFIXES:
                what = "Parquet is read from its end, which requires a regular file"
                raise UserError(what, where=str(source), remedy="unpack it into a file first")
            yield from parquet_blocks(source, Reading(layout, field, errors), block_bytes=block_bytes)
            continue
        is_standard_input = source == STANDARD_INPUT
        with nullcontext(sys.stdin.buffer) if is_standard_input else open_text_bytes(source) as file:
            stream = _started(file, str(source), block_bytes)
            if format == "auto":
                found = (name for name, pattern in _STARTS.items() if pattern.match(stream.start))
                layout = next(found, layout)
            yield from cut_blocks(stream, Reading(layout, field, errors), block_bytes=block_bytes)


@dataclass(frozen=True, slots=True)
class Stream:
    """An open file, the bytes already read from it, its name, and the offset at which they begin."""

    file: BinaryIO
    start: bytes
    source: str
    first_byte: int = 0


def _started(file: BinaryIO, source: str, block_bytes: int) -> Stream:
    """Read the first bytes of a file; raise if they show that it is not UTF-8 text."""
    name = "standard input" if source == str(STANDARD_INPUT) else source
    start = file.read(max(block_bytes, 64))
    what, remedy = "", ""
    if compression_of(start):
        what, remedy = "is compressed inside", "unpack it first"
    elif start.startswith((b"\xff\xfe", b"\xfe\xff")):
        what, remedy = "is UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"
    elif start.startswith(b"PAR1"):
        what, remedy = "is a Parquet file", "use `format=parquet`"
    if what:
        raise UserError(what, where=name, remedy=remedy)
    mark = len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0
    return Stream(file, start[mark:], name, mark)


def cut_blocks(stream: Stream, reading: Reading, *, block_bytes: int) -> Iterator[Block]:
    """Yield the blocks of a stream: each ends at the first border between documents after block_bytes."""
    line, byte, read = 1, stream.first_byte, 0
    held = bytearray(stream.start)
    while True:
        held += stream.file.read(max(block_bytes - len(held), 0))
        if not held:
            return
        end = _end_of_block(stream, held, reading.layout, block_bytes)
        content = bytes(held[:end])
        del held[:end]
        try:
            position = os.lseek(stream.file.fileno(), 0, os.SEEK_CUR)
        except OSError:  # not seekable: a pipe
            position = 0
        yield Block(content, stream.source, line, byte, reading, file_bytes=position - read)
        line, byte, read = line + content.count(b"\n"), byte + len(content), position


def _end_of_block(stream: Stream, held: bytearray, layout: Layout, block_bytes: int) -> int:
    """Return the end of the block that starts with the held bytes; read more bytes into `held` if needed."""
    limit = DOCUMENT_BYTES if layout == "text" else RECORD_BYTES
    step = _FIRST_STEP
    while not (border := _BORDERS[layout].search(held, block_bytes)):
        if len(held) > block_bytes + limit:
            if layout != "text":
                what = f"has a record longer than {RECORD_BYTES >> 20} MiB"
                raise UserError(
                    what, where=stream.source, remedy="check the file, or choose another `format`"
                )
            # A giant document would load the whole stream into memory. So the block ends before it, and if
            # the block contains nothing else, the document itself is cut.
            earlier = [border.end() for border in _BORDERS["text"].finditer(held, 0, block_bytes)]
            return earlier[-1] if earlier else end_of_piece(held, DOCUMENT_BYTES)
        more = stream.file.read(step)
        if not more:
            return len(held)
        held += more
        step *= 2
    return border.end()


# ---- blocks from a column of text in a Parquet file


def parquet_blocks(path: Path, reading: Reading, *, block_bytes: int) -> Iterator[Block]:
    """Yield the blocks of a Parquet file: whole batches of rows, up to about block_bytes."""
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
    """Yield every text in every text column of a Parquet file; bytes that are not UTF-8 are replaced."""
    with _opened(path) as file:
        columns = [field.name for field in file.schema_arrow if _holds_text(field.type)]
        for column in columns:
            for texts in text_batches(file, path, column):
                yield from (text.decode("utf-8", "replace") for text in texts)


def text_batches(file: Any, path: Path, column: str) -> Iterator[list[bytes]]:
    """Yield the UTF-8 texts of a column, batch by batch; a missing value is an empty text."""
    from pyarrow import large_binary  # type: ignore[import-untyped]

    names = file.schema_arrow.names
    if column not in names:
        remedy = f"choose one of its columns with `text`: {', '.join(names)}"
        raise UserError(f"lacks the column {column!r}", where=str(path), remedy=remedy)
    if not _holds_text(file.schema_arrow.field(column).type):
        raise UserError(
            f"column {column!r} is not text", where=str(path), remedy="choose another with `text`"
        )
    # As bytes: the caller decodes the text, and reports the row of invalid UTF-8.
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
    except (ArrowException, OSError, ValueError) as error:
        what = f"is not a whole Parquet file ({error})"
        raise UserError(
            what, where=str(path), remedy="download it again, or choose another `format`"
        ) from error


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
