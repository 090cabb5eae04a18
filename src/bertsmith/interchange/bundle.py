"""TensorFlow 1 checkpoint bundles (`X.index` and `X.data-0000N-of-0000M`), read without TensorFlow.

The index is a LevelDB table: blocks of prefix-compressed records, each with a checksum, and a footer with the
location of the block index. The record "" is the header; every other record locates the bytes of a variable
in the data files. The file is not trusted: every length, offset and count is checked against the available
bytes before anything is allocated for it.

The checksums are CRC-32C (Castagnoli), computed here for large buffers in plain numpy. A checksum is the
remainder of the message divided by a polynomial P over the field of two elements. Squaring is linear in this
field: P(x)^(2^k) = P(x^(2^k)). So the pattern of P still divides if each of its bits means a whole row of 2^k
message bits. A long message is divided with XORs of ever shorter rows, until some dozens of bytes are left
for the usual table. The CPU's own CRC instruction is not needed.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError

_REFLECTED_POLYNOMIAL = 0x82F63B78
# Bit i of the reflected polynomial is the term x^(31 - i): a row is added to the row i + 1 further on.
_DISTANCES = tuple(bit + 1 for bit in range(32) if _REFLECTED_POLYNOMIAL >> bit & 1)
_ROWS_AT_ONCE = _DISTANCES[0]  # rows nearer than the shortest distance do not affect each other
_REMAINDER_ROWS = 32
_CHUNK_ROWS = 3 * _REMAINDER_ROWS
_MAX_ROW_BYTES = 8192  # bytes; 32 + 96 such rows fill one MiB, the second-level cache of most cores
_MIN_ROW_BYTES = 4
_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_NEWEST_KNOWN_VERSION = 1
_BFLOAT16 = 14
# The numbers are TensorFlow's DataType; numpy lacks bfloat16, so those bits are widened after reading.
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", _BFLOAT16: "<u2", 19: "<f2"}
# BERT-Large with its optimizer has an index of about 0.1 MB; these bounds stop files made to exhaust memory.
_MAX_INDEX_BYTES = 16 << 20
_MAX_NAME_BYTES = 1024
_MAX_ENTRY_BYTES = 1 << 16
_MAX_VARIABLES = 100_000
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 48
_REMEDY = "download the checkpoint again, with all its .index and .data files"


# ---- checksums


def crc32c(data: bytes | NDArray[Any]) -> int:
    """Return the CRC-32C of the bytes of a buffer."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    # The widest row, a power of two, that lets this message fill a first chunk: wide rows mean few numpy
    # calls, which dominate the time of short messages.
    fitting = raw.size // (_REMAINDER_ROWS + _CHUNK_ROWS)
    width = min(_MAX_ROW_BYTES, 1 << fitting.bit_length() >> 1)
    if width < _MIN_ROW_BYTES:
        return _bytewise(raw.tobytes(), 0xFFFFFFFF) ^ 0xFFFFFFFF
    rows = _fold_chunks(raw, width)
    while width > _MIN_ROW_BYTES:
        width //= 2
        rows = _fold(rows.reshape(-1, width // 4))
    return _bytewise(rows.tobytes(), 0) ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """Return a checksum as LevelDB and TensorFlow store it: rotated and shifted, to avoid CRCs of CRCs."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _fold_chunks(raw: NDArray[np.uint8], width: int) -> NDArray[np.uint32]:
    """Return the 32 rows with the same remainder as the whole message."""
    rows = np.zeros((_REMAINDER_ROWS + _CHUNK_ROWS, width // 4), np.uint32)
    every_byte = rows.reshape(-1).view(np.uint8)
    chunk = every_byte[_REMAINDER_ROWS * width :]
    # Leading zeros do not change a message's remainder, so the odd piece is put first, at the buffer's end.
    odd = (raw.size - 4) % chunk.size + 4
    every_byte[-odd:] = raw[:odd]
    every_byte[every_byte.size - odd :][:4] ^= 0xFF  # the register starts as ones, not as zeros
    for start in range(odd, raw.size, chunk.size):
        rows[:_REMAINDER_ROWS] = _fold(rows)
        chunk[:] = raw[start : start + chunk.size]
    return _fold(rows)


def _fold(rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Divide in place: carry each row but the last 32 into later rows; return the last 32."""
    # Several rows per call: none of them is carried into another, as the polynomial's nearest term is that
    # far away.
    for start in range(0, len(rows) - _REMAINDER_ROWS, _ROWS_AT_ONCE):
        carried = rows[start : start + _ROWS_AT_ONCE]
        for distance in _DISTANCES:
            target = rows[start + distance : start + distance + _ROWS_AT_ONCE]
            np.bitwise_xor(target, carried, out=target)
    return rows[-_REMAINDER_ROWS:]


def _bytewise_table() -> tuple[int, ...]:
    """Return the remainder of each byte value."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ _REFLECTED_POLYNOMIAL * (crc & 1) for crc in table]
    return tuple(table)


_TABLE = _bytewise_table()


def _bytewise(data: bytes, crc: int) -> int:
    """Return the checksum register after these bytes."""
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc


# ---- the bundle


class _Malformed(Exception):
    """A file that breaks its format, or uses an unknown part of it; `_errors_name` adds the file's name."""

    def __init__(self, what: str, remedy: str = _REMEDY) -> None:
        self.remedy = remedy
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location and format of one variable."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: int


class Bundle:
    """The named arrays of a checkpoint; each is read and checked when it is needed."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._index = Path(f"{prefix}.index")
        with _errors_name(self._index):
            if self._index.stat().st_size > _MAX_INDEX_BYTES:
                raise _Malformed("is too large for a checkpoint index")
            records = _table(self._index.read_bytes())
            self._shards = _shard_count(records)
            # The header has the empty name; keys that start with a zero byte are pieces of partitioned
            # variables.
            names = [key for key in records if key != b"" and not key.startswith(b"\0")]
            self._entries = {_name(key): _entry(key, records[key]) for key in names}
            _check_apart(self._entries)

    def names(self) -> tuple[str, ...]:
        """Return the names of all variables, sorted."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a variable."""
        return self._find(name).shape

    def tensor(self, name: str) -> NDArray[Any]:
        """Return the values of a variable after checking its checksum; bfloat16 becomes float32."""
        entry = self._find(name)
        with _errors_name(self._index):
            _check_readable(name, entry, self._shards)
        data = Path(f"{self._prefix}.data-{entry.shard:05d}-of-{self._shards:05d}")
        with _errors_name(data):
            if entry.offset < 0 or entry.offset + entry.size > data.stat().st_size:
                raise _Malformed(f"ends before the bytes of {name!r}: it is truncated")
            raw = np.fromfile(data, np.uint8, count=entry.size, offset=entry.offset)
            if masked(crc32c(raw)) != entry.checksum:
                raise _Malformed(f"is damaged: the checksum of {name!r} does not match its bytes")
        values: NDArray[Any] = raw.view(_DTYPES[entry.dtype])
        if entry.dtype == _BFLOAT16:  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(entry.shape)

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UserError(
                f"does not contain the variable {name!r}", where=str(self._index), remedy="see names()"
            )
        return self._entries[name]


@contextmanager
def _errors_name(file: Path) -> Iterator[None]:
    """Turn errors inside into errors about this file, with a remedy."""
    try:
        yield
    except _Malformed as error:
        raise UserError(str(error), where=str(file), remedy=error.remedy) from error
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), remedy=_REMEDY) from error


