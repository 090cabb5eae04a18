"""Which sentences make an example, for all examples of a pass through the documents at once.

- pairs and single segments: BERT's walk through each document (create_pretraining_data.py). It gathers
  sentences until a target length is reached, divides them into A and B, and continues behind them, or,
  where B is random, behind A. Every draw belongs to the sentence at which an example begins, so where the
  walk would continue is known for all sentences at once, and the walk itself only follows these steps.
- pairs of single sentences (Liu et al. 2019, 4.2: SENTENCE-PAIR+NSP): the same walk, two sentences at a time.
- full sentences: sequences filled with contiguous sentences, across documents or within them (Liu et al.
  2019, 4.2). A sentence longer than the capacity is cut into pieces of exactly that size, the last one
  taking the rest; a piece then counts as a sentence. Nothing is random, so every epoch has the same
  sequences, in another order and with other masks, as in the published code; unless some are to be short.

Shapes: N spans of text, S sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges
from bertsmith.core.progress import progress_bar
from bertsmith.core.seeds import Words, bits, key_of, sub_keys, uniforms

Numbers = NDArray[np.int64]

# As published: this many attempts at a random document that is not the one being walked.
RANDOM_DOCUMENT_TRIES = 10

# Sentences handled together; bounds the memory that a large store takes.
BLOCK_SENTENCES = 1 << 20

# Numbers of the draws that belong to one sentence. They must never change: a run that resumes would get other
# examples, under an index of the same name.
_SPLIT, _NEGATIVE, _START, _TRIES, _DRAWS = 0, 1, 2, 3, 16


@dataclass(frozen=True, slots=True)
class Sentences:
    """Where the documents of a split and their sentences lie in the store."""

    sentence_starts: Numbers  # in tokens
    document_starts: Numbers  # in sentences
    documents: Numbers
    """The documents of the split, ascending: of no other one is anything shown."""


@dataclass(frozen=True, slots=True)
class WalkRules:
    """How documents become examples, and the random numbers it is done with."""

    kind: Literal["nsp", "sop", "sentence-pair", "none"]
    capacity: int
    """Most tokens of text in an example."""
    specials: int
    """How many special tokens come on top."""
    negative_probability: float
    short_probability: float
    seed: int
    purpose: tuple[int | str, ...]
    """What tells this pass through the documents from every other one with the same seed."""


@dataclass(frozen=True, slots=True)
class ExampleIndex:
    """Examples in the order of the store: spans of its tokens before truncation, and the final lengths."""

    first_start: Numbers
    first_length: NDArray[np.int32]
    second_start: Numbers
    second_length: NDArray[np.int32]
    """0 where the example is a single segment."""
    label: NDArray[np.int8]
    """1: the second segment is random, or the two are swapped."""
    length: NDArray[np.int32]
    """Tokens in the end: after truncation, special tokens counted."""

    def __len__(self) -> int:
        return len(self.label)

    def rows(self, numbers: Numbers | slice) -> "ExampleIndex":
        """The examples with these numbers."""
        return ExampleIndex(*(getattr(self, field.name)[numbers] for field in fields(self)))


def walk_documents(sentences: Sentences, rules: WalkRules) -> ExampleIndex:
    """All examples of one pass through the documents."""
    return joined([_Walk(sentences, rules, block).examples() for block in document_blocks(sentences)])


def document_blocks(sentences: Sentences) -> Iterator[Numbers]:
    """The indices, within the split, of documents that together hold about BLOCK_SENTENCES sentences."""
    starts, documents = sentences.document_starts, sentences.documents
    ends = np.cumsum(starts[documents + 1] - starts[documents])
    cuts = np.flatnonzero(np.diff(ends // BLOCK_SENTENCES)) + 1
    with progress_bar("examples of an epoch", len(documents)) as advance:
        for block in np.split(np.arange(len(documents)), cuts):
            yield block
            advance(len(block))


def joined(parts: list[ExampleIndex]) -> ExampleIndex:
    """The examples of several parts, one after the other."""
    return ExampleIndex(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(ExampleIndex))
    )


def target_lengths(rules: WalkRules, documents: Numbers) -> Numbers:
    """How many tokens of text each document's examples aim at in this pass: usually the whole capacity."""
    # One for each document and pass, as published: create_pretraining_data.py draws it before its loop.
    keys = sub_keys(key_of(rules.seed, "target", *rules.purpose), documents)
    is_short = uniforms(keys, np.uint64(0)) < rules.short_probability
    return np.where(is_short, draw_between(2, rules.capacity, uniforms(keys, np.uint64(1))), rules.capacity)


