"""From a validated request to its predictions: choose the model, count tokens, wait in its queue."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bertsmith.core.errors import UserError
from bertsmith.core.files import lone_surrogate
from bertsmith.inference.text_reader import Reader, TextInput, TokenizedText
from bertsmith.packed import split_by_budget
from bertsmith.serve.api_errors import ApiError, too_many_texts
from bertsmith.serve.batching import BatchKey, check_size
from bertsmith.serve.middleware import LOG_FIELDS
from bertsmith.serve.model_registry import ModelRegistry, ServedModel
from bertsmith.serve.operations import OPERATIONS
from bertsmith.serve.server_config import Limits

LONG_CHARACTERS = 1000
"""Minimum characters of a request that is tokenized in a thread: with some vocabularies each is 17 tokens."""
CHUNK_CHARACTERS = 2**14
"""Characters to tokenize in one call; between two chunks a request can be rejected or cancelled."""
MIN_CHUNK_PAIRS = 8
"""Minimum number of pairs in a chunk, if short texts share a long one."""
CAUTION = 0.7
"""Fraction of a request's remaining tokens, as estimated from its first texts, to rely on."""

Made = TypeVar("Made")
FieldNames = Callable[[int], tuple[str, ...]]
"""Function from a text's index to its fields: the name of the whole, and of both parts of a pair."""


def single_field(name: str) -> FieldNames:
    """Return the field of the only text of a request."""
    return lambda _index: (name,)


def pair_of_fields(first: str, second: str) -> FieldNames:
    """Return the fields of the only pair of a request."""
    return lambda _index: (f"{first} with {second}", first, second)


def list_field(name: str) -> FieldNames:
    """Return the fields of texts or pairs in a list."""

    def names(index: int) -> tuple[str, ...]:
        whole = f"{name}[{index}]"
        return whole, f"{whole}[0]", f"{whole}[1]"

    return names


TEXTS = list_field("texts")
"""The fields of most requests."""


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """A request to a model."""

    key: BatchKey
    texts: Sequence[TextInput]
    model: str | None
    truncate: bool = False
    """True if a text that is too long for the model may be truncated."""
    max_tokens: int | None = None
    """Maximum number of tokens, if the result grows faster than the text."""
    fields: FieldNames = TEXTS
    """Names of the fields that contain the texts."""
    pairs_with_first: bool = False
    """True if the first text forms a pair with each of the others."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Results of a request, the model's name, and the number of tokens read."""

    model: str
    results: list[Any]
    tokens: int


