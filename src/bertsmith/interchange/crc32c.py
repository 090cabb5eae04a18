"""CRC-32C (Castagnoli) of large buffers in plain numpy.

A checksum is the remainder of the message divided by a polynomial P over the field of two elements, where
squaring is linear: P(x)^(2^k) = P(x^(2^k)). So the pattern of P still divides when each of its bits stands
for a whole row of 2^k message bits, and a long message is divided with XORs of rows, ever shorter ones, until
some dozens of bytes are left for the usual table. Nothing here needs the machine's own CRC instruction.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_REFLECTED_POLYNOMIAL = 0x82F63B78
# Bit i of the reflected polynomial is the term x^(31 - i); a row lands i + 1 rows after itself for each term.
_DISTANCES = tuple(bit + 1 for bit in range(32) if _REFLECTED_POLYNOMIAL >> bit & 1)
_ROWS_AT_ONCE = _DISTANCES[0]  # rows nearer than the shortest distance do not touch one another
_REMAINDER_ROWS = 32
_CHUNK_ROWS = 3 * _REMAINDER_ROWS
_WIDEST_ROW = 8192  # bytes; 32 + 96 such rows fill one MiB, the second-level cache of most cores
_NARROWEST_ROW = 4


def crc32c(data: bytes | NDArray[Any]) -> int:
    """The CRC-32C of the bytes of a buffer."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    # The widest row, a power of two, of which a message this long fills a first chunk.
    fitting = raw.size // (_REMAINDER_ROWS + _CHUNK_ROWS)
    width = min(_WIDEST_ROW, 1 << fitting.bit_length() >> 1)
    if width < _NARROWEST_ROW:
        return _bytewise(raw.tobytes(), 0xFFFFFFFF) ^ 0xFFFFFFFF
    rows = _fold_chunks(raw, width)
    while width > _NARROWEST_ROW:
        width //= 2
        rows = _fold(rows.reshape(-1, width // 4))
    return _bytewise(rows.tobytes(), 0) ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """The checksum as TensorFlow and LevelDB store it: rotated and shifted, so that it is no CRC of a CRC."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _fold_chunks(raw: NDArray[np.uint8], width: int) -> NDArray[np.uint32]:
    """The 32 rows that have the same remainder as the whole message."""
    rows = np.zeros((_REMAINDER_ROWS + _CHUNK_ROWS, width // 4), np.uint32)
    every_byte = rows.reshape(-1).view(np.uint8)
    chunk = every_byte[_REMAINDER_ROWS * width :]
    # Zeros in front of a message leave its remainder alone, so the odd piece goes first, to the buffer's end.
    odd = (raw.size - 4) % chunk.size + 4
    every_byte[-odd:] = raw[:odd]
    every_byte[every_byte.size - odd :][:4] ^= 0xFF  # the register starts as ones, not as zeros
    for start in range(odd, raw.size, chunk.size):
        rows[:_REMAINDER_ROWS] = _fold(rows)
        chunk[:] = raw[start : start + chunk.size]
    return _fold(rows)


def _fold(rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Divide in place: each row but the last 32 is carried into later rows; gives the last 32."""
    for start in range(0, len(rows) - _REMAINDER_ROWS, _ROWS_AT_ONCE):
        carried = rows[start : start + _ROWS_AT_ONCE]
        for distance in _DISTANCES:
            target = rows[start + distance : start + distance + _ROWS_AT_ONCE]
            np.bitwise_xor(target, carried, out=target)
    return rows[-_REMAINDER_ROWS:]


def _bytewise_table() -> tuple[int, ...]:
    """The remainder of each byte value."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ _REFLECTED_POLYNOMIAL * (crc & 1) for crc in table]
    return tuple(table)


_TABLE = _bytewise_table()


def _bytewise(data: bytes, crc: int) -> int:
    """The checksum register after these bytes."""
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc
