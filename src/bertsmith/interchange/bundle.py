"""TensorFlow 1 checkpoint bundles (`X.index` and `X.data-0000N-of-0000M`), read without TensorFlow.

The index is a LevelDB table: blocks of prefix-compressed records, each block with its checksum, and a footer
that says where the block of blocks stands. The record "" is the header; every other one says where the bytes
of a variable lie in the data files. Nothing in a file is trusted: what a length, an offset or a count claims
is checked against the bytes that are there before anything is allocated for it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.errors import UserError
from bertsmith.interchange.crc32c import crc32c, masked

_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_NEWEST_KNOWN_VERSION = 1
_BFLOAT16 = 14
# The numbers are TensorFlow's DataType; numpy has no bfloat16, so those bits are widened after reading.
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", _BFLOAT16: "<u2", 19: "<f2"}

# BERT-Large with its optimizer has an index of about 0.1 MB; these bounds stop files made to exhaust memory.
_LARGEST_INDEX_BYTES = 16 << 20
_LONGEST_NAME_BYTES = 1024
_LONGEST_ENTRY_BYTES = 1 << 16
_MOST_VARIABLES = 100_000
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 48

_REMEDY = "download the checkpoint again, with all its .index and .data files"


class _Malformed(Exception):
    """The file in hand breaks its format, or uses a part unknown here; `_blaming` adds which file it is."""

    def __init__(self, what: str, remedy: str = _REMEDY) -> None:
        self.remedy = remedy
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where and how one variable is stored."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: int


class Bundle:
    """The named arrays of a checkpoint; each is read and checked when it is asked for."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._index = Path(f"{prefix}.index")
        with _blaming(self._index):
            records = _table(_read_index(self._index))
            self._shards = _shard_count(records)
            self._entries = {
                _name(key): _entry(key, value) for key, value in records.items() if _is_variable(key)
            }

    def names(self) -> tuple[str, ...]:
        """The names of all variables, sorted."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a variable."""
        return self._find(name).shape

    def tensor(self, name: str) -> NDArray[Any]:
        """The values of a variable, its checksum verified; bfloat16 comes as float32."""
        entry = self._find(name)
        with _blaming(self._index):
            _check_readable(name, entry, self._shards)
        data = Path(f"{self._prefix}.data-{entry.shard:05d}-of-{self._shards:05d}")
        with _blaming(data):
            return _values(entry, _read_raw(data, name, entry))

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UserError(f"holds no variable {name!r}", where=str(self._index), remedy="see names()")
        return self._entries[name]


@contextmanager
def _blaming(file: Path) -> Iterator[None]:
    """Whatever goes wrong inside is reported as this file's fault, with what to do about it."""
    try:
        yield
    except _Malformed as error:
        raise UserError(str(error), where=str(file), remedy=error.remedy) from error
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), remedy=_REMEDY) from error


# The variables: the header, the entries, the bytes.


def _shard_count(records: dict[bytes, bytes]) -> int:
    """The number of data files, from a header this reader understands."""
    if b"" not in records:
        raise _Malformed("is no TensorFlow checkpoint index: it has no header")
    header = _Message(records[b""])
    if header.integer(2) != 0:
        raise _Malformed("was written on a big-endian machine", "save it again on a little-endian one")
    if any(version.integer(2) > _NEWEST_KNOWN_VERSION for version in header.messages(3)):
        raise _Malformed(
            "is in a newer checkpoint format than this reader knows", "save it with TensorFlow 1"
        )
    if header.integer(1) < 1:
        raise _Malformed(f"says that it has {header.integer(1)} data files")
    return header.integer(1)


def _is_variable(key: bytes) -> bool:
    """Whether a record is a variable: not the header, and not a piece of a partitioned variable."""
    return key != b"" and not key.startswith(b"\0")


