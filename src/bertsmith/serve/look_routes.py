"""Routes that show the inside of a model: its tokens, heads and layers, and the words that decided.

Replies contain the models' results unchecked (`model_construct`): a check would block the event loop.
"""

from typing import Any

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray

from bertsmith.inference.text_reader import Reader, TokenizedText
from bertsmith.inference.text_words import TextWords
from bertsmith.serve import look_schemas as views
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import BatchKey, check_size
from bertsmith.serve.routes import classify_texts
from bertsmith.serve.server_config import Limits
from bertsmith.serve.service import (
    FieldNames,
    PredictionRequest,
    Service,
    check_texts,
    list_field,
    pair_of_fields,
    single_field,
)

MAX_ALL_HEADS_TOKENS = 64
"""Maximum tokens for a view of all heads: attention grows with length², times layers, times heads."""
MAX_HEAD_TOKENS = 512
"""Maximum tokens for a view of one head, or of small maps of all heads."""
MAX_WORD = 100
"""Maximum characters of the word in a view of senses."""
MAX_OCCURRENCES = 64
"""Maximum occurrences of a word: every two are compared, and a map of more is a cloud."""
MAX_JOINT_TOKENS = 4096
"""Maximum tokens of texts that are computed in one piece, while all other requests wait."""
MAX_JOINT_CHARACTERS = 2**16
"""Maximum characters of texts that are computed in one piece: a word of any length may be one token."""
MAX_GUESSES_TOKENS = 128
"""Maximum tokens for guesses: every layer scores the whole vocabulary for every mask."""
MAX_WORDS = 120
"""Maximum words of a text: it is computed once without each of them."""
MAX_WORDS_CHARACTERS = 4000
DIGITS = 4
MAP_DIGITS = 2
CANDIDATES = 20
"""Number of best answers to search for the probability of the original one."""


def look_routes(service: Service) -> APIRouter:
    """Return the routes that show the inside of a model."""
    router = APIRouter(prefix="/look")
    _add_token_routes(router, service)
    _add_head_routes(router, service)
    _add_layer_routes(router, service)

    @router.post("/words")
    async def look_at_words(request: views.WordsRequest) -> views.WordsResponse:
        """Show which words decided: the loss of a class, score or answer without each of them."""
        model = service.models.with_ability(request.model, "classify", "score", "answer")
        _check_words_text(request, service.limits)
        reader = await model.reader()
        read, without = await service.in_thread(_words_left_out, reader, request, service.limits)
        texts = [read.tokenized, *(text for _, text in without)]
        if "answer" in model.info.abilities:
            wanted = PredictionRequest(
                BatchKey("answer", (CANDIDATES,)), texts, model.name, fields=_as_sent(request)
            )
            outcomes = [_answer_outcome(each) for each in (await service.predict(wanted)).results]
        else:
            found = await classify_texts(service, texts, model=model.name, fields=_as_sent(request))
            outcomes = [
                {"score": each} if isinstance(each, float) else each.probabilities for each in found.results
            ]
        name = max(outcomes[0], key=lambda each: outcomes[0][each])
        value = outcomes[0][name]
        changes = [value - each.get(name, 0.0) for each in outcomes[1:]]
        words = []
        for (number, _), change in zip(without, changes, strict=True):
            part, word = read.words[number]
            words.append(views.WordView(part=part, start=word.start, end=word.end, change=change))
        return views.WordsResponse(model=model.name, outcome=name, value=value, words=words)

    return router


