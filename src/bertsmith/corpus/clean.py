"""Document cleaning: repair wrongly decoded text, and drop documents that are too short or not prose.

The junk rules do not depend on the language: they look at characters and lines only. The rules from Gopher
(Rae et al. 2021, appendix A.1) keep its numbers; ours have limits far from running text in any script.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertsmith.core.errors import UserError
from bertsmith.corpus.documents import Document, tidied
from bertsmith.corpus.word_hashes import LETTER, SPACE, SYMBOL, class_table, codes_of

DropReason = Literal[
    "short", "junk: few letters", "junk: symbols", "junk: long words", "junk: repeated lines", "junk: lists"
]

MIN_LETTERS = 0.6  # of all characters except spaces; prose has above 0.85, a table of numbers under 0.4
MAX_SYMBOLS = 0.1  # of all characters except spaces; Gopher allows as many hashes and ellipses per word
SYMBOLS_AMONG_PUNCTUATION = "#*@\\_{}"  # punctuation according to Unicode
LONG_WORD = (
    50  # of ASCII: addresses, encoded bytes. Scripts without spaces have longer ones and are not ASCII
)
MAX_IN_LONG_WORDS = 0.3  # of all characters except spaces
MAX_REPEATED_LINES = 0.3  # Gopher: repeated lines, of all lines
MAX_REPEATED_CHARACTERS = 0.2  # Gopher: characters of repeated lines, of all characters
MAX_LIST_LINES = 0.9  # Gopher: lines that begin with a bullet; here also table rows
MIN_LIST = 3  # lines; fewer are not a list
BULLETS = ("- ", "* ", "•", "‣", "▪", "●", "◦", "·", "|")


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Settings: what to repair and what to drop."""

    repair_mojibake: bool = False
    minimum_characters: int = 0
    drop_junk: bool = False


def clean_document(document: Document, cleaning: Cleaning) -> Document | DropReason:
    """Return the document, repaired if requested, or the reason for dropping it."""
    if cleaning.repair_mojibake:
        document = Document(repaired(document.text), document.where)
    if len(document.text) < max(cleaning.minimum_characters, 1):
        return "short"
    return (junk_reason(document.text) if cleaning.drop_junk else None) or document


def repaired(text: str) -> str:
    """Repair wrongly decoded characters (`schÃ¶n`), line by line."""
    if text.isascii():
        return text
    try:
        from ftfy import fix_encoding
    except ImportError as error:
        raise UserError("repairing text needs ftfy", remedy="pip install 'bertsmith[data]'") from error
    # Line by line: ftfy repairs nothing in a text if one line is correct and has other characters.
    lines = text.split("\n")
    return tidied("\n".join(line if line.isascii() else fix_encoding(line) for line in lines))


def junk_reason(text: str) -> DropReason | None:
    """Return the reason why a text is not prose, or None."""
    codes, lines = codes_of(text), text.split("\n")
    counts = np.bincount(class_table().take(codes), minlength=SYMBOL + 1)
    total = len(codes) - counts[SPACE]
    if counts[LETTER] < MIN_LETTERS * total:
        return "junk: few letters"
    if counts[SYMBOL] + sum(map(text.count, SYMBOLS_AMONG_PUNCTUATION)) > MAX_SYMBOLS * total:
        return "junk: symbols"
    # A long word is a stretch of visible ASCII; any other character ends it.
    breaks = np.flatnonzero((codes <= ord(" ")) | (codes > ord("~")))
    lengths = np.diff(breaks, prepend=-1, append=len(codes)) - 1
    if lengths[lengths >= LONG_WORD].sum() > MAX_IN_LONG_WORDS * total:
        return "junk: long words"
    repeats = {line: count - 1 for line, count in Counter(lines).items() if count > 1}
    repeated_characters = sum(len(line) * count for line, count in repeats.items())
    too_many_lines = sum(repeats.values()) > MAX_REPEATED_LINES * len(lines)
    if too_many_lines or repeated_characters > MAX_REPEATED_CHARACTERS * sum(map(len, lines)):
        return "junk: repeated lines"
    listed = sum(line.startswith(BULLETS) or line.count("|") >= 2 for line in lines)
    if len(lines) >= MIN_LIST and listed > MAX_LIST_LINES * len(lines):
        return "junk: lists"
    return None