def _name(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise _Malformed(f"has a variable name that is not UTF-8 text ({key!r})") from error


def _entry(key: bytes, value: bytes) -> _Entry:
    """One variable's record, with a shape that can be true."""
    message = _Message(value)
    dimensions = [dimension for shape in message.messages(2) for dimension in shape.messages(2)]
    shape = tuple(dimension.integer(1) for dimension in dimensions[: _MOST_DIMENSIONS + 1])
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or _too_large(shape):
        raise _Malformed(f"gives the variable {_name(key)!r} an impossible shape")
    dtype, shard, offset, size, checksum = (message.integer(field) for field in (1, 3, 4, 5, 6))
    return _Entry(dtype, shape, shard, offset, size, checksum, slices=len(message.messages(7)))


def _too_large(shape: tuple[int, ...]) -> bool:
    # A zero among the dimensions must not hide that another is absurd: numpy would still overflow.
    return math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS


def _check_readable(name: str, entry: _Entry, shards: int) -> None:
    """Refuse what this reader cannot give, and entries that contradict themselves."""
    if entry.slices:
        raise _Malformed(
            f"stores {name!r} in slices, as a partitioned variable", "save it without a partitioner"
        )
    if entry.dtype not in _DTYPES:
        known = (
            "float, double, half, bfloat16, int32 and int64 can be read: save the variable as one of these"
        )
        raise _Malformed(f"stores {name!r} as TensorFlow data type {entry.dtype}", known)
    if entry.size != math.prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize:
        raise _Malformed(f"gives {name!r} {entry.size} bytes, which do not fill its shape {entry.shape}")
    if not 0 <= entry.shard < shards:
        raise _Malformed(f"puts {name!r} into data file {entry.shard} of {shards}")


def _read_raw(data: Path, name: str, entry: _Entry) -> NDArray[np.uint8]:
    """A variable's bytes, as they were when they were written."""
    if entry.offset < 0 or entry.offset + entry.size > data.stat().st_size:
        raise _Malformed(f"ends before the bytes of {name!r}: it is truncated")
    raw = np.fromfile(data, np.uint8, count=entry.size, offset=entry.offset)
    if masked(crc32c(raw)) != entry.checksum:
        raise _Malformed(f"is damaged: the checksum of {name!r} does not match its bytes")
    return raw


def _values(entry: _Entry, raw: NDArray[np.uint8]) -> NDArray[Any]:
    values: NDArray[Any] = raw.view(_DTYPES[entry.dtype])
    if entry.dtype == _BFLOAT16:  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.reshape(entry.shape)


# The table: footer, blocks, records.


def _read_index(index: Path) -> bytes:
    if index.stat().st_size > _LARGEST_INDEX_BYTES:
        raise _Malformed("is too large for a checkpoint index")
    return index.read_bytes()


def _table(table: bytes) -> dict[bytes, bytes]:
    """All records of a LevelDB table."""
    records: dict[bytes, bytes] = {}
    last: bytes | None = None
    for _, handle in _records(_block(table, _index_handle(table))):
        for key, value in _records(_block(table, handle)):
            # Sorted keys also mean that no record is taken twice, however often an index names its block.
            if last is not None and key <= last:
                raise _Malformed("is damaged: its records are not in order")
            last, records[key] = key, value
            if len(records) > _MOST_VARIABLES:
                raise _Malformed(f"has more than {_MOST_VARIABLES} records")
    return records


def _index_handle(table: bytes) -> bytes:
    """The handle of the block of blocks, from the footer; that of the unused meta block stands before it."""
    footer = table[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise _Malformed(
            "is no TensorFlow checkpoint index, or is truncated: its last bytes are not the footer's"
        )
    at = 0
    for _ in range(2):
        _, at = _varint(footer, at)
    return footer[at:]


def _block(table: bytes, handle: bytes) -> bytes:
    """The content of the block at a handle (offset, size), checked and decompressed."""
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    content, compression, checksum = (
        _take(table, offset, size),
        _take(table, offset + size, 1),
        _take(table, offset + size + 1, 4),
    )
    if masked(crc32c(content + compression)) != int.from_bytes(checksum, "little"):
        raise _Malformed(f"is damaged: the checksum of the block at byte {offset} does not match")
    if compression == b"\0":
        return content
    if compression == b"\1":
        return _decompress_snappy(content)
    raise _Malformed(f"has a block of unknown compression {compression[0]}")


def _records(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a block; a key is stored as how much it shares with the key before it, and the rest."""
    restarts = int.from_bytes(_take(block, len(block) - 4, 4), "little")
    content = _take(block, 0, len(block) - 4 - 4 * restarts)
    key, at = b"", 0
    while at < len(content):
        shared, at = _varint(content, at)
        fresh, at = _varint(content, at)
        size, at = _varint(content, at)
        if shared > len(key) or shared + fresh > _LONGEST_NAME_BYTES or size > _LONGEST_ENTRY_BYTES:
            raise _Malformed("is damaged: a record's lengths are impossible")
        key = key[:shared] + _take(content, at, fresh)
        yield key, _take(content, at + fresh, size)
        at += fresh + size


# The encodings: bytes, varints, protobuf messages, snappy.


def _take(data: bytes, start: int, size: int) -> bytes:
    """Exactly these bytes; a slice would quietly give fewer."""
    if start < 0 or size < 0 or start + size > len(data):
        raise _Malformed("is damaged: something in it reaches past its end")
    return data[start : start + size]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts here, seven bits to a byte, and where the next thing starts."""
    value = 0
    for position in range(10):
        byte = _take(data, at + position, 1)[0]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + position + 1
    raise _Malformed("is damaged: a number in it has no end")


class _Message:
    """A protobuf message as its fields by number; absent fields read as zero or empty."""

    def __init__(self, raw: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(raw):
            tag, at = _varint(raw, at)
            value, at = _field_value(raw, at, tag & 7)
            self._fields.setdefault(tag >> 3, []).append(value)

    def integer(self, field: int) -> int:
        """A number; varints are read as the two's complement of int64."""
        value = self._fields.get(field, [0])[-1]
        if isinstance(value, bytes):
            raise _Malformed("is damaged: a number was expected where there is text")
        return value - (1 << 64) if value >> 63 else value

    def messages(self, field: int) -> list["_Message"]:
        """The messages inside a repeated field."""
        values = self._fields.get(field, [])
        if not all(isinstance(value, bytes) for value in values):
            raise _Malformed("is damaged: a message was expected where there is a number")
        return [_Message(value) for value in values if isinstance(value, bytes)]


def _field_value(raw: bytes, at: int, wire_type: int) -> tuple[int | bytes, int]:
    """A field's value in one of protobuf's wire types, and where the next field starts."""
    if wire_type == 0:
        return _varint(raw, at)
    if wire_type == 2:
        size, at = _varint(raw, at)
        return _take(raw, at, size), at + size
    if wire_type in (1, 5):
        size = 8 if wire_type == 1 else 4
        return int.from_bytes(_take(raw, at, size), "little"), at + size
    raise _Malformed(f"is damaged: it has a field of unknown wire type {wire_type}")


def _decompress_snappy(data: bytes) -> bytes:
    """The content of a block that TensorFlow wrote with snappy compression."""
    length, at = _varint(data, 0)
    content = bytearray()
    while at < len(data) and len(content) <= min(length, _LARGEST_INDEX_BYTES):
        tag = data[at]
        if tag & 3 == 0:
            literal, at = _snappy_literal(data, at)
            content += literal
        else:
            size, offset, at = _snappy_copy(data, at)
            if not 0 < offset <= len(content):
                raise _Malformed("is damaged: a compressed block refers to bytes before its start")
            start = len(content) - offset
            repeated = bytes(content[start : start + size])
            content += (repeated * (size // len(repeated) + 1))[:size]  # a copy may overlap itself
    if len(content) != length:
        raise _Malformed("is damaged: a compressed block has not the length it claims")
    return bytes(content)


def _snappy_literal(data: bytes, at: int) -> tuple[bytes, int]:
    """The literal bytes of the element here; lengths over 60 stand in one to four bytes of their own."""
    short = data[at] >> 2
    extra = max(short - 59, 0)
    size = 1 + (int.from_bytes(_take(data, at + 1, extra), "little") if extra else short)
    start = at + 1 + extra
    return _take(data, start, size), start + size


def _snappy_copy(data: bytes, at: int) -> tuple[int, int, int]:
    """How many bytes to copy, from how far back, and where the next element starts."""
    tag = data[at]
    if tag & 3 == 1:
        return 4 + (tag >> 2 & 7), tag >> 5 << 8 | _take(data, at + 1, 1)[0], at + 2
    width = 2 if tag & 3 == 2 else 4
    return 1 + (tag >> 2), int.from_bytes(_take(data, at + 1, width), "little"), at + 1 + width
