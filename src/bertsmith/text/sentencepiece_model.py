"""Read SentencePiece model files without the sentencepiece package: pieces with scores, and the normaliser.

A .model file is a protobuf message (sentencepiece_model.proto): 1 the pieces (1 text, 2 score, 3 type), 2 the
training settings (3 algorithm, 40 id of the unknown piece), 3 the normaliser (2 its table of characters).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.errors import UserError

UNIGRAM = 1
CONTROL, USER_DEFINED = 3, 4
FETCH_MODEL = "download it again, or add the tokenizer.json of the same model"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the vocabulary."""

    text: str
    score: float
    type: int = 1

    @property
    def pair(self) -> tuple[str, float]:
        """The piece as (text, score), the form that the tokenizers library expects."""
        return self.text, self.score


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """Contents of a unigram model file."""

    pieces: list[Piece]
    unknown_id: int
    characters: bytes
    """The normaliser's compiled table; empty if text is not normalised."""


def read_sentencepiece_model(file: Path) -> SentencePieceModel:
    """Read the unigram model of a file."""
    parts: dict[int, list[bytes]] = {1: [], 2: [], 3: []}
    try:
        for number, value in _fields(file.read_bytes()):
            if number in parts:
                parts[number].append(_message(value))
        # The normaliser comes after all pieces: if it is missing, the file was cut off between two pieces.
        if not all(parts.values()):
            raise ValueError("it is cut off")
        pieces = [_piece(dict(_fields(part))) for part in parts[1]]
        trained, normaliser = (dict(_fields(b"".join(parts[number]))) for number in (2, 3))
        characters = _message(normaliser.get(2, b""))
    except (OSError, ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(
            f"is not a SentencePiece model ({error})", where=str(file), remedy=FETCH_MODEL
        ) from error
    if trained.get(3, UNIGRAM) != UNIGRAM:
        remedy = "add the tokenizer.json of the same model"
        raise UserError("is a SentencePiece model, but not a unigram model", where=str(file), remedy=remedy)
    unknown_id = trained.get(40, 0)
    if not isinstance(unknown_id, int) or unknown_id >= len(pieces):
        raise UserError(
            "is not a SentencePiece model: it lacks the unknown piece", where=str(file), remedy=FETCH_MODEL
        )
    return SentencePieceModel(pieces, unknown_id, characters)


def _piece(entry: dict[int, int | bytes]) -> Piece:
    (score,) = struct.unpack("<f", _message(entry.get(2, bytes(4))))
    kind = entry.get(3, 1)
    return Piece(_message(entry.get(1, b"")).decode("utf-8"), score, kind if isinstance(kind, int) else 1)


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("expected a text, found a number")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: numbers as int, everything else as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            number, at = _varint(message, at)
            yield key >> 3, number
            continue
        sizes = {1: 8, 5: 4}
        if key & 7 == 2:
            size, at = _varint(message, at)
        elif key & 7 in sizes:
            size = sizes[key & 7]
        else:
            raise ValueError(f"byte {at} does not begin a field")
        if at + size > len(message):
            raise ValueError("it is cut off")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number in groups of seven bits, the lowest first, and the offset of the next field."""
    number = 0
    for place in range(10):
        if at + place >= len(message):
            raise ValueError("it is cut off")
        byte = message[at + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError(f"byte {at} begins a number without end")