def draw_between(lowest: int, highest: int | Numbers, uniform: NDArray[np.float64]) -> Numbers:
    """Whole numbers from lowest to highest, both included, for numbers in [0, 1)."""
    return lowest + (uniform * (highest - lowest + 1)).astype(np.int64)


class _Walk:
    """The walk through some documents of the split; its arrays have one entry a sentence."""

    def __init__(self, sentences: Sentences, rules: WalkRules, block: Numbers) -> None:
        # For every sentence, also those at which no example will begin: where the walk steps is known only
        # when it has been walked, and one pass of numpy over all costs less than a Python loop over some.
        self.all, self.rules = sentences, rules
        documents = sentences.documents[block]
        begins, ends = sentences.document_starts[documents], sentences.document_starts[documents + 1]
        counts = ends - begins
        self.document_index = np.repeat(block, counts)
        self.in_document = ranges(np.zeros_like(counts), counts)
        self.first = ranges(begins, counts)
        self.target = np.repeat(target_lengths(rules, documents), counts)
        self.key = np.repeat(sub_keys(key_of(rules.seed, "walk", *rules.purpose), documents), counts)
        if rules.kind == "sentence-pair":
            self.target[:] = 0  # so that a random B is one sentence
            self.end = np.minimum(self.first + 2, np.repeat(ends, counts))
        else:
            self.end = self._reach(self.first, self.target, before=np.repeat(ends, counts))
        self.count = self.end - self.first

    def examples(self) -> ExampleIndex:
        """The examples along the walk."""
        everywhere, negative = slice(None), self.rules.negative_probability
        if self.rules.kind in ("nsp", "sentence-pair"):
            split = self._split(everywhere)
            is_random = (self.count == 1) | (self._draw(_NEGATIVE, everywhere) < negative)
            # What a random B leaves unused is put back: the walk continues behind A.
            at = followed(np.where(is_random, split, self.count))
            return self._pairs(at, split[at], is_random=is_random[at])
        at = followed(self.count)
        if self.rules.kind == "none":
            start, end = self.all.sentence_starts[self.first[at]], self.all.sentence_starts[self.end[at]]
            return single_segments(start, end - start, whole=self._whole(end - start))
        # A single sentence cannot be swapped; ALBERT's code falls back on a random second segment.
        pairs = self._pairs(at, self._split(at), is_random=self.count[at] == 1)
        swapped = (self.count[at] > 1) & (self._draw(_NEGATIVE, at) < negative)
        return ExampleIndex(
            first_start=np.where(swapped, pairs.second_start, pairs.first_start),
            first_length=np.where(swapped, pairs.second_length, pairs.first_length),
            second_start=np.where(swapped, pairs.first_start, pairs.second_start),
            second_length=np.where(swapped, pairs.first_length, pairs.second_length),
            label=pairs.label | swapped,
            length=pairs.length,
        )

    def _pairs(self, at: Numbers, split: Numbers, *, is_random: NDArray[np.bool_]) -> ExampleIndex:
        """The examples that begin here: A, and what follows it or a random second segment."""
        starts, first = self.all.sentence_starts, self.first[at]
        begin, middle, end = starts[first], starts[first + split], starts[self.end[at]]
        length, second_start, second_length = middle - begin, middle, end - middle
        rest = (self.target[at] - length)[is_random]
        second_start[is_random], second_length[is_random] = self._random_second(at[is_random], target=rest)
        return ExampleIndex(
            first_start=begin,
            first_length=length.astype(np.int32),
            second_start=second_start,
            second_length=second_length.astype(np.int32),
            label=is_random.astype(np.int8),
            length=self._whole(length + second_length).astype(np.int32),
        )

    def _random_second(self, at: Numbers, *, target: Numbers) -> tuple[Numbers, Numbers]:
        """Where a random second segment starts for examples that begin here, and its length."""
        # As published, the own document is drawn again; after so many tries it is taken all the same, so that
        # a store of one document has pairs too.
        own = self.document_index[at]
        chosen, again = own.copy(), np.arange(len(at))
        for attempt in range(RANDOM_DOCUMENT_TRIES):
            uniform = self._draw(_TRIES + attempt, at[again])
            chosen[again] = draw_between(0, len(self.all.documents) - 1, uniform)
            again = again[chosen[again] == own[again]]
        document = self.all.documents[chosen]
        begin, end = self.all.document_starts[document], self.all.document_starts[document + 1]
        first = begin + draw_between(0, end - begin - 1, self._draw(_START, at))
        last = np.maximum(self._reach(first, target, before=end), first + 1)
        start = self.all.sentence_starts[first]
        return start, self.all.sentence_starts[last] - start

    def _split(self, at: Numbers | slice) -> Numbers:
        """How many of the gathered sentences go into A; of two or more, one is left for B."""
        count = self.count[at]
        return np.where(count > 1, draw_between(1, count - 1, self._draw(_SPLIT, at)), 1)

    def _draw(self, which: int, at: Numbers | slice) -> NDArray[np.float64]:
        counters = (self.in_document[at] * _DRAWS + which).astype(np.uint64)
        return uniforms(self.key[at], counters)

    def _whole(self, text: Numbers) -> Numbers:
        """The final length of sequences with this much text."""
        return np.minimum(text, self.rules.capacity) + self.rules.specials

    def _reach(self, first: Numbers, target: Numbers, *, before: Numbers) -> Numbers:
        """The end of the sentences from `first` on that together reach the target, or the document's end."""
        starts = self.all.sentence_starts
        return np.minimum(np.searchsorted(starts, starts[first] + target), before)


