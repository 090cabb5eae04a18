"""The JSON of OpenAI's embeddings and of text-embeddings-inference, as their clients send and expect it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

TokenId = Annotated[int, Field(ge=0)]
SomeTexts = Annotated[list[str], Field(min_length=1)]
SomeIds = Annotated[list[TokenId], Field(min_length=1)]
SomeIdLists = Annotated[list[SomeIds], Field(min_length=1)]
OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2)]


class Foreign(BaseModel):
    """A request of someone else's shape: fields we do not know are passed over, as their servers do."""

    model_config = ConfigDict(strict=True)


class EmbeddingsAsk(Foreign):
    """OpenAI: texts, or token ids of the served model's own vocabulary."""

    input: str | SomeTexts | SomeIds | SomeIdLists
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = Field(None, description="Passed over.")


class EmbeddingContent(BaseModel):
    """A vector of length 1, as numbers or as base64 of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were read, special ones included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    """OpenAI: one vector for each input."""

    object: Literal["list"] = "list"
    data: list[EmbeddingContent]
    model: str
    usage: Usage


class ListedModel(BaseModel):
    """OpenAI: a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bertsmith"


class ModelList(BaseModel):
    """OpenAI: the models."""

    object: Literal["list"] = "list"
    data: list[ListedModel]


class TeiAsk(Foreign):
    """Text-embeddings-inference, with a name where a server has several models."""

    model: str | None = None
    truncate: bool | None = Field(False, description="Whether texts that are too long lose their end.")
    truncation_direction: Literal["right", "Right"] = "right"


class EmbedAsk(TeiAsk):
    """Texts to embed."""

    inputs: str | SomeTexts
    normalize: bool = True
    prompt_name: str | None = Field(None, description="Refused: these models have no prompts.")
    dimensions: int | None = Field(None, ge=1)

    @field_validator("prompt_name")
    @classmethod
    def refuse_prompts(cls, name: str | None) -> None:
        """Stop at the name of a prompt."""
        if name is not None:
            raise ValueError("these models have no prompts; leave prompt_name out")


class PredictAsk(TeiAsk):
    """A text, a pair of texts as two strings, or a list of lists of one or two strings."""

    inputs: str | OneOrTwo | Annotated[list[OneOrTwo], Field(min_length=1)]
    raw_scores: bool = False


class Prediction(BaseModel):
    """A class and its score."""

    score: float
    label: str


class RerankAsk(TeiAsk):
    """A query, and texts to order by how well they fit it."""

    query: str
    texts: SomeTexts
    raw_scores: bool = False
    return_text: bool = False


class Rank(BaseModel):
    """A text by its number in the request, and its score."""

    index: int
    score: float
    text: str | None = None
