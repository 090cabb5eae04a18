"""Cutting a stream of bytes into blocks of whole documents, without decoding them."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from bertsmith.corpus.documents import DOCUMENT_BYTES, Block, Layout, Reading, end_of_piece
from bertsmith.ground.errors import UserError

RECORD_BYTES = 64 << 20  # a JSON line or a wiki page beyond this is a file of another kind, or a broken one

_BORDERS: dict[Layout, re.Pattern[bytes]] = {
    "text": re.compile(rb"\n[ \t\r\f\v]*\n"),
    "jsonl": re.compile(rb"\n"),
    "wiki": re.compile(rb"\n</doc>[ \t\r]*\n"),
}
_FIRST_STEP = 1 << 16  # bytes read beyond a block to find its border; doubled while there is none


@dataclass(frozen=True, slots=True)
class Stream:
    """An open file, what was read of it already, what it is called and where in it that text begins."""

    file: BinaryIO
    start: bytes
    source: str
    first_byte: int = 0


def cut_blocks(stream: Stream, reading: Reading, *, block_bytes: int) -> Iterator[Block]:
    """The blocks of a stream: each ends at the first border between documents after block_bytes."""
    line, byte, read = 1, stream.first_byte, 0
    for content in _contents(stream, reading.layout, block_bytes):
        position = _position(stream.file)
        yield Block(content, stream.source, line, byte, reading, file_bytes=position - read)
        line, byte, read = line + content.count(b"\n"), byte + len(content), position


def _contents(stream: Stream, layout: Layout, block_bytes: int) -> Iterator[bytes]:
    held = bytearray(stream.start)
    while True:
        held += stream.file.read(max(block_bytes - len(held), 0))
        if not held:
            return
        end = _end_of_block(stream, held, layout, block_bytes)
        yield bytes(held[:end])
        del held[:end]


def _end_of_block(stream: Stream, held: bytearray, layout: Layout, block_bytes: int) -> int:
    """Where the block that starts with the held bytes ends; holds more if that is needed to tell."""
    limit = DOCUMENT_BYTES if layout == "text" else RECORD_BYTES
    step = _FIRST_STEP
    while True:
        if border := _BORDERS[layout].search(held, block_bytes):
            return border.end()
        if len(held) > block_bytes + limit:
            return _end_before_a_giant(stream, held, layout, block_bytes)
        more = stream.file.read(step)
        if not more:
            return len(held)
        held += more
        step *= 2


def _end_before_a_giant(stream: Stream, held: bytearray, layout: Layout, block_bytes: int) -> int:
    if layout != "text":
        what = f"has no end of a record within {RECORD_BYTES >> 20} MiB"
        raise UserError(what, where=stream.source, remedy="check the file, or choose another --format")
    earlier = [border.end() for border in _BORDERS["text"].finditer(held, 0, block_bytes)]
    return earlier[-1] if earlier else end_of_piece(held, DOCUMENT_BYTES)


def _position(file: BinaryIO) -> int:
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)
    except OSError:  # a pipe has none
        return 0