def single_segments(start: Numbers, length: Numbers, *, whole: Numbers) -> ExampleIndex:
    """Examples of one segment each, with their final lengths."""
    return ExampleIndex(
        first_start=start,
        first_length=length.astype(np.int32),
        second_start=np.zeros(len(start), np.int64),
        second_length=np.zeros(len(start), np.int32),
        label=np.zeros(len(start), np.int8),
        length=whole.astype(np.int32),
    )


def followed(steps: Numbers) -> Numbers:
    """The indices that a walk from index 0 on visits, the step at each being given.

    Each document's steps end exactly where the next document begins, so one walk visits all of them.
    """
    # A plain loop over a list: a step takes 50 ns, however long the longest document is.
    distances: list[int] = steps.tolist()
    visited, index = [], 0
    while index < len(distances):
        visited.append(index)
        index += distances[index]
    return np.array(visited, np.int64)


@dataclass(frozen=True, slots=True)
class FillRules:
    """How much fits into a sequence."""

    capacity: int
    """Most tokens of text, and of separators between documents."""
    specials: int
    """How many special tokens come on top."""
    short_fraction: float = 0.0
    """Of the sequences, those that are filled to a random shorter length only."""
    short_length: int = 0
    key: int = 0
    """What the random numbers of an epoch belong to."""

    def limits(self, starts: Numbers) -> Numbers:
        """To how many tokens each sequence is filled that begins at this token of the store."""
        if not self.short_fraction:
            return np.full(len(starts), self.capacity)
        keys = sub_keys(self.key, starts)
        is_short = uniforms(keys, np.uint64(0)) < self.short_fraction
        longest = min(self.short_length, self.capacity)
        return np.where(is_short, draw_between(1, longest, uniforms(keys, np.uint64(1))), self.capacity)


def fill_across_documents(sentences: Sentences, rules: FillRules) -> ExampleIndex:
    """Sequences that continue into the next document of the split, behind a separator."""
    # Filling starts anew with each block of about a million sentences, so that memory stays bounded.
    return joined([_filled(sentences, block, rules, 1) for block in document_blocks(sentences)])


