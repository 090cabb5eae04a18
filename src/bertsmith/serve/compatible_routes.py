"""Routes for clients that exist: OpenAI's embeddings, and text-embeddings-inference."""

import asyncio
import base64
import math
from collections.abc import Callable, Sequence

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray

from bertsmith.ground.errors import UserError
from bertsmith.inference.replies import Classification
from bertsmith.inference.similarity import unit
from bertsmith.serve.batching import Kind
from bertsmith.serve.compatible_shapes import (
    EmbedAsk,
    EmbeddingContent,
    EmbeddingsAsk,
    EmbeddingsReply,
    ListedModel,
    ModelList,
    PredictAsk,
    Prediction,
    Rank,
    RerankAsk,
    Usage,
)
from bertsmith.serve.fields import Fields, each_of, one
from bertsmith.serve.models import ServedModel
from bertsmith.serve.own_routes import classified
from bertsmith.serve.refusals import Refusal, refusal_of, too_many
from bertsmith.serve.service import Answered, Question, Service, refuse_too_long

SMALLEST_SHARE = 1e-30
"""Below it a probability has no logarithm worth telling."""
SINGLE_LABEL = "LABEL_0"
"""What the published config of a model with one output calls it."""


def openai_routes(service: Service) -> APIRouter:
    """Routes in OpenAI's shape."""
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def list_models() -> ModelList:
        """The models of this server."""
        return ModelList(data=[_listed(model) for model in service.models])

    @router.get("/models/{name:path}")
    async def show_model(name: str) -> ListedModel:
        """A model of this server; its name may hold slashes."""
        return _listed(service.models.named(name))

    @router.post("/embeddings")
    async def embeddings(ask: EmbeddingsAsk) -> EmbeddingsReply:
        """A vector of length 1 for each input: the mean of its last states."""
        model = service.models.able(ask.model, "embed")
        is_one = isinstance(ask.input, str) or isinstance(ask.input[0], int)
        fields = one("input") if is_one else each_of("input")
        texts = await _texts_of(ask.input, model, most=service.limits.texts, fields=fields)
        found = await _embedded(service, texts, model=model.name, fields=fields)
        rows = unit(_shortened(found.answers, ask.dimensions))
        data = [
            EmbeddingContent(index=number, embedding=_written(row, ask.encoding_format))
            for number, row in enumerate(rows)
        ]
        usage = Usage(prompt_tokens=found.tokens, total_tokens=found.tokens)
        return EmbeddingsReply(data=data, model=found.model, usage=usage)

    return router


def tei_routes(service: Service) -> APIRouter:
    """Routes in the shape of text-embeddings-inference."""
    router = APIRouter()

    @router.post("/embed")
    async def embed(ask: EmbedAsk) -> list[list[float]]:
        """A vector for each text: the mean of its last states, of length 1 unless `normalize` is off."""
        texts = [ask.inputs] if isinstance(ask.inputs, str) else ask.inputs
        fields = one("inputs") if isinstance(ask.inputs, str) else each_of("inputs")
        found = await _embedded(service, texts, model=ask.model, cut_long=bool(ask.truncate), fields=fields)
        rows = _shortened(found.answers, ask.dimensions)
        vectors: list[list[float]] = (unit(rows) if ask.normalize else rows).tolist()
        return vectors

    @router.post("/predict")
    async def predict(ask: PredictAsk) -> list[Prediction] | list[list[Prediction]]:
        """The classes of a text or pair with their scores, the best first."""
        texts = _predicted_texts(ask.inputs)
        is_batch = isinstance(ask.inputs, list) and isinstance(ask.inputs[0], list)
        fields = each_of("inputs") if is_batch else _inputs
        found = await classified(service, texts, model=ask.model, cut_long=bool(ask.truncate), fields=fields)
        results = [_predictions(each, is_raw=bool(ask.raw_scores)) for each in found.answers]
        return results if is_batch else results[0]

    @router.post("/rerank", response_model_exclude_none=True)
    async def rerank(ask: RerankAsk) -> list[Rank]:
        """The texts by how well they fit the query, the best first."""
        scores = await _fitness(service, ask)
        order = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
        texts = ask.texts if ask.return_text else [None] * len(scores)
        return [Rank(index=number, score=scores[number], text=texts[number]) for number in order]

    return router


