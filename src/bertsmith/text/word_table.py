"""A table from words to their token ids that looks up whole arrays of words at once.

A word of up to 23 bytes is its own key: three 64-bit numbers with its bytes and its length. Equal keys mean
equal words, so hash collisions cannot cause errors. Longer words are stored in a dictionary.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges

MAX_KEY_BYTES = 23
MARGIN = 32
"""Bytes that must follow the last word in a text, because keys are read whole."""
CAPACITY = 1 << 19  # words, in about 50 MB; 150 MB of English have this many distinct words
USUAL_BYTES = 32  # per word; texts without spaces could have words of any length and fill the memory

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Keys = NDArray[np.uint64]  # [3, words]

_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_FIRST_SLOTS = 1 << 16
_SPARSENESS = 4  # slots per word: at this density few words need a second slot
_LENGTH_SHIFT = np.uint64(56)  # the last byte of the third number


class Entry(NamedTuple):
    """The ids of a word, and how many words the tokenizer counts in it."""

    ids: Sequence[int]
    words: int


class Found(NamedTuple):
    """The ids of words, one after the other, and for each word its numbers of ids and of words."""

    ids: NDArray[Any]
    counts: Numbers
    words: Numbers


class WordTable:
    """A cache of the ids of words; each word is encoded once, and a full table is cleared."""

    def __init__(self, encode: Callable[[bytes], Entry], *, id_type: str, capacity: int = CAPACITY) -> None:
        self._encode, self._id_type, self._capacity = encode, id_type, capacity
        self._forget()

    def find(self, text: Bytes, starts: Numbers, *, lengths: Numbers) -> Found:
        """Return the ids of these words of a text, encoding new ones."""
        if self._keys.size >= self._capacity or self._bytes >= USUAL_BYTES * self._capacity:
            self._forget()
        # Equal keys mean equal words, so a hit needs no comparison with the text. A miss runs Python code
        # once and is a hit from then on.
        words = self._find(_keys(text, starts, lengths=lengths))
        words[lengths > MAX_KEY_BYTES] = -1  # their truncated keys may equal other words' keys
        missing = np.flatnonzero(words < 0)
        if len(missing):
            raw, first, last = text.tobytes(), starts[missing], (starts + lengths)[missing]
            missed = [raw[start:end] for start, end in zip(first.tolist(), last.tolist(), strict=True)]
            fresh = [word for word in dict.fromkeys(missed) if word not in self._long]
            numbers = {word: number for number, word in enumerate(fresh, self._keys.size)}
            self._append(fresh)
            self._long |= {word: number for word, number in numbers.items() if len(word) > MAX_KEY_BYTES}
            words[missing] = [numbers[word] if word in numbers else self._long[word] for word in missed]
        counts = self._counts.values[0].take(words)
        indices = ranges(self._offsets.values[0].take(words), counts)
        return Found(self._ids.values[0].take(indices), counts, self._words.values[0].take(words))

    def _forget(self) -> None:
        # Everything at once: dropping only the rarest would need a count for each lookup, and the words that
        # make up most of any text return within the next megabyte.
        self._keys = _Growing(3, "uint64")  # a word's number is its index here and in the next three
        self._offsets, self._counts, self._words = (_Growing(1, "int32") for _ in range(3))
        self._ids = _Growing(1, self._id_type)
        self._slots = np.full(_FIRST_SLOTS, -1, np.int32)  # by hash: the number of a word, or -1
        self._long: dict[bytes, int] = {}
        self._bytes = 0

    def _find(self, keys: Keys) -> NDArray[np.int32]:
        """Return the numbers of the words with these keys; -1 if unknown."""
        # Linear probing for all words in step: each pass moves a word on if its slot has another word. At a
        # quarter full, nearly all arrive in the first pass.
        slots = _hashes(keys, len(self._slots))
        words = self._slots.take(slots)
        pending = np.flatnonzero(self._is_other(words, keys))
        while len(pending):
            slots[pending] = (slots[pending] + 1) % len(self._slots)
            words[pending] = self._slots.take(slots[pending])
            pending = pending[self._is_other(words[pending], keys[:, pending])]
        return words

    def _is_other(self, words: NDArray[np.int32], keys: Keys) -> NDArray[np.bool_]:
        """Return True for each slot that has another word than the one with this key."""
        if not self._keys.size:
            return np.zeros(len(words), np.bool_)
        pairs = zip(self._keys.values, keys, strict=True)
        first, second, third = (known.take(words) != wanted for known, wanted in pairs)
        other: NDArray[np.bool_] = (first | second | third) & (words >= 0)
        return other

    def _append(self, words: list[bytes]) -> None:
        coded = [self._encode(word) for word in words]
        self._bytes += sum(map(len, words))
        counts = np.array([len(entry.ids) for entry in coded], np.int64)
        self._offsets.extend(self._ids.size + np.cumsum(counts) - counts)
        self._counts.extend(counts)
        self._words.extend(np.array([entry.words for entry in coded], np.int64))
        self._ids.extend(np.fromiter(chain.from_iterable(entry.ids for entry in coded), self._id_type))
        lengths = np.array([len(word) for word in words], np.int64)
        raw = np.frombuffer(b"".join(words) + bytes(MARGIN), np.uint8)
        keys = _keys(raw, np.cumsum(lengths) - lengths, lengths=lengths)
        keys[:, lengths > MAX_KEY_BYTES] = 0  # long words are in the dictionary, not in a slot
        self._keys.extend(keys)
        pending = np.arange(self._keys.size - len(words), self._keys.size)
        if self._keys.size * _SPARSENESS > len(self._slots):  # too few slots: assign new ones to all words
            size = 1 << (self._keys.size * _SPARSENESS).bit_length()
            self._slots, pending = np.full(size, -1, np.int32), np.arange(self._keys.size)
        pending = pending[self._keys.values[2, pending] > 0]
        slots = _hashes(self._keys.values[:, pending], len(self._slots))
        while len(pending):
            free = self._slots.take(slots) < 0
            self._slots[slots[free]] = pending[free]  # if several words need one slot, the last gets it
            left = self._slots.take(slots) != pending
            pending, slots = pending[left], (slots[left] + 1) % len(self._slots)


class _Growing:
    """Rows of values with spare capacity at the end."""

    def __init__(self, rows: int, kind: str) -> None:
        self._buffer, self.size = np.empty((rows, 1024), kind), 0

    @property
    def values(self) -> NDArray[Any]:
        return self._buffer[:, : self.size]

    def extend(self, values: NDArray[Any]) -> None:
        end = self.size + values.shape[-1]
        if end > self._buffer.shape[1]:  # at least doubled, so that each value is copied only a few times
            more = np.empty((len(self._buffer), end), self._buffer.dtype)
            self._buffer = np.concatenate([self.values, more], axis=1)
        self._buffer[:, self.size : end] = values
        self.size = end


# For each length of a word, the bits of the three numbers that its bytes use.
_COVERED = np.arange(24) < np.arange(MAX_KEY_BYTES + 1)[:, None]
_MASKS = np.ascontiguousarray(np.where(_COVERED, 255, 0).astype(np.uint8).view("<u8").T, np.uint64)


def _keys(text: Bytes, starts: Numbers, *, lengths: Numbers) -> Keys:
    """Return the keys of these words; keys of words that are too long are meaningless."""
    # The eight bytes from every offset of the text: a copy of eight times its size, but faster by half.
    eights = np.ascontiguousarray(np.ndarray(len(text) - 7, "<u8", buffer=text, strides=(1,)))
    kept = np.minimum(lengths, MAX_KEY_BYTES)
    keys = np.stack([eights.take(starts + 8 * row) & mask.take(kept) for row, mask in enumerate(_MASKS)])
    keys[2] |= kept.astype(np.uint64) << _LENGTH_SHIFT
    return keys


def _hashes(keys: Keys, slots: int) -> Numbers:
    """Return a slot for each key, out of 2, 4, 8 ... slots."""
    mixed = keys[0] * _FACTORS[0] + keys[1] * _FACTORS[1] + keys[2] * _FACTORS[2]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _FACTORS[0]
    numbers: Numbers = (mixed >> np.uint64(65 - slots.bit_length())).astype(np.int64)
    return numbers
