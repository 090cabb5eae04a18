"""The published procedures once more, sentence by sentence and token by token.

With keyed draws they take the very draws of the fast routines and must agree with them exactly; with draws
from Python's generator they are a simulation. Documents are lists of sentences, sentences lists of tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.core.seeds import bits, key_of, sub_keys, uniforms
from bertsmith.data.example_index import WalkRules

Sentence = Sequence[int]
Documents = dict[int, list[Sentence]]
Pair = tuple[list[int], list[int], int]
Draw = Callable[[int], float]
"""A number in [0, 1); a keyed one depends on the draw's number."""


def keyed(key: int, *, start: int = 0) -> Draw:
    return lambda number: float(uniforms(np.uint64(key), np.uint64(start + number)))


def free(chance: random.Random) -> Draw:
    return lambda _: chance.random()


def between(low: int, high: int, uniform: float) -> int:
    return low + int(uniform * (high - low + 1))


def joined(sentences: Sequence[Sentence]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


# ---- pairs


@dataclass(frozen=True)
class KeyedWalk:
    """The draws that the fast walk takes."""

    rules: WalkRules

    def target(self, document: int) -> Draw:
        return keyed(self._key("target", document))

    def chunk(self, document: int, sentence: int) -> Draw:
        return keyed(self._key("walk", document), start=16 * sentence)

    def _key(self, purpose: str, document: int) -> int:
        return int(sub_keys(key_of(self.rules.seed, purpose, *self.rules.purpose), np.array([document]))[0])


@dataclass(frozen=True)
class FreeWalk:
    """Draws that are independent of all others."""

    chance: random.Random

    def target(self, document: int) -> Draw:
        return free(self.chance)

    def chunk(self, document: int, sentence: int) -> Draw:
        return free(self.chance)


def plain_walk(documents: Documents, rules: WalkRules, draws: KeyedWalk | FreeWalk) -> list[list[Pair]]:
    """A, B and label of the examples of each document, before truncation."""
    return [plain_document(own, documents, rules=rules, draws=draws) for own in sorted(documents)]


def plain_document(own: int, documents: Documents, *, rules: WalkRules, draws) -> list[Pair]:
    draw = draws.target(own)
    target = between(2, rules.capacity, draw(1)) if draw(0) < rules.short_probability else rules.capacity
    target = 0 if rules.kind == "sentence-pair" else target
    document, found, chunk, place = documents[own], [], [], 0
    while place < len(document):
        chunk.append(document[place])
        is_full = len(chunk) == 2 if rules.kind == "sentence-pair" else sum(map(len, chunk)) >= target
        if place == len(document) - 1 or is_full:
            here = draws.chunk(own, place - len(chunk) + 1)
            others = lambda length, here=here: plain_random_second(length, own, documents, here)  # noqa: E731
            put_back, pair = plain_pair(chunk, target, rules=rules, draw=here, others=others)
            found.append(pair)
            place -= put_back
            chunk = []
        place += 1
    return found


def plain_pair(
    chunk: list[Sentence], target: int, *, rules: WalkRules, draw: Draw, others
) -> tuple[int, Pair]:
    """How many sentences are put back, and the example."""
    if rules.kind == "none":
        return 0, (joined(chunk), [], 0)
    a_end = between(1, len(chunk) - 1, draw(0)) if len(chunk) >= 2 else 1
    first, second = joined(chunk[:a_end]), joined(chunk[a_end:])
    is_negative = draw(1) < rules.negative_probability
    if len(chunk) == 1 or (rules.kind in ("nsp", "sentence-pair") and is_negative):
        return len(chunk) - a_end, (first, others(target - len(first)), 1)
    return 0, ((second, first, 1) if is_negative else (first, second, 0))


def plain_random_second(target: int, own: int, documents: Documents, draw: Draw) -> list[int]:
    members = sorted(documents)
    for attempt in range(10):
        other = members[between(0, len(members) - 1, draw(3 + attempt))]
        if other != own:
            break
    tokens: list[int] = []
    for sentence in documents[other][between(0, len(documents[other]) - 1, draw(2)) :]:
        tokens += sentence
        if len(tokens) >= target:
            break
    return tokens


def plain_truncate(pair: Pair, *, capacity: int, key: int) -> Pair:
    """Drop from the longer one, B on ties, in front or at the end."""
    parts, dropped = (list(pair[0]), list(pair[1])), [0, 0]
    while len(parts[0]) + len(parts[1]) > capacity:
        which = 0 if len(parts[0]) > len(parts[1]) else 1
        word = int(bits(np.uint64(key), np.uint64((which << 32) + dropped[which] // 64)))
        in_front = word >> (dropped[which] % 64) & 1
        parts[which].pop(0 if in_front else -1)
        dropped[which] += 1
    return *parts, pair[2]


# ---- full sentences


def plain_fill(documents: list[list[Sentence]], *, capacity: int, across: bool) -> list[list[list[int]]]:
    """Sequences as lists of document parts; a part after the first costs one separator."""
    sequences: list[list[list[int]]] = []
    parts: list[list[int]] = []
    for document in documents:
        if not across and parts:
            sequences, parts = [*sequences, parts], []
        is_new = True
        for sentence in document:
            for piece in (sentence[at : at + capacity] for at in range(0, len(sentence), capacity)):
                cost = len(piece) + (1 if parts and is_new else 0)
                if parts and sum(map(len, parts)) + len(parts) - 1 + cost > capacity:
                    sequences, parts = [*sequences, parts], []
                if not parts or is_new:
                    parts.append([])
                parts[-1] += piece
                is_new = False
    return [*sequences, parts]


# ---- masking


def plain_order(units: int, key: int) -> list[int]:
    """The units in the order of their draws."""
    words = [int(bits(np.uint64(key), np.uint64(unit))) >> 16 for unit in range(units)]
    return sorted(range(units), key=words.__getitem__)


def plain_whole_units(units: list[list[int]], budget: int, order: list[int]) -> set[int]:
    """The places chosen unit by unit; one that would exceed the budget is skipped."""
    chosen: set[int] = set()
    for number in order:
        if len(chosen) + len(units[number]) <= budget:
            chosen |= set(units[number])
    return chosen


def plain_ngrams(
    units: list[list[int]], budget: int, order: list[int], *, longest: int, draw: Draw
) -> set[int]:
    """The places chosen in runs of units, n with probability proportional to 1/n."""
    total = sum(1 / n for n in range(1, longest + 1))
    chosen: set[int] = set()
    for number in order:
        if len(chosen) == budget:
            break
        uniform, n = draw((1 << 32) + number), 1
        while n < longest and uniform >= sum(1 / k for k in range(1, n + 1)) / total:
            n += 1
        run = joined(units[number : number + n])
        while n > 1 and len(chosen) + len(run) > budget:
            n -= 1
            run = joined(units[number : number + n])
        if len(chosen) + len(run) <= budget and not chosen & set(run):
            chosen |= set(run)
    return chosen