class Service:
    """Steps and limits that all routes share."""

    def __init__(self, models: ModelRegistry, limits: Limits, *, truncates: bool = False) -> None:
        self.models, self.limits, self.truncates = models, limits, truncates
        # One for all requests: several threads would take the interpreter from the event loop in turn.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    async def in_thread(self, work: Callable[..., Made], *given: Any) -> Made:
        """Run work on texts that would block the event loop in a thread; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def check_count(self, texts: Sequence[Any]) -> None:
        """Reject a request with too many texts, before anything is done with each of them."""
        if len(texts) > self.limits.texts:
            raise too_many_texts(len(texts), limit=self.limits.texts)

    async def predict(self, request: PredictionRequest) -> Predictions:
        """Return the results of a request, once its turn has come."""
        self.check_count(request.texts[1:] if request.pairs_with_first else request.texts)
        check_texts(request.texts, request.fields, self.limits)
        operation = OPERATIONS[request.key.operation]
        model = self.models.with_ability(request.model, operation.ability)
        log_fields = LOG_FIELDS.get({})
        log_fields |= {"model": model.name, "texts": len(request.texts)}
        results: list[Any] = []
        log_fields["tokens"] = 0
        async for texts in self._read(request, model):
            lengths = [len(text) for text in texts]
            log_fields["tokens"] += sum(lengths)
            inputs, weights = ([texts], [sum(lengths)]) if operation.joint else (texts, lengths)
            try:
                results += await model.queue.predict(request.key, inputs, weights, admitted=bool(results))
            except UserError as error:
                named = with_field_name(error, pair_fields(request), first=len(results))
                raise ApiError(422, named.line()) from error
        return Predictions(model.name, results, log_fields["tokens"])

    async def _read(
        self, request: PredictionRequest, model: ServedModel
    ) -> AsyncIterator[list[TokenizedText]]:
        """Yield the texts with their tokens, as the model reads them, in chunks.

        A chunk is tokenized after the chunks before it are answered: tokens need a hundred times the memory
        of their text, and a request that is cancelled or too large is not read further.
        """
        reader, operation = await model.reader(), OPERATIONS[request.key.operation]
        shared, texts = 0, request.texts
        if request.pairs_with_first:
            # If the first text is long, each pair contains as much of it as fits into the model. A chunk must
            # make several pairs: otherwise the queue would take each for a short request, and promise to
            # answer all of them in time.
            shared, texts = min(_size(texts[0]), CHUNK_CHARACTERS // MIN_CHUNK_PAIRS), texts[1:]
        sizes = [shared + _size(text) for text in texts]
        if max(sum(sizes), sum(map(_size, request.texts))) < LONG_CHARACTERS:
            found = self._tokenized(reader, request, model, range(len(sizes)))
            self._weigh(request, tokens=sum(map(len, found)), fraction=1.0)
            yield found
            return
        first = None
        if request.pairs_with_first:
            (first,) = await self.in_thread(tokenized, reader, request, range(1))
        together: list[TokenizedText] = []
        began, tokens, read = time.monotonic(), 0, 0
        for chunk in split_by_budget(sizes, CHUNK_CHARACTERS):
            found = await self.in_thread(self._tokenized, reader, request, model, chunk, first)
            tokens, read = tokens + sum(map(len, found)), read + sum(sizes[index] for index in chunk)
            if rest := self._weigh(request, tokens=tokens, fraction=read / sum(sizes)):
                await model.queue.check_in_time(rest, since=began)
            if operation.joint:
                together += found
            else:
                yield found
        if operation.joint:
            yield together

    def _weigh(self, request: PredictionRequest, *, tokens: int, fraction: float) -> int:
        """Return the estimated number of tokens still to read; reject a request that is too large."""
        if request.max_tokens is not None and tokens > request.max_tokens:
            message = f"{tokens} tokens are too many for this view; it supports {request.max_tokens}"
            raise ApiError(422, message)
        rest = int(CAUTION * tokens * (1 - fraction) / fraction)
        check_size(tokens + rest, self.limits)
        return rest

    def _tokenized(
        self,
        reader: Reader,
        request: PredictionRequest,
        model: ServedModel,
        which: Sequence[int],
        first: TokenizedText | None = None,
    ) -> list[TokenizedText]:
        """Return the texts at these consecutive indices with their tokens; as pairs if requested."""
        begin = which[0] + (first is not None)
        texts = tokenized(reader, request, range(begin, which[-1] + 1 + request.pairs_with_first))
        takes_long = OPERATIONS[request.key.operation].takes_long_texts(is_finetuned=model.info.is_finetuned)
        truncate = request.truncate or self.truncates
        if request.pairs_with_first:
            first = first or texts.pop(0)
            texts = reader.pairs(first, texts, truncate=truncate)
        elif truncate and not takes_long:
            texts = [reader.truncated(text) for text in texts]
        if not truncate and not takes_long:
            check_lengths([len(text) for text in texts], model, pair_fields(request), first=which[0])
        return texts


def tokenized(reader: Reader, request: PredictionRequest, which: Sequence[int]) -> list[TokenizedText]:
    """Return the texts at these consecutive indices with all of their tokens."""
    reads_masks = OPERATIONS[request.key.operation].reads_masks
    masks = (reader.tokenizer.mask_token,) if reads_masks else ()
    texts = request.texts[which[0] : which[-1] + 1]
    return reader.tokenize(texts, allow_special=masks, first=which[0])


def pair_fields(request: PredictionRequest) -> FieldNames:
    """Return the fields of an input of the model: a text or pair, or the first text with another."""
    if not request.pairs_with_first:
        return request.fields
    return lambda index: (f"{request.fields(0)[0]} with {request.fields(index + 1)[0]}",)


def with_field_name(error: UserError, fields: FieldNames, *, first: int = 0) -> UserError:
    """Return an error of a model with the input's name in the request; its index counts from `first`."""
    if error.index is None:
        return error
    return replace(error, where=fields(first + error.index)[0] if error.field == "text" else error.field)


def check_texts(texts: Sequence[TextInput], fields: FieldNames, limits: Limits) -> None:
    """Reject texts that are too long or empty; tokens were checked when they were made."""
    for index, given in enumerate(texts):
        if isinstance(given, TokenizedText):
            continue
        whole, *parts = fields(index)
        named = ((whole, given),) if isinstance(given, str) else zip(parts, given, strict=True)
        for name, each in named:
            _check_text(each, name, limits)


def _check_text(text: str, name: str, limits: Limits) -> None:
    if len(text) > limits.characters:
        message = f"{name}: has {len(text)} characters; this server accepts {limits.characters}"
        raise ApiError(413, message)
    if not text.strip():
        raise ApiError(422, f"{name}: is empty; write some words")
    if lone_surrogate(text):
        raise ApiError(422, f"{name}: contains half a character (a lone surrogate); send whole ones")


def check_lengths(lengths: Sequence[int], model: ServedModel, fields: FieldNames, *, first: int = 0) -> None:
    """Reject texts that are too long for the model."""
    max_tokens = model.info.max_tokens
    for index, length in enumerate(lengths, start=first):
        if length > max_tokens:
            message = (
                f"{fields(index)[0]}: has {length} tokens, but the model {model.name} takes {max_tokens}"
            )
            raise ApiError(422, f"{message}; shorten or split it, or start the server with --truncate")


def _size(given: TextInput) -> int:
    """Return the number of characters to tokenize, or of tokens."""
    return len(given[0]) + len(given[1]) if isinstance(given, tuple) else len(given)