def fill_within_documents(sentences: Sentences, rules: FillRules) -> ExampleIndex:
    """Sequences none of which leaves its document."""
    # A separator as large as the capacity closes every sequence at the end of its document.
    return joined([_filled(sentences, block, rules, rules.capacity) for block in document_blocks(sentences)])


class SplitText:
    """The text of a split as one stretch: knows in which documents a part of it lies."""

    def __init__(self, sentences: Sentences) -> None:
        # Documents of a split are not neighbours in the store: those of the other split stand between them.
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
    documents = sentences.documents[block]
    begins, ends = sentences.document_starts[documents], sentences.document_starts[documents + 1]
    sentence = ranges(begins, ends - begins)
    start, end = sentences.sentence_starts[sentence], sentences.sentence_starts[sentence + 1]
    # Sentences become pieces, none longer than the capacity; from here on arrays have an entry a piece.
    count = -(-(end - start) // rules.capacity)
    piece_start = np.repeat(start, count) + ranges(np.zeros_like(count), count) * rules.capacity
    piece_length = np.minimum(np.repeat(end, count) - piece_start, rules.capacity)
    document = np.repeat(np.repeat(np.arange(len(documents)), ends - begins), count)
    before = np.cumsum(piece_length) - piece_length
    # With separators counted, the pieces from p to q fit if q ends within one capacity from where p starts.
    offset = before + document * separators
    limits = rules.limits(piece_start)
    next_piece = np.searchsorted(offset + piece_length, offset + limits, side="right")
    next_piece = np.maximum(next_piece, np.arange(1, len(next_piece) + 1))  # a short one has a sentence, too
    first = followed(next_piece - np.arange(len(next_piece)))
    last = next_piece[first] - 1
    length = before[last] + piece_length[last] - before[first]
    filled = offset[last] + piece_length[last] - offset[first]
    return single_segments(piece_start[first], length, whole=filled + rules.specials)


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of the store that become the text of sequences, in their order."""

    counts_S: Numbers
    """How many spans each sequence has."""
    starts_N: Numbers
    lengths_N: Numbers


def truncated_spans(examples: ExampleIndex, *, capacity: int, keys_S: Words) -> Spans:
    """The spans of the examples, cut down to `capacity` tokens of text each.

    As published: the longer segment, on a tie the second, loses its first or its last token, each with
    probability 1/2, until both fit.
    """
    # Where the loop of single losses ends, without walking it: the shorter segment keeps all it has, or both
    # end at half of the capacity, and on a tie the second loses, so that the first has the odd token.
    first, second = examples.first_length.astype(np.int64), examples.second_length.astype(np.int64)
    kept_first = np.minimum(first, np.maximum(capacity - second, (capacity + 1) // 2))
    kept_second = np.minimum(second, capacity - kept_first)
    starts = [
        examples.first_start + _lost_in_front(keys_S, first - kept_first, segment=0),
        examples.second_start + _lost_in_front(keys_S, second - kept_second, segment=1),
    ]
    starts_S2, lengths_S2 = np.stack(starts, axis=1), np.stack([kept_first, kept_second], axis=1)
    exists_S2 = lengths_S2 > 0
    return Spans(exists_S2.sum(axis=1), starts_S2[exists_S2], lengths_S2[exists_S2])


def _lost_in_front(keys_S: Words, lost_S: Numbers, *, segment: int) -> Numbers:
    """How many of the lost tokens were the first at the time: one random bit for each loss."""
    # Bits come in words of 64: a sequence takes as many words as its losses need, and of the last one the
    # bits that no loss needs are shifted out before the ones are counted.
    words_S = -(-lost_S // 64)
    row, word = np.repeat(np.arange(len(lost_S)), words_S), ranges(np.zeros_like(words_S), words_S)
    sampled = bits(keys_S[row], (word + (segment << 32)).astype(np.uint64))
    unused = np.maximum(64 * (word + 1) - lost_S[row], 0).astype(np.uint64)
    heads = np.bitwise_count(sampled << unused)
    return np.bincount(row, weights=heads, minlength=len(lost_S)).astype(np.int64)
