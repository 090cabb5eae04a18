"""Spans written as tags of words: IOB1, IOB2 and BIOES, read as conlleval reads them.

`B-PER` begins a span of type PER, `I-` goes on, `E-` ends it, `S-` is a span of one word. In IOB1 (the files
of CoNLL-2003) `B-` stands only where a span follows another of its type; in IOB2 it begins every span. A bare
letter of the scheme belongs to a span without a type; every other tag (O, NOUN) to none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Scheme = Literal["iob1", "iob2", "bioes"]

LETTERS: dict[Scheme, frozenset[str]] = {
    "iob1": frozenset("BI"),
    "iob2": frozenset("BI"),
    "bioes": frozenset("BIES"),
}


@dataclass(frozen=True, slots=True)
class TagSpan:
    """Some neighbouring words and what they are together."""

    type: str
    """Empty where tags are bare letters."""
    first: int
    end: int
    """Past the last word."""


class _Part(NamedTuple):
    letter: str
    type: str


def spans_of(tags: Sequence[str], scheme: Scheme) -> list[TagSpan]:
    """The spans in order; an ill-formed I- or E- that nothing leads to begins a span, as in conlleval."""
    parts = [_part(tag, scheme) for tag in tags]
    spans, first = [], 0
    for place, (before, after) in enumerate(pairwise([None, *parts, None])):
        if not _goes_on(before, after):
            if before is not None:
                spans.append(TagSpan(before.type, first, place))
            first = place
    return spans


def scheme_of(tag_sequences: Iterable[Sequence[str]]) -> Scheme:
    """The scheme that most spans are written in; iob2 where nothing tells."""
    beginnings: Counter[str] = Counter()
    for tags in tag_sequences:
        parts = [_part(tag, "bioes") for tag in tags]
        for before, after in pairwise([None, *parts]):
            if after is not None and (after.letter in "ES" or before is None or before.type != after.type):
                beginnings[after.letter] += 1
    if beginnings["E"] or beginnings["S"]:
        return "bioes"
    return "iob1" if beginnings["I"] > beginnings["B"] else "iob2"


def _part(tag: str, scheme: Scheme) -> _Part | None:
    letter, dash, kind = tag.partition("-")
    known = LETTERS["bioes"] if dash else LETTERS[scheme]  # conlleval reads E- and S- in any file
    return _Part(letter, kind) if letter in known else None


def _goes_on(before: _Part | None, after: _Part | None) -> bool:
    """Whether two neighbours belong to one span."""
    if before is None or after is None:
        return False
    return before.letter in "BI" and after.letter in "IE" and before.type == after.type
