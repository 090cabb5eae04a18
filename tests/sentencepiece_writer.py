"""SentencePiece model files, written by hand: their protobuf messages from pieces and scores."""

import struct
from collections.abc import Iterable
from pathlib import Path

from tests.bundle_writer import field, varint

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
Piece = tuple[str, float, int]


def write_sentencepiece(
    file: Path, pieces: Iterable[Piece], *, unknown_id: int = 0, algorithm: int = 1, characters: bytes = b""
) -> Path:
    """Write a model file; as in real ones, what is the default is left out."""
    content = b"".join(field(1, _piece(*each)) for each in pieces)
    trainer = (field(3, algorithm) if algorithm != 1 else b"") + field(40, unknown_id)
    content += field(2, trainer)
    content += field(3, field(1, b"nmt_nfkc") + (field(2, characters) if characters else b""))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _piece(text: str, score: float, kind: int) -> bytes:
    number = varint(2 << 3 | 5) + struct.pack("<f", score)
    return field(1, text.encode()) + number + (field(3, kind) if kind != NORMAL else b"")
