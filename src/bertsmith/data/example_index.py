"""Choose the sentences of each example, for all examples of a pass through the documents at once.

- pairs and single segments: BERT's walk through each document (create_pretraining_data.py). It gathers
  sentences until a target length is reached and divides them into A and B. It continues after B, or after
  A if B is random. Every draw belongs to the sentence at which an example begins. So each possible next
  step is computed for all sentences at once, and the walk itself only follows these steps.
- pairs of single sentences (Liu et al. 2019, 4.2: SENTENCE-PAIR+NSP): the same walk, two sentences at a time.
- full sentences: sequences filled with contiguous sentences, across documents or within them (Liu et al.
  2019, 4.2). A sentence longer than the capacity is cut into pieces of exactly that size, and a shorter
  last one; a piece then counts as a sentence. Nothing is random (unless some sequences are to be short). So
  every epoch has the same sequences, in another order and with other masks, as in the published code.

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

# As published: attempts at a random document other than the current one.
RANDOM_DOCUMENT_TRIES = 10

# Sentences processed together; bounds the memory that a large store takes.
BLOCK_SENTENCES = 1 << 20

# Numbers of the draws that belong to one sentence. Never change them: a resumed run would get other examples
# under an index of the same name.
_SPLIT, _NEGATIVE, _START, _TRIES, _DRAWS = 0, 1, 2, 3, 16


@dataclass(frozen=True, slots=True)
class Sentences:
    """The boundaries of sentences and documents in the store, and the documents of a split."""

    sentence_starts: Numbers  # in tokens
    document_starts: Numbers  # in sentences
    documents: Numbers
    """Numbers of the split's documents, ascending."""


@dataclass(frozen=True, slots=True)
class WalkRules:
    """Settings of the walk that turns documents into examples, and the key of its random numbers."""

    kind: Literal["nsp", "sop", "sentence-pair", "none"]
    capacity: int
    """Maximum tokens of text in an example."""
    specials: int
    """Number of special tokens added to the text."""
    negative_probability: float
    short_probability: float
    seed: int
    purpose: tuple[int | str, ...]
    """Key that distinguishes this pass through the documents from other passes with the same seed."""


@dataclass(frozen=True, slots=True)
class ExampleIndex:
    """Examples in the order of the store: spans of its tokens before truncation, and the final lengths."""

    first_start: Numbers
    first_length: NDArray[np.int32]
    second_start: Numbers
    second_length: NDArray[np.int32]
    """0 if the example is a single segment."""
    label: NDArray[np.int8]
    """1 if the second segment is random or the two are swapped."""
    length: NDArray[np.int32]
    """Final length in tokens, after truncation, with special tokens."""

    def __len__(self) -> int:
        return len(self.label)

    def rows(self, numbers: Numbers | slice) -> "ExampleIndex":
        """Return the examples with these numbers."""
        return ExampleIndex(*(getattr(self, field.name)[numbers] for field in fields(self)))


def walk_documents(sentences: Sentences, rules: WalkRules) -> ExampleIndex:
    """Return all examples of one pass through the documents."""
    return joined([_Walk(sentences, rules, block).examples() for block in document_blocks(sentences)])


