"""The routes of text-embeddings-inference, and their JSON as its clients send and expect it."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from bertsmith.inference.outputs import Classification
from bertsmith.inference.vectors import unit
from bertsmith.serve.batching import BatchKey
from bertsmith.serve.openai_api import CompatibleRequest, vectors_of
from bertsmith.serve.routes import classify_texts, embedding_request
from bertsmith.serve.schemas import Texts
from bertsmith.serve.service import PredictionRequest, Service, list_field, single_field

MIN_PROBABILITY = 1e-30
"""Smallest probability to take a logarithm of."""
SINGLE_LABEL = "LABEL_0"
"""Label that published configs use for a model with one output."""

OneOrTwo = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=2)]


class TeiRequest(CompatibleRequest):
    """A request of text-embeddings-inference, with a model's name for servers of several models."""

    model: str | None = None
    truncate: bool | None = Field(False, description="True to truncate texts that are too long.")
    truncation_direction: Literal["right", "Right"] = "right"


class EmbedRequest(TeiRequest):
    """Texts to embed."""

    inputs: str | Texts
    normalize: bool = True
    prompt_name: str | None = Field(None, description="One of the model's prompts; by default its usual one.")
    dimensions: int | None = Field(None, ge=1)


class PredictRequest(TeiRequest):
    """A text, a pair of texts as two strings, or a list of lists of one or two strings."""

    inputs: str | OneOrTwo | Annotated[list[OneOrTwo], Field(fail_fast=True, min_length=1)]
    raw_scores: bool = False


class ClassScore(BaseModel):
    """A class and its score."""

    score: float
    label: str


class RerankRequest(TeiRequest):
    """A query, and texts to order by how well they fit it."""

    query: str
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False


class RankedText(BaseModel):
    """A text by its index in the request, and its score."""

    index: int
    score: float
    text: str | None = None


def tei_routes(service: Service) -> APIRouter:
    """Return the routes in the shape of text-embeddings-inference."""
    router = APIRouter()

    @router.post("/embed")
    async def embed(request: EmbedRequest) -> list[list[float]]:
        """Return a vector for each text, pooled as configured, of length 1 unless `normalize` is off."""
        is_one = isinstance(request.inputs, str)
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        service.check_count(texts)
        fields = single_field("inputs") if is_one else list_field("inputs")
        wanted = embedding_request(
            service.models.with_ability(request.model, "embed"),
            texts,
            prompt_name=request.prompt_name,
            truncate=bool(request.truncate),
            fields=fields,
        )
        found = await service.predict(wanted)
        rows = vectors_of(found, request.dimensions)
        vectors: list[list[float]] = (unit(rows) if request.normalize else rows).tolist()
        return vectors

    @router.post("/predict")
    async def predict(request: PredictRequest) -> list[ClassScore] | list[list[ClassScore]]:
        """Return the classes of a text or pair with their scores, the best first."""
        is_batch = isinstance(request.inputs, list) and isinstance(request.inputs[0], list)
        if is_batch:
            service.check_count(request.inputs)
        found = await classify_texts(
            service,
            _texts_of(request.inputs),
            model=request.model,
            truncate=bool(request.truncate),
            fields=list_field("inputs") if is_batch else _inputs,
        )
        results = [_class_scores(each, is_raw=bool(request.raw_scores)) for each in found.results]
        return results if is_batch else results[0]

    @router.post("/rerank", response_model_exclude_none=True)
    async def rerank(request: RerankRequest) -> list[RankedText]:
        """Return the texts in order of how well they fit the query, the best first."""
        scores = await _rerank_scores(service, request)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        texts = request.texts if request.return_text else [None] * len(scores)
        return [RankedText(index=index, score=scores[index], text=texts[index]) for index in order]

    return router


def _inputs(_index: int) -> tuple[str, ...]:
    """Return the fields of the only text or pair of a request."""
    return "inputs", "inputs[0]", "inputs[1]"


def _query_and_texts(index: int) -> tuple[str, ...]:
    """Return the field of an input: the query, then the texts."""
    return (f"texts[{index - 1}]" if index else "query",)


def _texts_of(inputs: str | list[str] | list[list[str]]) -> list[str | tuple[str, str]]:
    if isinstance(inputs, str):
        return [inputs]
    several = inputs if isinstance(inputs[0], list) else [inputs]
    return [each[0] if len(each) == 1 else (each[0], each[1]) for each in several]


def _class_scores(found: Classification | float, *, is_raw: bool) -> list[ClassScore]:
    if isinstance(found, float):
        return [ClassScore(score=found if is_raw else _sigmoid(found), label=SINGLE_LABEL)]
    form: Callable[[float], float] = float
    if is_raw:
        form = _log_odds if found.is_several else _log
    probabilities = found.probabilities.items()
    scored = [ClassScore(score=form(probability), label=label) for label, probability in probabilities]
    return sorted(scored, key=lambda each: -each.score)


async def _rerank_scores(service: Service, request: RerankRequest) -> list[float]:
    """Return scores by a model that scores pairs, if available; otherwise cosines with the query."""
    scorer, truncate = service.models.pair_scorer(request.model), bool(request.truncate)
    service.check_count(request.texts)
    texts = [request.query, *request.texts]
    if scorer is not None:
        wanted = PredictionRequest(
            BatchKey("score", (False,)),
            texts,
            scorer.name,
            truncate,
            fields=_query_and_texts,
            pairs_with_first=True,
        )
        found = await service.predict(wanted)
        return [float(number) if request.raw_scores else _sigmoid(number) for number in found.results]
    model = service.models.with_ability(request.model, "embed")
    found = await service.predict(embedding_request(model, texts, truncate=truncate, fields=_query_and_texts))
    query, *rows = unit(vectors_of(found, None))
    return [float(query @ row) for row in rows]


def _log(probability: float) -> float:
    """Return the score before the softmax, up to a constant for all classes."""
    return math.log(max(probability, MIN_PROBABILITY))


def _log_odds(probability: float) -> float:
    """Return the score before the sigmoid."""
    return _log(probability) - _log(1 - probability)


def _sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number)) if number >= 0 else 1 - 1 / (1 + math.exp(number))