# The variables: the header and the entries.


def _shard_count(records: dict[bytes, bytes]) -> int:
    """Return the number of data files, from a header that this reader understands."""
    if b"" not in records:
        raise _Malformed("is not a TensorFlow checkpoint index: it lacks a header")
    # BundleHeaderProto: 1 is num_shards, 2 the byte order, 3 a VersionDef with min_consumer as its field 2.
    header = _Message(records[b""])
    if header.integer(2) != 0:
        raise _Malformed("was written on a big-endian machine", "save it again on a little-endian one")
    if any(version.integer(2) > _NEWEST_KNOWN_VERSION for version in header.messages(3)):
        raise _Malformed("is in a newer, unsupported checkpoint format", "save it with TensorFlow 1")
    if header.integer(1) < 1:
        raise _Malformed(f"claims to have {header.integer(1)} data files")
    return header.integer(1)


def _check_apart(entries: Mapping[str, _Entry]) -> None:
    """Reject variables that share bytes: a small file could name thousands of large ones."""
    filled = {name: entry for name, entry in entries.items() if entry.size > 0}
    by_place = sorted(filled, key=lambda name: (filled[name].shard, filled[name].offset))
    for name, other in pairwise(by_place):
        one, next_one = filled[name], filled[other]
        if one.shard == next_one.shard and next_one.offset < one.offset + one.size:
            raise _Malformed(f"stores {name!r} and {other!r} in the same bytes")


