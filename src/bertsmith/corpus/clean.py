"""Cleaning a document: repairing wrongly decoded text, and dropping what is too short or no prose.

The rules for junk need no language: they look at characters and lines only. Those of Gopher (Rae et al. 2021,
appendix A.1) keep its numbers; the others are ours, set far from what running text shows in any script.
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

MIN_LETTERS = 0.6  # of all characters but spaces; prose has above 0.85, a table of numbers under 0.4
MAX_SYMBOLS = 0.1  # of all characters but spaces; Gopher allows as many hashes and ellipses for each word
SYMBOLS_AMONG_PUNCTUATION = "#*@\\_{}"  # Unicode counts them as punctuation
LONG_WORD = (
    50  # of ASCII: addresses, encoded bytes. Scripts without spaces have longer ones and are not ASCII
)
MAX_IN_LONG_WORDS = 0.3  # of all characters but spaces
MAX_REPEATED_LINES = 0.3  # Gopher: lines that stood before, of all lines
MAX_REPEATED_CHARACTERS = 0.2  # Gopher: their characters, of all characters
MAX_LIST_LINES = 0.9  # Gopher: lines that begin with a bullet; here also rows of a table
MIN_LIST = 3  # lines; fewer are no list
BULLETS = ("- ", "* ", "•", "‣", "▪", "●", "◦", "·", "|")


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What is repaired and what is dropped."""

    repair_mojibake: bool = False
    minimum_characters: int = 0
    drop_junk: bool = False


def clean_document(document: Document, cleaning: Cleaning) -> Document | DropReason:
    """The document, repaired where asked, or why it is dropped."""
    if cleaning.repair_mojibake:
        document = Document(repaired(document.text), document.where)
    if len(document.text) < max(cleaning.minimum_characters, 1):
        return "short"
    return (junk_reason(document.text) if cleaning.drop_junk else None) or document


def repaired(text: str) -> str:
    """The text with wrongly decoded characters put right (`schÃ¶n`), line by line."""
    if text.isascii():
        return text
    try:
        from ftfy import fix_encoding
    except ImportError as error:
        raise UserError("repairing text needs ftfy", remedy="pip install 'bertsmith[data]'") from error
    # Line by line: one good line with other characters would keep a whole text from being repaired.
    lines = text.split("\n")
    return tidied("\n".join(line if line.isascii() else fix_encoding(line) for line in lines))


def junk_reason(text: str) -> DropReason | None:
    """Why a text is no prose, or None."""
    codes, lines = codes_of(text), text.split("\n")
    counts = np.bincount(class_table().take(codes), minlength=SYMBOL + 1)
    total = len(codes) - counts[SPACE]
    if counts[LETTER] < MIN_LETTERS * total:
        return "junk: few letters"
    if counts[SYMBOL] + sum(map(text.count, SYMBOLS_AMONG_PUNCTUATION)) > MAX_SYMBOLS * total:
        return "junk: symbols"
    # A long word is a stretch of visible ASCII; whatever else there is breaks it.
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
