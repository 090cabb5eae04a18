"""What each character of Unicode is, as tables that numpy looks up for a whole text at once."""

import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8] | NDArray[np.uint32]

OTHER, SPACE, LETTER, DIGIT, PUNCTUATION, SYMBOL = range(6)
_CLASSES = {"L": LETTER, "M": LETTER, "N": DIGIT, "P": PUNCTUATION, "S": SYMBOL, "Z": SPACE}
LOOKED_UP = 0x20000  # the two planes above hold ideographs only, and the rest nothing that is text
_LAST_SPACE = 0x3000
# They come with emoji and ideographs, or draw a key around a digit, and are no letters of their own.
_DECORATIONS = (slice(0xFE00, 0xFE10), slice(0x20DD, 0x20F1))


def codes_of(text: str) -> Codes:
    """The code points of a text, in one byte each if that is enough."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


@cache
def class_table() -> NDArray[np.uint8]:
    """For each code point one of OTHER, SPACE, LETTER (with its marks), DIGIT, PUNCTUATION, SYMBOL."""
    table = np.full(0x110000, OTHER, np.uint8)
    categories = map(unicodedata.category, map(chr, range(LOOKED_UP)))
    table[:LOOKED_UP] = [_CLASSES.get(category[0], OTHER) for category in categories]
    table[LOOKED_UP : 2 * LOOKED_UP] = LETTER
    table[[code for code in range(_LAST_SPACE + 1) if chr(code).isspace()]] = SPACE
    for decorations in _DECORATIONS:
        table[decorations] = OTHER
    return table
