"""Normalise a text to plain words at once: lower-cased, without punctuation, with a 64-bit hash each.

Words are separated by spaces, as in the comparison of Brown et al. 2020 (appendix C). In scripts without
spaces each character is a word. Hashes are the same in every process and on every machine.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Odd, so that no power vanishes modulo 2**64 and each has an inverse. Both from Steele and Vigna 2021.
_CHARACTER_STEP = 0xD1342543DE82EF95
_WORD_STEP = 0xF1357AEA2E62A9C5
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HASHED_AT_ONCE = 1 << 16  # characters, so that the powers stay in the CPU cache

# A folded character is its lower-case code with its kind in the upper bits; all others are smaller.
_DROPPED, _SPACE, _LINE_END = range(3)
_KIND_SHIFT, _CODE = 24, (1 << 24) - 1
_SPACED, _IDEOGRAPH, _SOUTH_EAST = 1, 2, 3
_WITHOUT_SPACES = {
    _IDEOGRAPH: (  # with the kana and Bopomofo written among them
        slice(0x3040, 0x3130),
        slice(0x31F0, 0x3200),
        slice(0x3400, 0x4DC0),
        slice(0x4E00, 0xA000),
        slice(0xF900, 0xFB00),
        slice(0xFF66, 0xFFA0),
        slice(0x20000, 0x40000),
    ),
    _SOUTH_EAST: (slice(0x0E00, 0x0F00), slice(0x1000, 0x10A0), slice(0x1780, 0x1800)),  # Thai to Khmer
}
# Approximate number of characters per word in the languages of a script without spaces.
_CHARACTERS_PER_WORD = {_SPACED: 1, _IDEOGRAPH: 2, _SOUTH_EAST: 5}
Codes = NDArray[np.uint8] | NDArray[np.uint32]
OTHER, SPACE, LETTER, DIGIT, PUNCTUATION, SYMBOL = range(6)
_CLASSES = {"L": LETTER, "M": LETTER, "N": DIGIT, "P": PUNCTUATION, "S": SYMBOL, "Z": SPACE}
LOOKED_UP = 0x20000  # the two planes above contain only ideographs; higher planes do not contain text
_LAST_SPACE = 0x3000
# They accompany emoji and ideographs, or draw a key around a digit; they are not letters.
_DECORATIONS = (slice(0xFE00, 0xFE10), slice(0x20DD, 0x20F1))


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text in order."""

    folded: NDArray[np.uint32]  # the words' characters, and the spaces between them
    starts: NDArray[np.int64]  # of each word in `folded`, and the end of the last one
    hashes: Hashes

    def __len__(self) -> int:
        return len(self.hashes)

    def run(self, first: int, count: int) -> str:
        """Return `count` words from the first on, separated by spaces."""
        bounds = self.starts[first : first + count + 1].tolist()
        words = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            folded = self.folded[start:end]
            codes = folded[folded > _LINE_END] & _CODE
            words.append(codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass"))
        return " ".join(words)

    def lines(self) -> NDArray[np.int64]:
        """Return the line number of each word, from 0."""
        return np.searchsorted(np.flatnonzero(self.folded == _LINE_END), self.starts[:-1])

    def characters_per_word(self) -> NDArray[np.int64]:
        """Return 1 for each word, or the usual characters per word if a single character is one."""
        factors = np.array([0, *_CHARACTERS_PER_WORD.values()], np.int64)
        return factors.take(self.folded[self.starts[:-1]] >> _KIND_SHIFT)


def words_of(text: str) -> Words:
    """Return the words of a text."""
    folded = _folding_table().take(codes_of(text.lower() if text.isascii() else text))
    folded = folded[folded != _DROPPED]
    within, alone = folded > _LINE_END, folded >= _IDEOGRAPH << _KIND_SHIFT
    # A word begins after a space, and at each border of a character that is a word by itself.
    begins = within.copy()
    begins[1:] &= ~within[:-1] | alone[1:] | alone[:-1]
    starts = np.append(np.flatnonzero(begins), len(folded))
    return Words(folded, starts, _hashes(folded * within, starts))


def run_hashes(words: Hashes, count: int) -> Hashes:
    """Return the hash of each run of `count` words: the sum of word * step**index, modulo 2**64."""
    if count == 1:
        return words
    half = count // 2
    part = run_hashes(words, half)
    runs: Hashes = part[:-half] + part[half:] * _step_power(half)
    return runs if count % 2 == 0 else runs[:-1] + words[count - 1 :] * _step_power(count - 1)


def run_hash(words: Hashes) -> np.uint64:
    """Return the hash of all these words as one run."""
    return np.uint64(run_hashes(words, len(words))[0])


def _step_power(exponent: int) -> np.uint64:
    return np.uint64(pow(_WORD_STEP, exponent, 1 << 64))


def _hashes(characters: NDArray[np.uint32], starts: NDArray[np.int64]) -> Hashes:
    """Return for each word the sum of character * step**index, modulo 2**64, mixed."""
    # A difference of running sums gives each word's sum. Its powers then start at the word's own offset; the
    # inverse of the first power removes that. All modulo 2**64, so nothing is lost.
    hashes = np.empty(len(starts) - 1, np.uint64)
    word = 0
    while word < len(hashes):
        begin = starts[word]
        end = max(word + 1, int(np.searchsorted(starts, begin + _HASHED_AT_ONCE, "right")) - 1)
        bounds = starts[word : end + 1] - begin
        powers, inverses = _powers(max(_HASHED_AT_ONCE, 1 << int(bounds[-1]).bit_length()))
        sums = np.zeros(bounds[-1] + 1, np.uint64)
        np.cumsum(characters[begin : starts[end]] * powers[: bounds[-1]], out=sums[1:])
        hashes[word:end] = (sums[bounds[1:]] - sums[bounds[:-1]]) * inverses[bounds[:-1]]
        word = end
    return (hashes ^ (hashes >> np.uint64(32))) * _MIX


@cache
def _powers(count: int) -> tuple[Hashes, Hashes]:
    steps = np.array([_CHARACTER_STEP, pow(_CHARACTER_STEP, -1, 1 << 64)], np.uint64)
    factors = np.repeat(steps[:, None], count, axis=1)
    factors[:, 0] = 1
    powers, inverses = np.multiply.accumulate(factors, axis=1)
    return powers, inverses


@cache
def _folding_table() -> NDArray[np.uint32]:
    classes = class_table()
    codes = np.arange(len(classes), dtype=np.uint32)
    small = [chr(code).lower() for code in range(LOOKED_UP)]
    codes[:LOOKED_UP] = [ord(low) if len(low) == 1 else code for code, low in enumerate(small)]
    kinds = np.full(len(classes), _SPACED, np.uint32)
    for kind, ranges in _WITHOUT_SPACES.items():
        for script in ranges:
            kinds[script] = kind
    table = np.where((classes == LETTER) | (classes == DIGIT), codes | kinds << _KIND_SHIFT, _DROPPED)
    table[classes == SPACE] = _SPACE
    table[ord("\n")] = _LINE_END
    return table.astype(np.uint32)


def codes_of(text: str) -> Codes:
    """Return the code points of a text, in one byte each if possible."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


@cache
def class_table() -> NDArray[np.uint8]:
    """Return for each code point one of OTHER, SPACE, LETTER (with its marks), DIGIT, PUNCTUATION, SYMBOL."""
    table = np.full(0x110000, OTHER, np.uint8)
    categories = map(unicodedata.category, map(chr, range(LOOKED_UP)))
    table[:LOOKED_UP] = [_CLASSES.get(category[0], OTHER) for category in categories]
    table[LOOKED_UP : 2 * LOOKED_UP] = LETTER
    table[[code for code in range(_LAST_SPACE + 1) if chr(code).isspace()]] = SPACE
    for decorations in _DECORATIONS:
        table[decorations] = OTHER
    return table
