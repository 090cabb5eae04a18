"""JSON schemas of the routes that show the inside of a model."""

from typing import Annotated

from pydantic import BaseModel, Field

from bertsmith.inference.head_introspection import HeadSummary, Moment
from bertsmith.inference.introspection import InspectedToken, SensePoint
from bertsmith.inference.layer_introspection import MaskLayers
from bertsmith.serve.schemas import ApiRequest, ApiResponse, Seed, Texts


class IntrospectionRequest(ApiRequest):
    """A text, or a pair of texts."""

    first: str
    second: str | None = None


class TokensRequest(IntrospectionRequest):
    """A text or pair, and the seed of the random masking to show."""

    seed: Seed = 0


class TokensResponse(ApiResponse):
    """All tokens, including the special ones."""

    tokens: list[InspectedToken]


class AttentionResponse(ApiResponse):
    """Attention weights, indexed [layer][head][from][to]."""

    tokens: list[str]
    layers: int
    heads: int
    weights: list[list[list[list[float]]]]


class SensesRequest(ApiRequest):
    """A word, and sentences that contain it."""

    word: str
    sentences: Texts


class LayerCosines(BaseModel):
    """The cosine of every two vectors after one layer, as they are and without the mean of all tokens."""

    similarity: list[list[float]]
    centred: list[list[float]]


class SensesLayer(LayerCosines):
    """Map of the occurrences after one layer, in units of the vectors' mean length."""

    plane: list[tuple[float, float]]


class SensesResponse(ApiResponse):
    """Every occurrence, and the cosine of every two, after the last layer; then the same for all layers.

    Layer 0 is the word's own vector, before position and context.
    """

    points: list[SensePoint]
    similarity: list[list[float]]
    layers: list[SensesLayer]


class SimilarityRequest(ApiRequest):
    """Texts to compare with each other, layer by layer."""

    texts: Annotated[list[str], Field(fail_fast=True, min_length=2)]


class SimilarityResponse(ApiResponse):
    """Cosines of the texts' mean vectors, from the tokens' own vectors to the last layer."""

    layers: list[LayerCosines]


class GuessesRequest(ApiRequest):
    """A text with masks."""

    text: str
    top: int = Field(3, ge=1, le=20)


class GuessesResponse(ApiResponse):
    """One entry for each mask."""

    masks: list[MaskLayers]


class HeadsResponse(ApiResponse):
    """All heads in small, by layer and head: their kind, and a map of at most 24 by 24 cells."""

    tokens: list[str]
    special: list[bool]
    kinds: list[list[HeadSummary]]
    maps: list[list[list[list[float]]]]
    moment: Moment | None


class HeadRequest(IntrospectionRequest):
    """A text or pair, and a head, counted from 0; without one, the mean of all heads of the layer."""

    layer: int = Field(ge=0)
    head: int | None = Field(None, ge=0)


class HeadResponse(ApiResponse):
    """Attention weights of one head, indexed [from][to]."""

    weights: list[list[float]]


class HeadStepsRequest(IntrospectionRequest):
    """A text or pair, a head and a token, all counted from 0."""

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    token: int = Field(ge=0)


class HeadStepsResponse(ApiResponse):
    """Query, scores and weights of a token; keys and values of the tokens that it reads most; the output."""

    query: list[float]
    scores: list[float]
    weights: list[float]
    most_read: list[int]
    keys: list[list[float]]
    values: list[list[float]]
    output: list[float]


class EmbeddingRequest(IntrospectionRequest):
    """A text or pair, and one of its tokens, counted from 0."""

    token: int = Field(ge=0)


class EmbeddingPartView(BaseModel):
    """A vector: of the token, its position or its segment; their sum; or the normalised sum."""

    name: str
    values: list[float]


class EmbeddingResponse(ApiResponse):
    """The vectors that are added up for the token."""

    parts: list[EmbeddingPartView]


class WordsRequest(ApiRequest):
    """A text or pair to classify, or a question and its passage."""

    first: str
    second: str | None = None


class WordView(BaseModel):
    """A word of the first text (part 0) or the second (1), and the outcome's loss without it."""

    part: int
    start: int
    end: int
    change: float


class WordsResponse(ApiResponse):
    """The probability or score of the outcome, and its loss without each word."""

    outcome: str
    value: float
    words: list[WordView]