def _name(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise _Malformed(f"has a variable name that is not UTF-8 text ({key!r})") from error


def _entry(key: bytes, value: bytes) -> _Entry:
    """Return the record of one variable; reject an impossible shape."""
    # BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 checksum, 7 slices. A shape repeats its
    # field 2 for each dimension; field 1 of that is the size.
    message = _Message(value)
    dimensions = [dimension for shape in message.messages(2) for dimension in shape.messages(2)]
    shape = tuple(dimension.integer(1) for dimension in dimensions[: _MAX_DIMENSIONS + 1])
    # A zero among the dimensions must not hide an absurd one: numpy would still overflow.
    elements = math.prod(max(size, 1) for size in shape)
    if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0 or elements > _MAX_ELEMENTS:
        raise _Malformed(f"gives the variable {_name(key)!r} an impossible shape")
    dtype, shard, offset, size, checksum = (message.integer(field) for field in (1, 3, 4, 5, 6))
    return _Entry(dtype, shape, shard, offset, size, checksum, slices=len(message.messages(7)))


def _check_readable(name: str, entry: _Entry, shards: int) -> None:
    """Reject data that this reader cannot read, and entries that contradict themselves."""
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


# The table: footer, blocks, records.


def _table(table: bytes) -> dict[bytes, bytes]:
    """Return all records of a LevelDB table."""
    footer = table[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise _Malformed(
            "is not a TensorFlow checkpoint index, or is truncated: it does not end with the footer"
        )
    # The footer contains two handles of two numbers each: the unused meta block, and the block index.
    _, at = _varint(footer, 0)
    _, at = _varint(footer, at)
    records: dict[bytes, bytes] = {}
    last: bytes | None = None
    end = 0
    for _, handle in _records(_block(table, footer[at:])):
        offset, behind = _varint(handle, 0)
        if offset < end:  # otherwise a large block without records, named again and again, would take hours
            raise _Malformed("is damaged: its blocks are not contiguous")
        end = offset + _varint(handle, behind)[0]
        for key, value in _records(_block(table, handle)):
            if last is not None and key <= last:
                raise _Malformed("is damaged: its records are not in order")
            last, records[key] = key, value
            if len(records) > _MAX_VARIABLES:
                raise _Malformed(f"has more than {_MAX_VARIABLES} records")
    return records


def _block(table: bytes, handle: bytes) -> bytes:
    """Return the content of the block at a handle (offset, size), checked and decompressed."""
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
    """Yield the records of a block; a key is the length shared with the key before it, and the rest."""
    restarts = int.from_bytes(_take(block, len(block) - 4, 4), "little")
    content = _take(block, 0, len(block) - 4 - 4 * restarts)
    key, at = b"", 0
    while at < len(content):
        shared, at = _varint(content, at)
        fresh, at = _varint(content, at)
        size, at = _varint(content, at)
        if shared > len(key) or shared + fresh > _MAX_NAME_BYTES or size > _MAX_ENTRY_BYTES:
            raise _Malformed("is damaged: a record's lengths are impossible")
        key = key[:shared] + _take(content, at, fresh)
        yield key, _take(content, at + fresh, size)
        at += fresh + size


# The encodings: bytes, varints, protobuf messages, snappy.


def _take(data: bytes, start: int, size: int) -> bytes:
    """Return exactly these bytes; a slice would silently return fewer."""
    if start < 0 or size < 0 or start + size > len(data):
        raise _Malformed("is damaged: a part of it exceeds its end")
    return data[start : start + size]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that starts here, seven bits per byte, and the offset after it."""
    value = 0
    for position in range(10):
        byte = _take(data, at + position, 1)[0]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + position + 1
    raise _Malformed("is damaged: a number in it does not end")


class _Message:
    """The fields of a protobuf message by number; absent fields are zero or empty."""

    def __init__(self, raw: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(raw):
            tag, at = _varint(raw, at)
            number, wire_type = tag >> 3, tag & 7
            value: int | bytes
            if wire_type == 0:
                value, at = _varint(raw, at)
            elif wire_type == 2:
                size, at = _varint(raw, at)
                value, at = _take(raw, at, size), at + size
            elif wire_type in (1, 5):  # fixed64 and fixed32: checksums are fixed32
                size = 8 if wire_type == 1 else 4
                value, at = int.from_bytes(_take(raw, at, size), "little"), at + size
            else:
                raise _Malformed(f"is damaged: it has a field of unknown wire type {wire_type}")
            self._fields.setdefault(number, []).append(value)

    def integer(self, field: int) -> int:
        """Return a number; varints are read as the two's complement of int64."""
        value = self._fields.get(field, [0])[-1]
        if isinstance(value, bytes):
            raise _Malformed("is damaged: it contains text instead of a number")
        return value - (1 << 64) if value >> 63 else value

    def messages(self, field: int) -> list["_Message"]:
        """Return the messages of a repeated field."""
        values = self._fields.get(field, [])
        if not all(isinstance(value, bytes) for value in values):
            raise _Malformed("is damaged: it contains a number instead of a message")
        return [_Message(value) for value in values if isinstance(value, bytes)]


def _decompress_snappy(data: bytes) -> bytes:
    """Return the content of a block that TensorFlow compressed with snappy."""
    length, at = _varint(data, 0)
    content = bytearray()
    # Do not trust the claimed length: a few bytes can demand copies without end.
    while at < len(data) and len(content) <= min(length, _MAX_INDEX_BYTES):
        tag, at = data[at], at + 1
        if tag & 3 == 0:  # literal bytes; lengths over 60 are stored in one to four further bytes
            short = tag >> 2
            extra = max(short - 59, 0)
            size = 1 + (int.from_bytes(_take(data, at, extra), "little") if extra else short)
            content += _take(data, at + extra, size)
            at += extra + size
            continue
        if tag & 3 == 1:  # a short copy: three bits of size, eleven of offset
            size, offset, at = 4 + (tag >> 2 & 7), tag >> 5 << 8 | _take(data, at, 1)[0], at + 1
        else:
            width = 2 if tag & 3 == 2 else 4
            size, offset, at = 1 + (tag >> 2), int.from_bytes(_take(data, at, width), "little"), at + width
        if not 0 < offset <= len(content):
            raise _Malformed("is damaged: a compressed block refers to bytes before its start")
        start = len(content) - offset
        repeated = bytes(content[start : start + size])
        content += (repeated * (size // len(repeated) + 1))[:size]  # a copy may overlap itself
    if len(content) != length:
        raise _Malformed("is damaged: a compressed block does not have the length it claims")
    return bytes(content)
