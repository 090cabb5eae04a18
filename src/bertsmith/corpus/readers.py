"""From paths to blocks of documents: which files, in which format, cut where.

- text: an empty line between documents, a sentence or a paragraph on each line
- jsonl: one JSON object a line, the text in one of its fields
- parquet: a row a document, the text in one of its columns
- wiki: what WikiExtractor writes, `<doc id= url= title=>` to `</doc>` (with --json it writes jsonl)

Parquet is known by its name; wiki and jsonl, where the name does not say it, by how the text begins.

Any but parquet may be packed with gzip, bzip2, xz or Zstandard. Blocks depend on the files alone.
"""

import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, Literal

from bertsmith.corpus.cutting import Stream, cut_blocks
from bertsmith.corpus.documents import Block, Document, EncodingErrors, Layout, Reading, documents_of
from bertsmith.corpus.parquet import parquet_blocks
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import COMPRESSED_SUFFIXES, compression_of, open_text_bytes

__all__ = ["Block", "Document", "TextFormat", "documents_of", "find_sources", "read_blocks", "size_on_disk"]

TextFormat = Literal["auto", "text", "jsonl", "parquet", "wiki"]

STANDARD_INPUT = Path("-")
_LAYOUTS: dict[str, Layout] = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",  # so are the files of C4 named
    ".parquet": "parquet",
    ".pq": "parquet",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STARTS: dict[Layout, re.Pattern[bytes]] = {
    "wiki": re.compile(rb"<doc "),
    "jsonl": re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:'),  # an object and its first key: no prose
}


def find_sources(paths: Sequence[str]) -> list[Path]:
    """The files that the paths name: files, folders, glob patterns, "-" for standard input."""
    if not paths:
        raise UserError("no text was named", remedy="name files, folders, patterns, or - for standard input")
    return [source for path in paths for source in _sources(path)]


def size_on_disk(sources: Sequence[Path]) -> int:
    """The bytes of all files together, as the blocks' `file_bytes` count them; standard input has none."""
    return sum(source.stat().st_size for source in sources if source.is_file())


def read_blocks(
    sources: Sequence[Path],
    *,
    format: TextFormat = "auto",
    field: str = "text",
    errors: EncodingErrors = "strict",
    block_bytes: int = 1 << 20,
) -> Iterator[Block]:
    """The blocks of all files in order, each of whole documents and about block_bytes of text."""
    for source in sources:
        layout = _layout_by_name(source) if format == "auto" else format
        if layout == "parquet":
            reading = Reading(layout, field, errors)
            yield from parquet_blocks(_seekable(source), reading, block_bytes=block_bytes)
            continue
        with _opened(source) as file:
            stream = _started(file, str(source), block_bytes)
            layout = _layout_by_start(stream.start) or layout if format == "auto" else layout
            yield from cut_blocks(stream, Reading(layout, field, errors), block_bytes=block_bytes)


def _sources(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place == STANDARD_INPUT:
        return [STANDARD_INPUT]
    if place.is_dir():
        found, what = _below(place), "is a folder without text that can be known by its name"
    elif place.exists():
        return [place]
    else:
        found, what = _matching(str(place)), "no such file, and nothing matches it as a pattern"
    if not found:
        remedy = f"name the files themselves; folders are searched for {' '.join(_LAYOUTS)}, packed or not"
        raise UserError(what, where=path, remedy=remedy)
    return sorted(found)


def _matching(pattern: str) -> set[Path]:
    # Not Path.glob, which refuses absolute patterns and finds hidden files.
    matches = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207
    return {file for match in matches for file in (_below(match) if match.is_dir() else [match])}


def _below(folder: Path) -> set[Path]:
    """The files below a folder whose names say that they hold text; hidden ones are left alone."""

    def refuse(error: OSError) -> None:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=str(error.filename), remedy="check its rights") from error

    found = set()
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found |= {Path(place, name) for name in names if _is_text_name(name)}
    return found


def _is_text_name(name: str) -> bool:
    if name.startswith("."):
        return False
    bare = _without_compression(Path(name))
    made_by_wikiextractor = re.fullmatch(r"wiki_\d+", bare.name) is not None
    return made_by_wikiextractor or bare.suffix.lower() in _LAYOUTS


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path


def _layout_by_name(source: Path) -> Layout:
    return _LAYOUTS.get(_without_compression(source).suffix.lower(), "text")


def _layout_by_start(start: bytes) -> Layout | None:
    return next((layout for layout, pattern in _STARTS.items() if pattern.match(start)), None)


def _seekable(source: Path) -> Path:
    if source == STANDARD_INPUT or source.suffix.lower() in COMPRESSED_SUFFIXES:
        what = "Parquet is read from its end, which needs a plain file"
        raise UserError(what, where=str(source), remedy="unpack it into a file first")
    return source


def _opened(source: Path) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if source == STANDARD_INPUT else open_text_bytes(source)


def _started(file: BinaryIO, source: str, block_bytes: int) -> Stream:
    """The stream after a look at its first bytes, which tell some files that hold no UTF-8 text."""
    name = "standard input" if source == str(STANDARD_INPUT) else source
    start = file.read(max(block_bytes, 64))
    if kind := _not_text(start):
        raise UserError(f"is {kind[0]}", where=name, remedy=kind[1])
    mark = len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0
    return Stream(file, start[mark:], name, mark)


def _not_text(start: bytes) -> tuple[str, str] | None:
    if compression_of(start):
        return "compressed inside", "unpack it first"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"
    if start.startswith(b"PAR1"):
        return "a Parquet file", "say --format parquet"
    return None
