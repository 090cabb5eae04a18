"""Spans written as tags of words: IOB1, IOB2 and BIOES, read as conlleval reads them.

`B-PER` begins a span of type PER, `I-` continues it, `E-` ends it, `S-` is a span of one word. In IOB1 (the
files of CoNLL-2003) `B-` occurs only if a span follows another of its type; in IOB2 it begins every span. A
bare letter of the scheme belongs to a span without a type; any other tag (O, NOUN) is outside of spans.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    """Consecutive words that form a span, with its type."""

    type: str
    """Type of the span; empty if tags are bare letters."""
    first: int
    end: int
    """Index after the last word."""


class _Part(NamedTuple):
    letter: str
    type: str


def spans_of(tags: Sequence[str], scheme: Scheme) -> list[TagSpan]:
    """Return the spans in order; an ill-formed I- or E- after no span begins one, as in conlleval."""
    parts = [_part(tag, scheme) for tag in tags]
    spans, first = [], 0
    for index, (before, after) in enumerate(pairwise([None, *parts, None])):
        # Neighbours belong to one span if the first leaves it open and the second continues its type.
        if (
            before is not None
            and after is not None
            and before.letter in "BI"
            and after.letter in "IE"
            and before.type == after.type
        ):
            continue
        if before is not None:
            spans.append(TagSpan(before.type, first, index))
        first = index
    return spans


def scheme_of(tag_sequences: Iterable[Sequence[str]]) -> Scheme:
    """Return the scheme of most spans, or iob2 if it cannot be determined."""
    beginnings: Counter[str] = Counter()
    for tags in tag_sequences:
        parts = [_part(tag, "bioes") for tag in tags]
        for before, after in pairwise([None, *parts]):
            # Between spans of one type, IOB1 and IOB2 both write B-: they differ only at changes of type.
            if after is not None and (after.letter in "ES" or before is None or before.type != after.type):
                beginnings[after.letter] += 1
    if beginnings["E"] or beginnings["S"]:
        return "bioes"
    return "iob1" if beginnings["I"] > beginnings["B"] else "iob2"


def _part(tag: str, scheme: Scheme) -> _Part | None:
    letter, dash, kind = tag.partition("-")
    known = LETTERS["bioes"] if dash else LETTERS[scheme]  # conlleval accepts E- and S- in any file
    return _Part(letter, kind) if letter in known else None


@dataclass(frozen=True, slots=True)
class TypeScores:
    """Scores of the spans of one type; a fraction of nothing is 0.0."""

    precision: float
    recall: float
    f1: float
    right: int
    labels: int
    predictions: int


@dataclass(frozen=True, slots=True)
class SpanScores:
    """Scores of spans, for all types together and for each type."""

    precision: float
    recall: float
    f1: float
    by_type: Mapping[str, TypeScores]
    """Scores of every type that occurs or is predicted, in alphabetical order."""


def span_scores(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], scheme: Scheme
) -> SpanScores:
    """Return precision, recall and F1 of exact spans over all sentences, as conlleval and seqeval count."""
    right, label_counts, predicted_counts = Counter[str](), Counter[str](), Counter[str]()
    for number, (right_tags, predicted_tags) in enumerate(zip(labels, predictions, strict=True)):
        if len(right_tags) != len(predicted_tags):
            raise ValueError(
                f"sentence {number} has {len(right_tags)} tags, but {len(predicted_tags)} are predicted"
            )
        right_spans = set(spans_of(right_tags, scheme))
        predicted_spans = set(spans_of(predicted_tags, scheme))
        right.update(span.type for span in right_spans & predicted_spans)
        label_counts.update(span.type for span in right_spans)
        predicted_counts.update(span.type for span in predicted_spans)
    types = sorted(label_counts.keys() | predicted_counts.keys())
    whole = _scores(right.total(), label_counts.total(), predicted_counts.total())
    by_type = {type_: _scores(right[type_], label_counts[type_], predicted_counts[type_]) for type_ in types}
    return SpanScores(whole.precision, whole.recall, whole.f1, by_type)


def _scores(right: int, labels: int, predictions: int) -> TypeScores:
    return TypeScores(
        precision=right / predictions if predictions else 0.0,
        recall=right / labels if labels else 0.0,
        f1=2 * right / (labels + predictions) if labels + predictions else 0.0,
        right=right,
        labels=labels,
        predictions=predictions,
    )