def document_blocks(sentences: Sentences) -> Iterator[Numbers]:
    """Yield indices, within the split, of documents with together about BLOCK_SENTENCES sentences."""
    starts, documents = sentences.document_starts, sentences.documents
    ends = np.cumsum(starts[documents + 1] - starts[documents])
    cuts = np.flatnonzero(np.diff(ends // BLOCK_SENTENCES)) + 1
    with progress_bar("examples of an epoch", len(documents)) as advance:
        for block in np.split(np.arange(len(documents)), cuts):
            yield block
            advance(len(block))


def joined(parts: list[ExampleIndex]) -> ExampleIndex:
    """Concatenate several parts into one index."""
    return ExampleIndex(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(ExampleIndex))
    )


def target_lengths(rules: WalkRules, documents: Numbers) -> Numbers:
    """Draw the target length in tokens of each document's examples in this pass: usually the capacity."""
    # One for each document and pass, as published: create_pretraining_data.py draws it before its loop.
    keys = sub_keys(key_of(rules.seed, "target", *rules.purpose), documents)
    is_short = uniforms(keys, np.uint64(0)) < rules.short_probability
    return np.where(is_short, draw_between(2, rules.capacity, uniforms(keys, np.uint64(1))), rules.capacity)


def draw_between(lowest: int, highest: int | Numbers, uniform: NDArray[np.float64]) -> Numbers:
    """Map numbers in [0, 1) to whole numbers from lowest to highest, both included."""
    return lowest + (uniform * (highest - lowest + 1)).astype(np.int64)


class _Walk:
    """The walk through some documents of the split; its arrays have one entry per sentence."""

    def __init__(self, sentences: Sentences, rules: WalkRules, block: Numbers) -> None:
        # Computed for every sentence, including those at which no example will begin: the walk's steps are
        # known only after it. One numpy pass over all sentences costs less than a Python loop over some.
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
        """Return the examples along the walk."""
        everywhere, negative = slice(None), self.rules.negative_probability
        if self.rules.kind in ("nsp", "sentence-pair"):
            split = self._split(everywhere)
            is_random = (self.count == 1) | (self._draw(_NEGATIVE, everywhere) < negative)
            # The sentences that a random B replaces are put back: the walk continues after A.
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
        """Return the examples that begin at these sentences: A, and its continuation or a random B."""
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
        """Return the start and the length of a random second segment for each of these examples."""
        # As published: if the draw gives the example's own document, draw again. After the last attempt, take
        # it all the same, so that a store of one document has pairs too.
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
        """Return the number of gathered sentences in A; of two or more, at least one is left for B."""
        count = self.count[at]
        return np.where(count > 1, draw_between(1, count - 1, self._draw(_SPLIT, at)), 1)

    def _draw(self, which: int, at: Numbers | slice) -> NDArray[np.float64]:
        counters = (self.in_document[at] * _DRAWS + which).astype(np.uint64)
        return uniforms(self.key[at], counters)

    def _whole(self, text: Numbers) -> Numbers:
        """Return the final length of sequences with this many tokens of text."""
        return np.minimum(text, self.rules.capacity) + self.rules.specials

    def _reach(self, first: Numbers, target: Numbers, *, before: Numbers) -> Numbers:
        """Return the end of the sentences from `first` on that reach the target, or the document's end."""
        starts = self.all.sentence_starts
        return np.minimum(np.searchsorted(starts, starts[first] + target), before)


def single_segments(start: Numbers, length: Numbers, *, whole: Numbers) -> ExampleIndex:
    """Return examples of one segment each, with their final lengths."""
    return ExampleIndex(
        first_start=start,
        first_length=length.astype(np.int32),
        second_start=np.zeros(len(start), np.int64),
        second_length=np.zeros(len(start), np.int32),
        label=np.zeros(len(start), np.int8),
        length=whole.astype(np.int32),
    )


def followed(steps: Numbers) -> Numbers:
    """Return the indices visited by a walk from index 0, given the step at each index.

    Each document's steps end exactly at the start of the next document, so one walk visits all documents.
    """
    # A plain loop over a list: 50 ns per step, however long the longest document is.
    distances: list[int] = steps.tolist()
    visited, index = [], 0
    while index < len(distances):
        visited.append(index)
        index += distances[index]
    return np.array(visited, np.int64)


@dataclass(frozen=True, slots=True)
class FillRules:
    """Limits on the text of a filled sequence."""

    capacity: int
    """Maximum tokens of text and of separators between documents."""
    specials: int
    """Number of special tokens added to the text."""
    short_fraction: float = 0.0
    """Fraction of sequences that are filled only to a random shorter length."""
    short_length: int = 0
    key: int = 0
    """Key of the epoch's random numbers."""

    def limits(self, starts: Numbers) -> Numbers:
        """Return the maximum tokens of each sequence, given the token of the store at which it begins."""
        if not self.short_fraction:
            return np.full(len(starts), self.capacity)
        keys = sub_keys(self.key, starts)
        is_short = uniforms(keys, np.uint64(0)) < self.short_fraction
        longest = min(self.short_length, self.capacity)
        return np.where(is_short, draw_between(1, longest, uniforms(keys, np.uint64(1))), self.capacity)


def fill_across_documents(sentences: Sentences, rules: FillRules) -> ExampleIndex:
    """Fill sequences that continue into the next document of the split, after a separator."""
    # Filling restarts with each block of about a million sentences, to bound the memory.
    return joined([_filled(sentences, block, rules, 1) for block in document_blocks(sentences)])


def fill_within_documents(sentences: Sentences, rules: FillRules) -> ExampleIndex:
    """Fill sequences that never cross a document boundary."""
    # A separator as large as the capacity closes every sequence at the end of its document.
    return joined([_filled(sentences, block, rules, rules.capacity) for block in document_blocks(sentences)])


class SplitText:
    """The text of a split as one stretch; maps parts of it to the documents that contain them."""

    def __init__(self, sentences: Sentences) -> None:
        # Documents of a split are not contiguous in the store: documents of the other split are between them.
        starts, documents = sentences.document_starts, sentences.documents
        self._begin = sentences.sentence_starts[starts[documents]]
        self._length = sentences.sentence_starts[starts[documents + 1]] - self._begin
        self._before = np.cumsum(self._length) - self._length

    def parts(self, start: Numbers, length: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return how many documents each stretch touches, and the start and length of each part."""
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
    # Cut sentences into pieces no longer than the capacity; from here on arrays have an entry per piece.
    count = -(-(end - start) // rules.capacity)
    piece_start = np.repeat(start, count) + ranges(np.zeros_like(count), count) * rules.capacity
    piece_length = np.minimum(np.repeat(end, count) - piece_start, rules.capacity)
    document = np.repeat(np.repeat(np.arange(len(documents)), ends - begins), count)
    before = np.cumsum(piece_length) - piece_length
    # With separators counted, the pieces from p to q fit if q ends within one capacity of the start of p.
    offset = before + document * separators
    limits = rules.limits(piece_start)
    next_piece = np.searchsorted(offset + piece_length, offset + limits, side="right")
    next_piece = np.maximum(next_piece, np.arange(1, len(next_piece) + 1))  # at least one sentence each
    first = followed(next_piece - np.arange(len(next_piece)))
    last = next_piece[first] - 1
    length = before[last] + piece_length[last] - before[first]
    filled = offset[last] + piece_length[last] - offset[first]
    return single_segments(piece_start[first], length, whole=filled + rules.specials)


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of the store that become the text of sequences, in their order."""

    counts_S: Numbers
    """Number of spans in each sequence."""
    starts_N: Numbers
    lengths_N: Numbers


def truncated_spans(examples: ExampleIndex, *, capacity: int, keys_S: Words) -> Spans:
    """Return the spans of the examples, cut down to `capacity` tokens of text each.

    As published: the longer segment, on a tie the second, loses its first or its last token, each with
    probability 1/2, until both fit.
    """
    # The end result of the token-by-token loop, in closed form: the shorter segment keeps everything, or both
    # end at half of the capacity. On a tie the second loses, so the first keeps the odd token.
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
    """Count the tokens lost at the front of each segment: one random bit decides each loss."""
    # Bits come in words of 64, and a sequence uses as many words as its losses require. Unneeded bits of the
    # last word are shifted out before the ones are counted.
    words_S = -(-lost_S // 64)
    row, word = np.repeat(np.arange(len(lost_S)), words_S), ranges(np.zeros_like(words_S), words_S)
    sampled = bits(keys_S[row], (word + (segment << 32)).astype(np.uint64))
    unused = np.maximum(64 * (word + 1) - lost_S[row], 0).astype(np.uint64)
    heads = np.bitwise_count(sampled << unused)
    return np.bincount(row, weights=heads, minlength=len(lost_S)).astype(np.int64)
