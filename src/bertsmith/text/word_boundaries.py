"""Word boundaries in a row of token ids, for every kind of vocabulary.

In WordPiece each piece shows whether it begins a word. In other vocabularies a word begins at a piece with a
space before it, at a Chinese or Japanese character, and between letters, digits and other characters.
"""

import json
import unicodedata
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertsmith.text.tokenizer import Tokenizer

Flags = NDArray[np.bool_]

_ANY, _LETTER, _DIGIT, _MARK, _CHINESE = range(5)


class _Ends(NamedTuple):
    """Flag that a piece always begins a word, and the kinds of its first and last characters."""

    opens: bool
    first: int = _ANY
    last: int = _ANY


class WordBoundaries:
    """The kinds of the first and last character of each id's piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pipeline = json.loads(tokenizer.spec.pipeline)
        model = pipeline["model"]
        numbers = sorted(set(range(tokenizer.vocabulary_size)) - set(tokenizer.gaps))
        pieces = [tokenizer.token(number) for number in numbers]
        if model["type"] == "WordPiece":
            inside = model["continuing_subword_prefix"]
            found = [_Ends(opens=not piece.startswith(inside)) for piece in pieces]
        elif '"ByteLevel"' in json.dumps(pipeline["pre_tokenizer"]):
            found = [_ends_of_bytes(piece) for piece in pieces]
        else:  # SentencePiece writes a space as ▁
            found = [_ends(piece.replace("▁", " ")) for piece in pieces]
        ends = np.zeros((3, tokenizer.vocabulary_size), np.uint8)
        ends[:, numbers] = np.array(found).T
        self._opens, self._first, self._last = ends[0] > 0, ends[1], ends[2]

    def begins(self, ids: NDArray[Any], sentence_lengths: NDArray[np.int64]) -> Flags:
        """Return for each token, and for the position after the last, True if a word begins there."""
        begins = np.ones(len(ids) + 1, np.bool_)
        begins[:-1] = self._opens[ids]
        # Words begin between characters of two kinds, but never within the kind _ANY (all WordPiece pieces).
        first = self._first[ids[1:]]
        begins[1:-1] |= (first != _ANY) & (first != self._last[ids[:-1]])
        begins[np.cumsum(sentence_lengths) - sentence_lengths] = True
        return begins


def _ends(text: str) -> _Ends:
    bare = text.strip() or " "
    opens = text[:1].isspace() or _kind(bare[0]) == _CHINESE
    return _Ends(opens, _kind(bare[0]), _kind(bare[-1]))


def _kind(character: str) -> int:
    if "\u3040" <= character <= "\u9fff":
        return _CHINESE
    category = unicodedata.category(character)[0]
    if category in "LM" or character == "\ufffd":  # incomplete bytes of a character are treated as a letter
        return _LETTER
    return _DIGIT if category == "N" else _MARK


def _ends_of_bytes(piece: str) -> _Ends:
    if not all(character in _BYTES for character in piece):  # added tokens are plain text
        return _ends(piece)
    raw = bytes(_BYTES[character] for character in piece)
    ends = _ends(raw.decode(errors="replace"))
    if raw[0] & 0xC0 == 0x80:  # starts in the middle of a character
        return _Ends(opens=False, first=_ANY, last=ends.last)
    if raw[0] in _CHINESE_BYTES and ends.first == _LETTER:  # ends in the middle of a character
        return _Ends(opens=True, first=_CHINESE, last=ends.last)
    return ends


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: visible characters are themselves, the rest is from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    shifted = {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in visible} | shifted


_BYTES = _byte_alphabet()
_CHINESE_BYTES = frozenset([*range(0xE3, 0xEA), 0xEF])  # kana and wide marks also begin with these