def _listed(model: ServedModel) -> ListedModel:
    return ListedModel(id=model.name, created=model.facts.modified)


async def _embedded(
    service: Service, texts: Sequence[str], *, model: str | None, cut_long: bool = False, fields: Fields
) -> Answered:
    question = Question(Kind("embed", (cut_long,)), texts, texts, model, cut_long, fields=fields)
    return await service.ask(question)


def _inputs(_number: int) -> tuple[str, ...]:
    """The only text or pair of a request for predictions."""
    return "inputs", "inputs[0]", "inputs[1]"


def _query_with_text(number: int) -> tuple[str, ...]:
    """A text that is read together with the query."""
    return f"query with texts[{number}]", "query", f"texts[{number}]"


def _query_and_texts(number: int) -> tuple[str, ...]:
    """The query and the texts, each read by itself."""
    return (f"texts[{number - 1}]" if number else "query",)


def _shortened(vectors: Sequence[Sequence[float]], dimensions: int | None) -> NDArray[np.float64]:
    rows = np.asarray(vectors, dtype=np.float64)
    if dimensions is not None and dimensions > rows.shape[1]:
        message = f"dimensions: the model's vectors have {rows.shape[1]}, not {dimensions}"
        raise Refusal(422, message)
    return rows[:, :dimensions]


def _written(row: NDArray[np.float64], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = row.tolist()
    return numbers


async def _texts_of(
    given: str | list[str] | list[int] | list[list[int]], model: ServedModel, *, most: int, fields: Fields
) -> list[str]:
    """The inputs as texts; token ids are read back into the text that they spell."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return [str(text) for text in given]
    lists = [given] if isinstance(given[0], int) else given
    if len(lists) > most:
        raise too_many(len(lists), most=most)
    tokenizer = (await model.opened()).tokenizer
    # Before they are read back, which takes a while for each of them; nobody else must wait for that.
    refuse_too_long([len(ids) for ids in lists], model, fields)
    try:
        return await asyncio.to_thread(lambda: [tokenizer.decode(ids) for ids in lists])
    except UserError as error:
        raise refusal_of(error) from error


def _predicted_texts(inputs: str | list[str] | list[list[str]]) -> list[str | tuple[str, str]]:
    if isinstance(inputs, str):
        return [inputs]
    several = inputs if isinstance(inputs[0], list) else [inputs]
    return [each[0] if len(each) == 1 else (each[0], each[1]) for each in several]


def _predictions(found: Classification | float, *, is_raw: bool) -> list[Prediction]:
    if isinstance(found, float):
        return [Prediction(score=found if is_raw else _sigmoid(found), label=SINGLE_LABEL)]
    form: Callable[[float], float] = float
    if is_raw:
        form = _log_odds if found.is_several else _log_share
    shares = found.probabilities.items()
    scored = [Prediction(score=form(share), label=label) for label, share in shares]
    return sorted(scored, key=lambda each: -each.score)


async def _fitness(service: Service, ask: RerankAsk) -> list[float]:
    """By a model that gives pairs a number, where there is one; else the cosine of query and text."""
    judge = service.models.judge_of_pairs(ask.model)
    cut_long = bool(ask.truncate)
    if judge is not None:
        pairs = [(ask.query, text) for text in ask.texts]
        kind = Kind("score", (cut_long, False))
        question = Question(kind, pairs, pairs, judge.name, cut_long, fields=_query_with_text)
        numbers = (await service.ask(question)).answers
        return [float(number) if ask.raw_scores else _sigmoid(number) for number in numbers]
    texts = [ask.query, *ask.texts]
    found = await _embedded(service, texts, model=ask.model, cut_long=cut_long, fields=_query_and_texts)
    query, *rows = unit(found.answers)
    return [float(query @ row) for row in rows]


def _log_share(share: float) -> float:
    """The score before the softmax, up to what is added to those of all classes."""
    return math.log(max(share, SMALLEST_SHARE))


def _log_odds(share: float) -> float:
    """The score before the sigmoid."""
    return _log_share(share) - _log_share(1 - share)


def _sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number)) if number >= 0 else 1 - 1 / (1 + math.exp(number))