def _add_token_routes(router: APIRouter, service: Service) -> None:
    @router.post("/tokens")
    async def look_at_tokens(request: views.TokensRequest) -> views.TokensResponse:
        """Show the tokens of a text or pair as the model reads them, and a random masking of them."""
        found = await service.predict(_one_text("look/tokens", request, request.seed))
        return views.TokensResponse.model_construct(model=found.model, tokens=found.results[0].tokens)

    @router.post("/embedding")
    async def look_at_embedding(request: views.EmbeddingRequest) -> views.EmbeddingResponse:
        """Show the vectors that are added up for one token."""
        found = await service.predict(_one_text("look/embedding", request, request.token))
        parts = [{"name": each.name, "values": _rounded(each.values)} for each in found.results[0]]
        return views.EmbeddingResponse.model_construct(model=found.model, parts=parts)


def _add_head_routes(router: APIRouter, service: Service) -> None:
    @router.post("/attention")
    async def look_at_attention(request: views.IntrospectionRequest) -> views.AttentionResponse:
        """Show the attention between all tokens of a short text, in every layer and head."""
        wanted = _one_text("look/attention", request, max_tokens=MAX_ALL_HEADS_TOKENS)
        found = await service.predict(wanted)
        seen = found.results[0]
        layers, heads = seen.weights.shape[:2]
        return views.AttentionResponse.model_construct(
            model=found.model,
            tokens=seen.tokens,
            layers=layers,
            heads=heads,
            weights=_rounded(seen.weights),
        )

    @router.post("/heads")
    async def look_at_heads(request: views.IntrospectionRequest) -> views.HeadsResponse:
        """Show all heads in small: the kind of each on this text, and a clear example to look at first."""
        found = await service.predict(_one_text("look/heads", request, max_tokens=MAX_HEAD_TOKENS))
        seen = found.results[0]
        return views.HeadsResponse.model_construct(
            model=found.model,
            tokens=seen.tokens,
            special=seen.special,
            kinds=seen.summaries,
            maps=_rounded(seen.maps, MAP_DIGITS),
            moment=seen.moment,
        )

    @router.post("/head")
    async def look_at_head(request: views.HeadRequest) -> views.HeadResponse:
        """Show the attention of one head, or the average over the heads of a layer."""
        head = (request.layer, request.head)
        found = await service.predict(_one_text("look/head", request, *head, max_tokens=MAX_HEAD_TOKENS))
        return views.HeadResponse.model_construct(model=found.model, weights=_rounded(found.results[0]))

    @router.post("/head-steps")
    async def look_at_head_steps(request: views.HeadStepsRequest) -> views.HeadStepsResponse:
        """Show how one head computes the attention of one token, number by number."""
        asked = (request.layer, request.head, request.token)
        found = await service.predict(
            _one_text("look/head-steps", request, *asked, max_tokens=MAX_HEAD_TOKENS)
        )
        seen = found.results[0]
        names = ("query", "scores", "weights", "keys", "values", "output")
        numbers: dict[str, Any] = {name: _rounded(getattr(seen, name)) for name in names}
        return views.HeadStepsResponse.model_construct(model=found.model, most_read=seen.most_read, **numbers)


def _add_layer_routes(router: APIRouter, service: Service) -> None:
    @router.post("/senses")
    async def look_at_senses(request: views.SensesRequest) -> views.SensesResponse:
        """Show a map of a word's occurrences, and the cosines of their vectors, layer by layer."""
        check_word(request.word)
        key = BatchKey("look/senses", (request.word, MAX_OCCURRENCES))
        found = await service.predict(_joint(key, request.sentences, request.model, "sentences"))
        seen = found.results[0]
        layers = [{"plane": _rounded(each.plane), **_cosines(each.similarity)} for each in seen.layers]
        similarity = np.asarray(seen.similarity, dtype=np.float64)
        return views.SensesResponse.model_construct(
            model=found.model, points=seen.points, similarity=similarity, layers=layers
        )

    @router.post("/similarity")
    async def look_at_similarity(request: views.SimilarityRequest) -> views.SimilarityResponse:
        """Show the cosines of the texts' mean vectors, layer by layer."""
        service.check_count(request.texts)
        wanted = _joint(BatchKey("look/similarity"), request.texts, request.model, "texts")
        found = await service.predict(wanted)
        layers = [_cosines(each) for each in found.results[0]]
        return views.SimilarityResponse.model_construct(model=found.model, layers=layers)

    @router.post("/guesses")
    async def look_at_guesses(request: views.GuessesRequest) -> views.GuessesResponse:
        """Show the guesses for each mask if the model ended after each of its layers."""
        wanted = PredictionRequest(
            BatchKey("look/guesses", (request.top,)),
            [request.text],
            request.model,
            max_tokens=MAX_GUESSES_TOKENS,
            fields=single_field("text"),
        )
        found = await service.predict(wanted)
        return views.GuessesResponse.model_construct(model=found.model, masks=found.results[0])


