"""Random draws as pure functions of seed, purpose and number, independent of earlier draws.

A key identifies a purpose; a counter numbers the draws under it. Draws can be made alone or as whole arrays,
in any order and any process.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# splitmix64 (Steele, Lea and Flood 2014): the odd step between states, and the two factors of its mixing.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MIX = np.uint64(0x94D049BB133111EB)


def key_of(seed: int, *parts: int | str) -> int:
    """Return a 64-bit key for this seed and purpose; different parts give unrelated keys."""
    # A number from a numpy array must give the same key as the same number from Python.
    plain = [part if isinstance(part, str) else int(part) for part in (int(seed), *parts)]
    spelled = repr(plain)
    return int.from_bytes(hashlib.blake2b(spelled.encode(), digest_size=8).digest(), "little")


def stream(seed: int, *parts: int | str) -> np.random.Generator:
    """Return a separate generator for this seed and purpose."""
    return np.random.Generator(np.random.Philox(key=key_of(seed, *parts)))


def sub_keys(key: int, numbers: NDArray[np.integer]) -> Words:
    """Return one key for each number (a document, an example) under a key."""
    # The constant separates the counters of sub-keys from those of draws under the same key.
    return bits(np.uint64(key), numbers.astype(np.uint64) ^ np.uint64(0x5851F42D4C957F2D))


def bits(keys: Words | np.uint64, counters: Words | np.uint64) -> Words:
    """Return 64 random bits for each key and counter, broadcast against each other."""
    # Not numpy's generators: creating one per key takes far longer than the few draws that a key needs. A
    # formula over arrays computes the draws of a million keys at once.
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        return _mixed(_mixed(np.asarray(counters, np.uint64) * _GOLDEN) + np.asarray(keys, np.uint64))


def uniforms(keys: Words | np.uint64, counters: Words | np.uint64) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each key and counter, from the upper 53 of its bits."""
    return (bits(keys, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(words: Words) -> Words:
    words = (words + _GOLDEN).astype(np.uint64)
    words = (words ^ (words >> np.uint64(30))) * _FIRST_MIX
    words = (words ^ (words >> np.uint64(27))) * _SECOND_MIX
    return words ^ (words >> np.uint64(31))
