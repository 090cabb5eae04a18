"""Writes TensorFlow checkpoint bundles, for the tests of the reader; it shares no code with the reader."""

import os.path
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_DTYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}
_BLOCK_BYTES = 256  # TensorFlow's are 256 KB; small ones make a small bundle have several
_RESTART_INTERVAL = 4


@dataclass(frozen=True)
class Variable:
    """An array as a bundle stores it, for types that numpy does not have."""

    dtype: int
    shape: tuple[int, ...]
    raw: bytes


def bfloat16(array: np.ndarray) -> Variable:
    """A float32 array with the lower half of each number cut off."""
    return Variable(14, array.shape, array.astype("<f4").reshape(-1).view("<u2")[1::2].tobytes())


def write_bundle(
    prefix: Path,
    arrays: dict[str, np.ndarray | Variable],
    *,
    shards: int = 1,
    compress: Callable[[bytes], bytes] | None = None,
) -> None:
    """Write the arrays to `prefix.index` and its data files, in turn to each shard."""
    data = [b""] * shards
    records = {b"": header(shards)}
    for position, name in enumerate(sorted(arrays)):
        variable, shard = _variable(arrays[name]), position % shards
        offset, checksum = len(data[shard]), masked(crc32c(variable.raw))
        records[name.encode()] = entry(
            dtype=variable.dtype, shape=variable.shape, place=(shard, offset, len(variable.raw)), crc=checksum
        )
        data[shard] += variable.raw
    for shard, raw in enumerate(data):
        Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}").write_bytes(raw)
    write_table(Path(f"{prefix}.index"), sorted(records.items()), compress=compress)


def _variable(array: np.ndarray | Variable) -> Variable:
    if isinstance(array, Variable):
        return array
    return Variable(_DTYPES[array.dtype.name], array.shape, array.tobytes())


def header(shards: int, *, endianness: int = 0, min_consumer: int = 0) -> bytes:
    """A BundleHeaderProto."""
    version = field(1, 1) + field(2, min_consumer)
    return field(1, shards) + field(2, endianness) + field(3, version)


def entry(
    *, dtype: int, shape: Iterable[int], place: tuple[int, int, int], crc: int, extra: bytes = b""
) -> bytes:
    """A BundleEntryProto; the place is shard, offset and size."""
    dimensions = b"".join(field(2, field(1, size)) for size in shape)
    shard, offset, size = place
    numbers = field(1, dtype) + field(2, dimensions) + field(3, shard) + field(4, offset) + field(5, size)
    return numbers + varint(6 << 3 | 5) + struct.pack("<I", crc) + extra


def field(number: int, value: int | bytes) -> bytes:
    """A protobuf field; like protobuf 3, it leaves out what is zero."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value) if value else b""


def varint(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first; negative ones as 64-bit two's complement."""
    value %= 1 << 64
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def write_table(
    path: Path, records: Iterable[tuple[bytes, bytes]], *, compress: Callable[[bytes], bytes] | None = None
) -> None:
    """Write a LevelDB table of the records, in the order given."""
    table, handles = b"", []
    for group in _grouped(list(records)):
        stored = stored_block(block(group), compress=compress)
        handles.append((group[-1][0], varint(len(table)) + varint(len(stored) - 5)))
        table += stored
    path.write_bytes(finished_table(table, handles))


def finished_table(table: bytes, handles: list[tuple[bytes, bytes]]) -> bytes:
    """The data blocks of a table, followed by the meta block, the block of blocks and the footer."""
    footer = b""
    for content in (block([]), block(handles)):
        stored = stored_block(content)
        footer += varint(len(table)) + varint(len(stored) - 5)
        table += stored
    return table + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def _grouped(records: list[tuple[bytes, bytes]]) -> list[list[tuple[bytes, bytes]]]:
    groups: list[list[tuple[bytes, bytes]]] = [[]]
    for record in records:
        if sum(len(key) + len(value) for key, value in groups[-1]) > _BLOCK_BYTES:
            groups.append([])
        groups[-1].append(record)
    return groups


def block(records: list[tuple[bytes, bytes]]) -> bytes:
    """Records with their keys compressed against the key before, in full at every restart point."""
    content, restarts, last = b"", [], b""
    for position, (key, value) in enumerate(records):
        if position % _RESTART_INTERVAL == 0:
            restarts.append(len(content))
            last = b""
        shared = len(os.path.commonprefix([last, key]))
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return content + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def stored_block(content: bytes, *, compress: Callable[[bytes], bytes] | None = None) -> bytes:
    """A block as it stands in the file: content, how it is compressed, checksum."""
    stored = compress(content) + b"\1" if compress else content + b"\0"
    return stored + struct.pack("<I", masked(crc32c(stored)))


def snappy(content: bytes) -> bytes:
    """Content compressed with every kind of snappy element, in turn where several would do."""
    compressed, at, literal_from, copies = varint(len(content)), 0, 0, 0
    while at < len(content):
        start = content.rfind(content[at : at + 4], 0, at + 3)
        if start < 0 or at + 4 > len(content):
            at += 1
            continue
        size = next(
            (n for n in range(4, 64) if content[start + n : start + n + 1] != content[at + n : at + n + 1]),
            64,
        )
        size = min(size, len(content) - at)
        compressed += _literal(content[literal_from:at]) + _copy(size, at - start, kind=copies % 3 + 1)
        at, copies = at + size, copies + 1
        literal_from = at
    return compressed + _literal(content[literal_from:])


def _literal(data: bytes) -> bytes:
    if not data:
        return b""
    size = len(data) - 1
    if size < 60:
        return bytes([size << 2]) + data
    extra = (size.bit_length() + 7) // 8
    return bytes([(59 + extra) << 2]) + size.to_bytes(extra, "little") + data


def _copy(size: int, offset: int, *, kind: int) -> bytes:
    if kind == 1 and size < 12 and offset < 2048:
        return bytes([offset >> 8 << 5 | (size - 4) << 2 | 1, offset & 0xFF])
    width = 4 if kind == 3 else 2
    return bytes([(size - 1) << 2 | (3 if kind == 3 else 2)]) + offset.to_bytes(width, "little")


def crc32c(data: bytes) -> int:
    """The textbook CRC-32C, a byte at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register = _REMAINDERS[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A checksum as bundles store it."""
    return ((crc >> 15 | crc << 17) % (1 << 32) + 0xA282EAD8) % (1 << 32)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_REMAINDERS = [_remainder(byte) for byte in range(256)]
