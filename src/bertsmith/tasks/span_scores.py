"""How many spans are found, with the right words and the right type: the F1 of CoNLL-2003."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bertsmith.tasks.tag_schemes import Scheme, TagSpan, spans_of


@dataclass(frozen=True, slots=True)
class TypeScores:
    """How the spans of one type are found; a share of nothing is 0.0."""

    precision: float
    recall: float
    f1: float
    right: int
    golds: int
    guesses: int


@dataclass(frozen=True, slots=True)
class SpanScores:
    """How spans are found, all types together and each by itself."""

    precision: float
    recall: float
    f1: float
    by_type: Mapping[str, TypeScores]
    """Every type that is there or guessed, in the order of the alphabet."""


def span_scores(
    golds: Sequence[Sequence[str]], guesses: Sequence[Sequence[str]], scheme: Scheme
) -> SpanScores:
    """Precision, recall and F1 of exact spans over all sentences, as conlleval and seqeval count them."""
    right, gold_counts, guess_counts = Counter[str](), Counter[str](), Counter[str]()
    for gold_spans, guess_spans in _spans_of_sentences(golds, guesses, scheme):
        right.update(span.type for span in gold_spans & guess_spans)
        gold_counts.update(span.type for span in gold_spans)
        guess_counts.update(span.type for span in guess_spans)
    types = sorted(gold_counts.keys() | guess_counts.keys())
    whole = _scores(right.total(), gold_counts.total(), guess_counts.total())
    by_type = {type_: _scores(right[type_], gold_counts[type_], guess_counts[type_]) for type_ in types}
    return SpanScores(whole.precision, whole.recall, whole.f1, by_type)


def _spans_of_sentences(
    golds: Sequence[Sequence[str]], guesses: Sequence[Sequence[str]], scheme: Scheme
) -> Iterator[tuple[set[TagSpan], set[TagSpan]]]:
    for number, (gold_tags, guess_tags) in enumerate(zip(golds, guesses, strict=True)):
        if len(gold_tags) != len(guess_tags):
            raise ValueError(
                f"sentence {number} has {len(gold_tags)} tags, but {len(guess_tags)} are guessed"
            )
        yield set(spans_of(gold_tags, scheme)), set(spans_of(guess_tags, scheme))


def _scores(right: int, golds: int, guesses: int) -> TypeScores:
    return TypeScores(
        precision=right / guesses if guesses else 0.0,
        recall=right / golds if golds else 0.0,
        f1=2 * right / (golds + guesses) if golds + guesses else 0.0,
        right=right,
        golds=golds,
        guesses=guesses,
    )
