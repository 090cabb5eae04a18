"""Sequences filled with contiguous sentences, across documents or within them (Liu et al. 2019, 4.2).

A sentence longer than the room is cut into pieces of exactly the room's size, the last one taking the rest; a
piece then counts as a sentence. Nothing is drawn, so every epoch has the same sequences, in another order and
with other masks, as in the published code.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.examples.pairs import (
    ExampleIndex,
    Numbers,
    Sentences,
    document_blocks,
    followed,
    joined,
    ranges,
    single_segments,
)


@dataclass(frozen=True, slots=True)
class FillRules:
    """How much fits into a sequence."""

    room: int
    """Most tokens of text, and of separators between documents."""
    specials: int
    """How many special tokens come on top."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Sentences, none longer than the room, one after the other."""

    start: Numbers
    length: Numbers
    document: Numbers  # counted within the block


def fill_across_documents(sentences: Sentences, rules: FillRules) -> ExampleIndex:
    """Sequences that go on into the next document of the split, behind a separator."""
    # Filling starts anew with each block of about a million sentences, so that memory stays bounded.
    return joined([_filled(sentences, block, rules, 1) for block in document_blocks(sentences)])


def fill_within_documents(sentences: Sentences, rules: FillRules) -> ExampleIndex:
    """Sequences none of which leaves its document."""
    # A separator as large as the room closes every sequence at the end of its document.
    return joined([_filled(sentences, block, rules, rules.room) for block in document_blocks(sentences)])


class SplitText:
    """The text of a split as one stretch: knows in which documents a part of it lies."""

    def __init__(self, sentences: Sentences) -> None:
        starts, documents = sentences.document_starts, sentences.documents
        self._begin = sentences.sentence_starts[starts[documents]]
        self._length = sentences.sentence_starts[starts[documents + 1]] - self._begin
        self._before = np.cumsum(self._length) - self._length

    def parts(self, start: Numbers, length: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """How many documents each stretch touches; where each of these parts starts, and its length."""
        document = np.searchsorted(self._begin, start, side="right") - 1
        offset = self._before[document] + start - self._begin[document]
        count = np.searchsorted(self._before, offset + length) - document
        each = ranges(document, count)
        first = np.maximum(np.repeat(offset, count), self._before[each])
        last = np.minimum(np.repeat(offset + length, count), self._before[each] + self._length[each])
        return count, self._begin[each] + first - self._before[each], last - first


def _filled(sentences: Sentences, block: Numbers, rules: FillRules, separators: int) -> ExampleIndex:
    pieces = _cut_into_pieces(sentences, sentences.documents[block], room=rules.room)
    before = np.cumsum(pieces.length) - pieces.length
    # With separators counted, the pieces from p to q fit if q ends within the room that starts with p.
    place = before + pieces.document * separators
    end = np.searchsorted(place + pieces.length, place + rules.room, side="right")
    first = followed(end - np.arange(len(end)))
    last = end[first] - 1
    length = before[last] + pieces.length[last] - before[first]
    filled = place[last] + pieces.length[last] - place[first]
    return single_segments(pieces.start[first], length, whole=filled + rules.specials)


def _cut_into_pieces(sentences: Sentences, documents: Numbers, *, room: int) -> _Pieces:
    begins, ends = sentences.document_starts[documents], sentences.document_starts[documents + 1]
    sentence = ranges(begins, ends - begins)
    start, end = sentences.sentence_starts[sentence], sentences.sentence_starts[sentence + 1]
    count = -(-(end - start) // room)
    begin = np.repeat(start, count) + ranges(np.zeros_like(count), count) * room
    length = np.minimum(np.repeat(end, count) - begin, room)
    document = np.repeat(np.repeat(np.arange(len(documents)), ends - begins), count)
    return _Pieces(begin, length, document)
