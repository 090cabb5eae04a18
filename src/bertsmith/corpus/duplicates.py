"""Duplicate documents, exact or near.

Near duplicates are found as in Lee et al. 2022 and FineWeb (Penedo et al. 2024): MinHash over runs of five
words, with bands of hashes as keys. Two texts with a fraction s of their runs in common share a band with
probability 1 - (1 - s**8)**16, which is 95 % at 0.8 and 6 % at 0.5. Texts that share a band are duplicates if
their signatures agree to NEAR_SIMILARITY. Workers compute fingerprints and signatures; one filter decides, in
order of arrival.
"""

import hashlib
from array import array
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.seeds import bits, key_of
from bertsmith.corpus.word_hashes import run_hashes, words_of

DuplicateKind = Literal["none", "exact", "near"]
Signature = NDArray[np.uint64]

NEAR_SIMILARITY = 0.8  # estimated Jaccard similarity of the sets of runs; Lee et al. 2022 require 0.8
RUN_WORDS = 5  # Lee et al. 2022, FineWeb
BANDS, ROWS = 16, 8  # near FineWeb's 14 bands of 8 hashes
_HASHES = BANDS * ROWS
_RUNS_AT_ONCE = 512  # 128 hashes of this many runs fit into the CPU cache


def exact_fingerprint(text: str) -> bytes:
    """Return 16 bytes that are equal only for texts that differ at most in case and white space."""
    plain = " ".join(text.lower().split())
    return hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def near_signature(text: str) -> Signature:
    """Return the near-duplicate signature: a key for each band, then the low bytes of all 128 minima."""
    words = words_of(text)
    if len(words):
        hashes = run_hashes(words.hashes, min(RUN_WORDS, len(words)))
        runs = (hashes >> np.uint64(32)).astype(np.uint32)
    else:  # only punctuation: only an exact copy is a duplicate
        runs = np.frombuffer(exact_fingerprint(text), np.dtype("<u4"))
    minima = _minima(runs)
    # A band's key is a hash of its eight minima; 0 would mark a free slot in the filter.
    rows = bits(np.arange(_HASHES, dtype=np.uint64), minima.astype(np.uint64)).reshape(BANDS, ROWS)
    keys = np.maximum(rows.sum(axis=1, dtype=np.uint64), np.uint64(1))
    # The low bytes of the minima suffice to compare two texts that share a band: two bytes agree by chance
    # once in 256 times, and a document then takes 128 bytes of memory instead of 512.
    return np.concatenate([keys, minima.astype(np.uint8).view(np.uint64)])


def _minima(runs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the minimum of each hash over all runs (MinHash, Broder 1997)."""
    factors, offsets = _permutations()
    minima = np.full(_HASHES, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(runs), _RUNS_AT_ONCE):
        hashed = factors * runs[start : start + _RUNS_AT_ONCE]
        hashed += offsets
        np.minimum(minima, hashed.min(axis=1), out=minima)
    return minima


@cache
def _permutations() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the factors (odd, so that each permutes all 32-bit numbers) and offsets of the hashes."""
    draws = bits(np.uint64(key_of(0, "minhash")), np.arange(2 * _HASHES, dtype=np.uint64)).astype(np.uint32)
    return draws[:_HASHES, None] | np.uint32(1), draws[_HASHES:, None]


class DuplicateFilter:
    """Documents seen so far: about 100 bytes each for exact duplicates, 700 for near ones."""

    def __init__(self, kind: DuplicateKind) -> None:
        self._kind = kind
        self._fingerprints: set[bytes] = set()
        self._first_with = _FirstSeen()
        self._sketches: list[bytes] = []

    def is_duplicate(self, fingerprint: bytes, signature: Signature | None = None) -> bool:
        """True if such a document came before; otherwise remember it. Only "near" needs the signature."""
        if self._kind == "none":
            return False
        # Remember only kept documents. Otherwise, in a chain of texts each near the one before, later texts
        # would be dropped because of texts that are not in the store.
        if fingerprint in self._fingerprints:
            return True
        if self._kind == "near":
            if signature is None:
                raise ValueError("near duplicates need a signature")
            if self._is_near_duplicate(signature):
                return True
        self._fingerprints.add(fingerprint)
        return False

    def _is_near_duplicate(self, signature: Signature) -> bool:
        """True if a similar signature was seen before; otherwise remember this one by its bands."""
        keys, sketch = signature[:BANDS].tolist(), signature[BANDS:]
        met = {number for key in keys if (number := self._first_with.get(key)) is not None}
        for number in met:
            other = np.frombuffer(self._sketches[number], np.uint8)
            if np.count_nonzero(other == sketch.view(np.uint8)) / len(other) >= NEAR_SIMILARITY:
                return True
        for key in keys:
            self._first_with.add(key, len(self._sketches))
        self._sketches.append(sketch.tobytes())
        return False


class _FirstSeen:
    """Maps each 64-bit key (never 0) to the first number added for it: a hash table in plain arrays.

    A dictionary would take four times the memory, and a large corpus has a hundred million keys.
    """

    def __init__(self) -> None:
        self._empty(slots=1 << 10)

    def get(self, key: int) -> int | None:
        """Return the number of a key, or None."""
        slot = self._slot(key)
        return self._numbers[slot] if self._keys[slot] else None

    def add(self, key: int, number: int) -> None:
        """Add a key, unless it is present."""
        slot = self._slot(key)
        if self._keys[slot]:
            return
        self._keys[slot], self._numbers[slot] = key, number
        self._used += 1
        # At most two thirds full, so that the search for a free slot stays short.
        if 3 * self._used > 2 * len(self._keys):
            keys, numbers = self._keys, self._numbers
            self._empty(slots=2 * len(keys))
            for old_key, old_number in zip(keys, numbers, strict=True):
                if old_key:
                    self.add(old_key, old_number)

    def _slot(self, key: int) -> int:
        """Return the slot with this key, or the free slot for it."""
        keys, slot = self._keys, key >> self._shift
        while (there := keys[slot]) and there != key:
            slot = (slot + 1) % len(keys)
        return slot

    def _empty(self, slots: int) -> None:
        self._keys, self._numbers = array("Q", bytes(8 * slots)), array("I", bytes(4 * slots))
        self._shift = 65 - slots.bit_length()  # the upper bits of a key select its first slot
        self._used = 0