def check_word(word: str) -> None:
    """Reject an empty or overlong word."""
    if len(word) > MAX_WORD:
        raise ApiError(422, f"word: has {len(word)} characters; at most {MAX_WORD} are supported")
    if not word.strip():
        raise ApiError(422, "word: is empty; give the word to compare")


def _one_text(
    operation: str, request: views.IntrospectionRequest, *options: Any, max_tokens: int | None = None
) -> PredictionRequest:
    fields = single_field("first") if request.second is None else pair_of_fields("first", "second")
    key = BatchKey(operation, options)
    return PredictionRequest(key, [_text_of(request)], request.model, max_tokens=max_tokens, fields=fields)


def _joint(key: BatchKey, texts: list[str], model: str | None, field: str) -> PredictionRequest:
    if (characters := sum(map(len, texts))) > MAX_JOINT_CHARACTERS:
        message = f"{characters} characters are too many for this view; it supports {MAX_JOINT_CHARACTERS}"
        raise ApiError(422, message)
    return PredictionRequest(key, texts, model, max_tokens=MAX_JOINT_TOKENS, fields=list_field(field))


def _text_of(request: views.IntrospectionRequest | views.WordsRequest) -> str | tuple[str, str]:
    return request.first if request.second is None else (request.first, request.second)


def _rounded(values: Any, digits: int = DIGITS) -> NDArray[np.float64]:
    rounded: NDArray[np.float64] = np.asarray(values, dtype=np.float64).round(digits)
    return rounded


def _cosines(seen: Any) -> dict[str, NDArray[np.float64]]:
    return {"similarity": _rounded(seen.plain), "centred": _rounded(seen.centred)}


# ---- the words that decided


def _check_words_text(request: views.WordsRequest, limits: Limits) -> None:
    """Reject a text or pair that is too long or empty."""
    characters = len(request.first) + len(request.second or "")
    if characters > MAX_WORDS_CHARACTERS:
        message = f"{characters} characters are too many for this view; it supports {MAX_WORDS_CHARACTERS}"
        raise ApiError(422, message)
    check_texts([_text_of(request)], _as_sent(request), limits)


def _words_left_out(
    reader: Reader, request: views.WordsRequest, limits: Limits
) -> tuple[TextWords, list[tuple[int, TokenizedText]]]:
    """Return the words of the text or pair that was sent, and the text without each of them."""
    (tokenized,) = reader.tokenize([_text_of(request)])
    read = TextWords.of(tokenized)
    if len(read.words) > MAX_WORDS:
        raise ApiError(422, f"{len(read.words)} words are too many for this view; it supports {MAX_WORDS}")
    check_size(len(tokenized) * len(read.words), limits)
    return read, list(read.each_left_out())


def _as_sent(request: views.WordsRequest) -> FieldNames:
    """Return the fields of the sent text for all texts: each is the sent one without another word."""
    return single_field("first") if request.second is None else pair_of_fields("first", "second")


def _answer_outcome(found: dict[str, Any]) -> dict[str, float]:
    """Return the probability of each answer; no answer is an empty text."""
    chances = {each["text"]: each["probability"] for each in found["answers"]}
    return chances | {"": found["no_answer_probability"] or 0.0}
