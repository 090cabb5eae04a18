"""How each kind of question is put to a model: many inputs in, an answer to each out.

Answers are plain data where a tensor would otherwise outlive its batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

from bertsmith.inference.bert import Bert
from bertsmith.inference.facts import Facts, answer_facts, mask_facts, tag_facts
from bertsmith.inference.filling import mask_places
from bertsmith.inference.looking import see_attention, see_senses, see_tokens
from bertsmith.serve.batching import Kind

Many = Callable[[Bert, Sequence[Any], tuple[Any, ...]], list[Any]]


def ask(bert: Bert, kind: Kind, inputs: Sequence[Any]) -> list[Any]:
    """The answer to each input."""
    return MANY_FORMS[kind.question](bert, inputs, kind.options)


def _fill(bert: Bert, texts: Sequence[str], options: tuple[Any, ...]) -> list[list[Facts]]:
    (top,) = options
    found = zip(texts, bert.fill_each(texts, top=top), strict=True)
    return [mask_facts(mask_places(text, bert.tokenizer), guesses) for text, guesses in found]


def _tag(bert: Bert, texts: Sequence[str], _options: tuple[Any, ...]) -> list[Facts]:
    found = zip(texts, bert.tag(texts), strict=True)
    return [tag_facts(words, bert.entities_of(text, words)) for text, words in found]


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


def _answer(bert: Bert, pairs: Sequence[tuple[str, str]], options: tuple[Any, ...]) -> list[Facts]:
    (best,) = options
    return [answer_facts(found) for found in bert.answers_each(pairs, best=best)]


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
