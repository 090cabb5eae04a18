"""How each kind of question is put to a model: many inputs in, an answer to each out.

Answers are plain data where a tensor would otherwise outlive its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.inference.bert import Bert
from bertsmith.inference.filling import Guess
from bertsmith.inference.looking import see_attention, see_senses, see_tokens
from bertsmith.inference.replies import TaggedWord
from bertsmith.serve.batching import Kind
from bertsmith.tasks.tag_schemes import scheme_of, spans_of

Many = Callable[[Bert, Sequence[Any], tuple[Any, ...]], list[Any]]


@dataclass(frozen=True, slots=True)
class FilledMask:
    """A mask of a text and what may stand in its place."""

    start: int
    end: int
    guesses: list[Guess]


@dataclass(frozen=True, slots=True)
class FoundEntity:
    """A stretch of a text, what it is, and the mean probability of its words' tags."""

    text: str
    start: int
    end: int
    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class TaggedText:
    """The words of a text and what they make up together."""

    words: list[TaggedWord]
    entities: list[FoundEntity]


def ask(bert: Bert, kind: Kind, inputs: Sequence[Any]) -> list[Any]:
    """The answer to each input."""
    return MANY_FORMS[kind.question](bert, inputs, kind.options)


def _fill(bert: Bert, texts: Sequence[str], options: tuple[Any, ...]) -> list[list[FilledMask]]:
    (top,) = options
    found = bert.fill_each(texts, top=top)
    return [
        [FilledMask(*place, guesses) for place, guesses in zip(mask_places(bert, text), masks, strict=True)]
        for text, masks in zip(texts, found, strict=True)
    ]


def mask_places(bert: Bert, text: str) -> list[tuple[int, int]]:
    """Where the masks of a text stand, without the space that some tokenizers count to them."""
    mask, tokenizer = bert.tokenizer.mask_token, bert.tokenizer
    encoded = tokenizer.encode(text, allow_special=(mask,))
    offsets = zip(encoded.ids, encoded.offsets, strict=True)
    starts = [text.index(mask, start) for number, (start, _) in offsets if number == tokenizer.mask_id]
    return [(start, start + len(mask)) for start in starts]


def _tag(bert: Bert, texts: Sequence[str], _options: tuple[Any, ...]) -> list[TaggedText]:
    labels = labels_of(bert)
    return [
        TaggedText(words, entities_of(text, words, labels))
        for text, words in zip(texts, bert.tag(texts), strict=True)
    ]


def entities_of(text: str, words: Sequence[TaggedWord], labels: Sequence[str]) -> list[FoundEntity]:
    """The stretches that the words' tags mark; none where the labels mark no stretches."""
    found = []
    for span in spans_of([word.tag for word in words], scheme_of([labels])):
        inside = words[span.first : span.end]
        start, end = inside[0].start, inside[-1].end
        probability = sum(word.probability for word in inside) / len(inside)
        found.append(FoundEntity(text[start:end], start, end, span.type, probability))
    return found


def labels_of(bert: Bert) -> tuple[str, ...]:
    """The classes or tags that a model knows; none where it has no such head."""
    if bert.tuned is not None:
        return bert.tuned.note.labels
    return bert.model.labels() if {"classify", "tag"} & set(bert.abilities) else ()


def _embed(bert: Bert, texts: Sequence[str], options: tuple[Any, ...]) -> list[list[float]]:
    (truncate,) = options
    rows: list[list[float]] = bert.embed(texts, truncate=truncate).tolist()
    return rows


def _classify(bert: Bert, texts: Sequence[Any], options: tuple[Any, ...]) -> list[Any]:
    truncate, _form = options
    return bert.classify(texts, truncate=truncate)


def _score(bert: Bert, texts: Sequence[Any], options: tuple[Any, ...]) -> list[float]:
    truncate, _form = options
    return bert.score(texts, truncate=truncate)


def _next(bert: Bert, pairs: Sequence[tuple[str, str]], _options: tuple[Any, ...]) -> list[Any]:
    return bert.next_sentences(pairs)


def _answer(bert: Bert, pairs: Sequence[tuple[str, str]], options: tuple[Any, ...]) -> list[Any]:
    (best,) = options
    return bert.answers_each(pairs, best=best)


def _look_at_tokens(bert: Bert, pairs: Sequence[Any], options: tuple[Any, ...]) -> list[Any]:
    (seed,) = options
    return [see_tokens(bert, first, second, seed=seed) for first, second in pairs]


def _look_at_attention(bert: Bert, pairs: Sequence[Any], _options: tuple[Any, ...]) -> list[Any]:
    return [see_attention(bert, first, second) for first, second in pairs]


def _look_at_senses(bert: Bert, asked: Sequence[Any], _options: tuple[Any, ...]) -> list[Any]:
    return [see_senses(bert, word, sentences) for word, sentences in asked]


MANY_FORMS: dict[str, Many] = {
    "fill": _fill,
    "next": _next,
    "classify": _classify,
    "score": _score,
    "tag": _tag,
    "answer": _answer,
    "embed": _embed,
    "look/tokens": _look_at_tokens,
    "look/attention": _look_at_attention,
    "look/senses": _look_at_senses,
}
