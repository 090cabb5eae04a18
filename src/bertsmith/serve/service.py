"""From a checked request to its answers: choose the model, weigh the request, wait in line."""

import asyncio
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.inference.bert import Bert
from bertsmith.serve.batching import Kind
from bertsmith.serve.fields import TEXTS, Fields
from bertsmith.serve.models import Models, ServedModel
from bertsmith.serve.refusals import Refusal, refusal_of, too_many
from bertsmith.serve.settings import Limits

NOTE: ContextVar[dict[str, Any]] = ContextVar("note")
"""What the log will say of the request at hand: numbers and names, never its texts."""

WINDOWED = ("tag", "answer")
"""Questions for which long texts are read in windows."""
TUNED = ("classify", "score")
"""Questions for which a fine-tuned folder says what becomes of long texts."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""JSON can spell it, no text can hold it."""
LONG_CHARACTERS = 4000
"""From here on, counting tokens would hold up the other requests and goes to a thread."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks of a model."""

    kind: Kind
    inputs: Sequence[Any]
    """One for each answer."""
    texts: Sequence[str | tuple[str, str]]
    """All that is to be read, for its length."""
    model: str | None
    cut_long: bool = False
    """Whether a text that is too long for the model loses its end."""
    most_tokens: int | None = None
    """Where the answer grows faster than the text."""
    fields: Fields = TEXTS
    """Where the texts stand in the request."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Which model answered, what, and how many tokens it read."""

    model: str
    answers: list[Any]
    tokens: int


class Service:
    """What all routes share."""

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits = models, limits

    async def ask(self, question: Question) -> Answered:
        """The answers to a question, once its turn has come."""
        refuse_too_much(question, self.limits)
        model = self.models.able(question.model, question.kind.ability)
        note = NOTE.get({})
        note |= {"model": model.name, "texts": len(question.texts)}
        tokens = await self._tokens(question, model)
        note["tokens"] = sum(tokens)
        if question.most_tokens is not None and sum(tokens) > question.most_tokens:
            message = f"{sum(tokens)} tokens are too many for this view, which takes {question.most_tokens}"
            raise Refusal(422, message)
        shares = tokens if len(tokens) == len(question.inputs) else [sum(tokens)]
        try:
            answers = await model.queue.answers(question.kind, question.inputs, shares)
        except Refusal as refusal:
            raise in_words_of(question.fields, refusal) from refusal
        return Answered(model.name, answers, sum(tokens))

    async def _tokens(self, question: Question, model: ServedModel) -> list[int]:
        bert = await model.opened()
        if sum(map(_characters, question.texts)) < LONG_CHARACTERS:
            lengths = token_counts(bert, question)
        else:
            lengths = await asyncio.to_thread(token_counts, bert, question)
        if question.cut_long:
            return [min(length, model.facts.longest) for length in lengths]
        has_rule = question.kind.question in (*WINDOWED, *(TUNED if bert.tuned else ()))
        if not has_rule:
            refuse_too_long(lengths, model, question.fields)
        return lengths


def token_counts(bert: Bert, question: Question) -> list[int]:
    """How many tokens the model's tokenizer makes of each text."""
    if question.kind.question == "fill":  # the one question in which the mask is more than its characters
        masks = (bert.tokenizer.mask_token,)
        return [len(each) for each in bert.tokenizer.encode_many(question.texts, allow_special=masks)]
    return [len(each) for each in bert.tokenizer.closed.encode_batch_fast(list(question.texts))]


def in_words_of(fields: Fields, refusal: Refusal) -> Refusal:
    """The same refusal, with the place that a model complains of called as in the request."""
    found = re.fullmatch(r"(text|question|passage) (\d+)", refusal.error.where) if refusal.error else None
    if found is None or refusal.error is None:
        return refusal
    where = fields(int(found[2]))[0] if found[1] == "text" else found[1]
    return refusal_of(UserError(refusal.error.what, where=where, remedy=refusal.error.remedy))


def refuse_too_much(question: Question, limits: Limits) -> None:
    """Stop at more, longer, or emptier texts than the server takes."""
    texts = question.texts
    if len(texts) > limits.texts:
        raise too_many(len(texts), most=limits.texts)
    for number, text in enumerate(texts):
        whole, *parts = question.fields(number)
        pieces = ((whole, text),) if isinstance(text, str) else zip(parts, text, strict=True)
        for name, piece in pieces:
            _refuse_unreadable(piece, name, limits)


def _refuse_unreadable(text: str, name: str, limits: Limits) -> None:
    if len(text) > limits.characters:
        message = f"{name}: has {len(text)} characters; this server takes {limits.characters}"
        raise Refusal(413, message)
    if not text.strip():
        raise Refusal(422, f"{name}: is empty; give it some words")
    if HALF_CHARACTER.search(text):
        raise Refusal(422, f"{name}: holds half a character (a lone surrogate); send whole ones")


def refuse_too_long(lengths: Sequence[int], model: ServedModel, fields: Fields) -> None:
    """Stop at texts that the model cannot take whole."""
    longest = model.facts.longest
    for number, length in enumerate(lengths):
        if length > longest:
            message = f"{fields(number)[0]}: has {length} tokens but the model {model.name} takes {longest}"
            raise Refusal(422, f"{message}; shorten or split it")


def _characters(text: str | tuple[str, str]) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
