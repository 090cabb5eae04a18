"""From a validated request to its predictions: choose the model, count tokens, wait in its queue."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import lone_surrogate
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TokenizedText
from bertsmith.serve.api_errors import ApiError, too_many_texts
from bertsmith.serve.batching import BatchKey
from bertsmith.serve.middleware import LOG_FIELDS
from bertsmith.serve.model_registry import ModelRegistry, ServedModel
from bertsmith.serve.operations import OPERATIONS
from bertsmith.serve.server_config import Limits

LONG_CHARACTERS = 4000
"""From here on, tokenising would hold up the other requests and goes to a thread."""

FieldNames = Callable[[int], tuple[str, ...]]
"""Where the text of this index stands in the request: the name of the whole, and of both parts of a pair."""


def single_field(name: str) -> FieldNames:
    """The only text of a request, which stands in this field."""
    return lambda _index: (name,)


def pair_of_fields(first: str, second: str) -> FieldNames:
    """The only pair of a request, which stands in these fields."""
    return lambda _index: (f"{first} with {second}", first, second)


def list_field(name: str) -> FieldNames:
    """Texts or pairs in a list."""

    def names(index: int) -> tuple[str, ...]:
        whole = f"{name}[{index}]"
        return whole, f"{whole}[0]", f"{whole}[1]"

    return names


TEXTS = list_field("texts")
"""As in most requests."""


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """What a request wants of a model."""

    key: BatchKey
    texts: Sequence[str | tuple[str, str]]
    model: str | None
    truncate: bool = False
    """Whether a text that is too long for the model loses its end."""
    max_tokens: int | None = None
    """Where the result grows faster than the text."""
    fields: FieldNames = TEXTS
    """Where the texts stand in the request."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Which model predicted what, and how many tokens it read."""

    model: str
    results: list[Any]
    tokens: int


class Service:
    """What all routes share."""

    def __init__(self, models: ModelRegistry, limits: Limits, *, truncates: bool = False) -> None:
        self.models, self.limits, self.truncates = models, limits, truncates

    async def predict(self, request: PredictionRequest) -> Predictions:
        """The results of a request, once its turn has come."""
        check_texts(request, self.limits)
        operation = OPERATIONS[request.key.operation]
        model = self.models.with_ability(request.model, operation.ability)
        log_fields = LOG_FIELDS.get({})
        log_fields |= {"model": model.name, "texts": len(request.texts)}
        texts = await self._read(request, model)
        lengths = [len(text) for text in texts]
        tokens = log_fields["tokens"] = sum(lengths)
        if request.max_tokens is not None and tokens > request.max_tokens:
            message = f"{tokens} tokens are too many for this view, which takes {request.max_tokens}"
            raise ApiError(422, message)
        inputs, weights = ([texts], [tokens]) if operation.joint else (texts, lengths)
        try:
            results = await model.queue.predict(request.key, inputs, weights)
        except UserError as error:
            raise ApiError(422, with_field_name(error, request.fields).line()) from error
        return Predictions(model.name, results, tokens)

    async def _read(self, request: PredictionRequest, model: ServedModel) -> list[TokenizedText]:
        """The texts as the model takes them: with the tokens by which they are weighed."""
        bert = await model.loaded()
        if sum(map(_characters, request.texts)) < LONG_CHARACTERS:
            texts = tokenized(bert, request)
        else:
            texts = await asyncio.to_thread(tokenized, bert, request)
        if OPERATIONS[request.key.operation].takes_long_texts(bert):
            return texts
        if request.truncate or self.truncates:
            return [bert.reader.truncated(text) for text in texts]
        check_lengths([len(text) for text in texts], model, request.fields)
        return texts


def tokenized(bert: Bert, request: PredictionRequest) -> list[TokenizedText]:
    """The texts of a request with all of their tokens."""
    reads_masks = OPERATIONS[request.key.operation].reads_masks
    masks = (bert.tokenizer.mask_token,) if reads_masks else ()
    return bert.reader.tokenize(request.texts, allow_special=masks)


def with_field_name(error: UserError, fields: FieldNames) -> UserError:
    """The error of a model, with the input that it means called as in the request."""
    if error.index is None:
        return error
    return replace(error, where=fields(error.index)[0] if error.field == "text" else error.field)


def check_texts(request: PredictionRequest, limits: Limits) -> None:
    """Reject more, longer, or emptier texts than the server takes."""
    texts = request.texts
    if len(texts) > limits.texts:
        raise too_many_texts(len(texts), limit=limits.texts)
    for index, text in enumerate(texts):
        whole, *parts = request.fields(index)
        named = ((whole, text),) if isinstance(text, str) else zip(parts, text, strict=True)
        for name, each in named:
            _check_text(each, name, limits)
    # Where all pairs share a text, as a question's options do, a small body asks for much to be tokenised.
    if (characters := sum(map(_characters, texts))) > limits.body_bytes:
        message = f"the pairs have {characters} characters together; this server takes {limits.body_bytes}"
        raise ApiError(413, message)


def _check_text(text: str, name: str, limits: Limits) -> None:
    if len(text) > limits.characters:
        message = f"{name}: has {len(text)} characters; this server takes {limits.characters}"
        raise ApiError(413, message)
    if not text.strip():
        raise ApiError(422, f"{name}: is empty; give it some words")
    if lone_surrogate(text):
        raise ApiError(422, f"{name}: holds half a character (a lone surrogate); send whole ones")


def check_lengths(lengths: Sequence[int], model: ServedModel, fields: FieldNames) -> None:
    """Reject texts that the model cannot take whole."""
    max_tokens = model.info.max_tokens
    for index, length in enumerate(lengths):
        if length > max_tokens:
            message = f"{fields(index)[0]}: has {length} tokens but the model {model.name} takes {max_tokens}"
            raise ApiError(422, f"{message}; shorten or split it")


def _characters(text: str | tuple[str, str]) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
