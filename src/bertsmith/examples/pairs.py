"""Which sentences make an example: BERT's walk through each document (create_pretraining_data.py).

A walk gathers sentences until a target length is reached, splits them into A and B, and goes on behind them,
or, where B is random, behind A. Every draw belongs to the sentence at which an example begins, so where the
walk would go next is known for all sentences at once, and the walk itself only follows these steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.progress import progress_bar
from bertsmith.ground.seeds import key_of, sub_keys, uniforms

Numbers = NDArray[np.int64]

# As published: this many attempts at a random document that is not the one being walked.
RANDOM_DOCUMENT_TRIES = 10

# Sentences looked at together; bounds the memory that a large store takes.
BLOCK_SENTENCES = 1 << 20

# Numbers of the draws that belong to one sentence.
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

    kind: Literal["nsp", "sop", "none"]
    room: int
    """Most tokens of text in an example."""
    specials: int
    """How many special tokens come on top."""
    negative_share: float
    short_share: float
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
    """The places, within the split, of documents that together hold about BLOCK_SENTENCES sentences."""
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
    """How many tokens of text each document's examples aim at in this pass: usually all there is room for."""
    keys = sub_keys(key_of(rules.seed, "target", *rules.purpose), documents)
    is_short = uniforms(keys, np.uint64(0)) < rules.short_share
    return np.where(is_short, draw_between(2, rules.room, uniforms(keys, np.uint64(1))), rules.room)


def draw_between(lowest: int, highest: int | Numbers, uniform: NDArray[np.float64]) -> Numbers:
    """Whole numbers from lowest to highest, both included, for numbers in [0, 1)."""
    return lowest + (uniform * (highest - lowest + 1)).astype(np.int64)


class _Walk:
    """The walk through some documents of the split; its arrays have one entry a sentence."""

    def __init__(self, sentences: Sentences, rules: WalkRules, block: Numbers) -> None:
        self.all, self.rules = sentences, rules
        documents = sentences.documents[block]
        begins, ends = sentences.document_starts[documents], sentences.document_starts[documents + 1]
        counts = ends - begins
        self.place = np.repeat(block, counts)
        self.in_document = ranges(np.zeros_like(counts), counts)
        self.first = ranges(begins, counts)
        self.target = np.repeat(target_lengths(rules, documents), counts)
        self.key = np.repeat(sub_keys(key_of(rules.seed, "walk", *rules.purpose), documents), counts)
        self.end = self._reach(self.first, self.target, before=np.repeat(ends, counts))
        self.count = self.end - self.first

    def examples(self) -> ExampleIndex:
        """The examples along the walk."""
        return {"nsp": self._next_sentence, "sop": self._sentence_order, "none": self._single}[
            self.rules.kind
        ]()

    def _next_sentence(self) -> ExampleIndex:
        split = self._split(slice(None))
        is_random = (self.count == 1) | (self._draw(_NEGATIVE, slice(None)) < self.rules.negative_share)
        # What a random B leaves unused is put back: the walk goes on behind A.
        at = followed(np.where(is_random, split, self.count))
        return self._pairs(at, split[at], is_random=is_random[at])

    def _sentence_order(self) -> ExampleIndex:
        at = followed(self.count)
        # A single sentence cannot be swapped; ALBERT's code falls back on a random second segment.
        examples = self._pairs(at, self._split(at), is_random=self.count[at] == 1)
        swapped = (self.count[at] > 1) & (self._draw(_NEGATIVE, at) < self.rules.negative_share)
        return _swapped(examples, swapped)

    def _single(self) -> ExampleIndex:
        at = followed(self.count)
        start, end = self.all.sentence_starts[self.first[at]], self.all.sentence_starts[self.end[at]]
        return single_segments(start, end - start, whole=self._whole(end - start))

    def _pairs(self, at: Numbers, split: Numbers, *, is_random: NDArray[np.bool_]) -> ExampleIndex:
        starts, first = self.all.sentence_starts, self.first[at]
        begin, middle, end = starts[first], starts[first + split], starts[self.end[at]]
        target = self.target[at] - (middle - begin)
        length, second_start, second_length = middle - begin, middle, end - middle
        second_start[is_random], second_length[is_random] = self._random_second(
            at[is_random], target=target[is_random]
        )
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
        document = self.all.documents[self._random_place(at)]
        begin, end = self.all.document_starts[document], self.all.document_starts[document + 1]
        first = begin + draw_between(0, end - begin - 1, self._draw(_START, at))
        last = np.maximum(self._reach(first, target, before=end), first + 1)
        start = self.all.sentence_starts[first]
        return start, self.all.sentence_starts[last] - start

    def _random_place(self, at: Numbers) -> Numbers:
        chosen = self.place[at]
        again = np.arange(len(at))
        for attempt in range(RANDOM_DOCUMENT_TRIES):
            uniform = self._draw(_TRIES + attempt, at[again])
            chosen[again] = draw_between(0, len(self.all.documents) - 1, uniform)
            again = again[chosen[again] == self.place[at[again]]]
        return chosen

    def _split(self, at: Numbers | slice) -> Numbers:
        """How many of the gathered sentences go into A; of two or more, one is left for B."""
        count = self.count[at]
        return np.where(count > 1, draw_between(1, count - 1, self._draw(_SPLIT, at)), 1)

    def _draw(self, which: int, at: Numbers | slice) -> NDArray[np.float64]:
        counters = (self.in_document[at] * _DRAWS + which).astype(np.uint64)
        return uniforms(self.key[at], counters)

    def _whole(self, text: Numbers) -> Numbers:
        """The final length of sequences with this much text."""
        return np.minimum(text, self.rules.room) + self.rules.specials

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


def _swapped(examples: ExampleIndex, swapped: NDArray[np.bool_]) -> ExampleIndex:
    starts, lengths = examples.first_start, examples.first_length
    return ExampleIndex(
        first_start=np.where(swapped, examples.second_start, starts),
        first_length=np.where(swapped, examples.second_length, lengths),
        second_start=np.where(swapped, starts, examples.second_start),
        second_length=np.where(swapped, lengths, examples.second_length),
        label=examples.label | swapped,
        length=examples.length,
    )


def followed(steps: Numbers) -> Numbers:
    """The places that a walk from place 0 on visits, the step at each being given.

    Each document's steps end exactly where the next document begins, so one walk visits all of them.
    """
    # A plain loop over a list: a step takes 50 ns, however long the longest document is.
    distances: list[int] = steps.tolist()
    visited, place = [], 0
    while place < len(distances):
        visited.append(place)
        place += distances[place]
    return np.array(visited, np.int64)


def ranges(first: Numbers, count: Numbers) -> Numbers:
    """For each first number and count: first, first + 1, ..., one row after the other."""
    shift: Numbers = np.repeat(first - (np.cumsum(count) - count), count)
    return shift + np.arange(len(shift))
