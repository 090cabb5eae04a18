"""The routes of OpenAI's embeddings API, and their JSON as its clients send and expect it."""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from bertsmith.core.errors import UserError
from bertsmith.inference.text_reader import TextInput
from bertsmith.inference.vectors import unit
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.model_registry import ServedModel
from bertsmith.serve.routes import embedding_request
from bertsmith.serve.schemas import Texts
from bertsmith.serve.service import (
    FieldNames,
    Predictions,
    Service,
    check_lengths,
    list_field,
    single_field,
)

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]


class CompatibleRequest(BaseModel):
    """A request in another API's shape: unknown fields are ignored, as the other servers do."""

    model_config = ConfigDict(strict=True)


class EmbeddingsRequest(CompatibleRequest):
    """OpenAI: texts, or token ids of the served model's own vocabulary."""

    input: str | Texts | TokenIds | TokenIdLists = Field(
        description="Token ids are used unchanged, between the model's special tokens."
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = Field(None, description="Ignored.")


class Embedding(BaseModel):
    """A vector of length 1, as numbers or as base64 of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Number of tokens read, including special ones."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """OpenAI: one vector for each input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class OpenAiModel(BaseModel):
    """OpenAI: a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bertsmith"


class OpenAiModels(BaseModel):
    """OpenAI: the models."""

    object: Literal["list"] = "list"
    data: list[OpenAiModel]


def openai_routes(service: Service) -> APIRouter:
    """Return the routes in OpenAI's shape."""
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def list_models() -> OpenAiModels:
        """List the models of this server."""
        return OpenAiModels(data=[_listed(model) for model in service.models])

    @router.get("/models/{name:path}")
    async def show_model(name: str) -> OpenAiModel:
        """Show a model of this server; its name may contain slashes."""
        return _listed(service.models.get(name))

    @router.post("/embeddings")
    async def embeddings(request: EmbeddingsRequest) -> EmbeddingsResponse:
        """Return a vector of length 1 for each input, pooled as configured in the model's folder."""
        model = service.models.with_ability(request.model, "embed")
        is_one = isinstance(request.input, str) or isinstance(request.input[0], int)
        fields = single_field("input") if is_one else list_field("input")
        texts = await _inputs_of(request.input, model, service=service, fields=fields)
        found = await service.predict(embedding_request(model, texts, fields=fields))
        rows = unit(vectors_of(found, request.dimensions))
        data = [
            Embedding.model_construct(index=index, embedding=_encoded(row, request.encoding_format))
            for index, row in enumerate(rows)
        ]
        usage = Usage(prompt_tokens=found.tokens, total_tokens=found.tokens)
        return EmbeddingsResponse(data=data, model=found.model, usage=usage)

    return router


def vectors_of(found: Predictions, dimensions: int | None) -> NDArray[np.float64]:
    """Return the predicted vectors, or the first `dimensions` of their dimensions."""
    rows = np.stack(found.results).astype(np.float64)
    if dimensions is not None and dimensions > rows.shape[1]:
        message = f"dimensions: the model's vectors have {rows.shape[1]}, not {dimensions}"
        raise ApiError(422, message)
    return rows[:, :dimensions]


def _listed(model: ServedModel) -> OpenAiModel:
    return OpenAiModel(id=model.name, created=model.info.modified)


def _encoded(row: NDArray[np.float64], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = row.tolist()
    return numbers


async def _inputs_of(
    given: str | list[str] | list[int] | list[list[int]],
    model: ServedModel,
    *,
    service: Service,
    fields: FieldNames,
) -> Sequence[TextInput]:
    """Return the texts that were sent, or the token ids as texts with these tokens."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given[0], int):
        service.check_count(given)
    if isinstance(given[0], str):
        return [str(text) for text in given]
    lists = [given] if isinstance(given[0], int) else given
    if not service.truncates:
        check_lengths([len(ids) for ids in lists], model, fields)
    reader, sentence = await model.reader(), model.info.sentence
    prompt = sentence.default_prompt.lower() if sentence.lowers_case else sentence.default_prompt
    try:
        return await service.in_thread(reader.tokenize_ids, lists, prompt)
    except UserError as error:
        raise ApiError(422, error.line()) from error
