"""The JSON of the routes that look inside of models."""

from typing import Annotated

from pydantic import BaseModel, Field

from bertsmith.serve.schemas import ApiRequest, ApiResponse, Candidate, Seed, Texts


class IntrospectionRequest(ApiRequest):
    """A text, or two."""

    first: str
    second: str | None = None


class TokensRequest(IntrospectionRequest):
    """A text, or two, and which of the random maskings to show."""

    seed: Seed = 0


class TokenView(BaseModel):
    """A token as the model takes it, and what masking did to it: nothing, mask, random or kept."""

    text: str
    id: int
    segment: int
    position: int
    start: int
    end: int
    masking: str
    shown: str


class TokensResponse(ApiResponse):
    """All tokens, the special ones among them."""

    tokens: list[TokenView]


class AttentionResponse(ApiResponse):
    """Who attends to whom: weights by layer, head, from, to."""

    tokens: list[str]
    layers: int
    heads: int
    weights: list[list[list[list[float]]]]


class SensesRequest(ApiRequest):
    """A word, and sentences in which it stands."""

    word: str
    sentences: Texts


class OccurrencePoint(BaseModel):
    """One occurrence of the word, and its place on the map."""

    sentence: int
    start: int
    end: int
    x: float
    y: float


class LayerCosines(BaseModel):
    """The cosine of each two vectors after one layer, as they are and without the mean of all tokens."""

    similarity: list[list[float]]
    centred: list[list[float]]


class SensesLayer(LayerCosines):
    """Where the occurrences lie after one layer, in units of the vectors' mean length."""

    plane: list[tuple[float, float]]


class SensesResponse(ApiResponse):
    """Every occurrence, and the cosine of each two, after the last layer; then the same for all layers.

    Layer 0 is the word's own vector, before position and context.
    """

    points: list[OccurrencePoint]
    similarity: list[list[float]]
    layers: list[SensesLayer]


class SimilarityRequest(ApiRequest):
    """Texts to compare, each with each, layer by layer."""

    texts: Annotated[list[str], Field(fail_fast=True, min_length=2)]


class SimilarityResponse(ApiResponse):
    """The cosines of the mean vectors of the texts, from the tokens' own vectors to the last layer."""

    layers: list[LayerCosines]


class GuessesRequest(ApiRequest):
    """A text with masks."""

    text: str
    top: int = Field(3, ge=1, le=20)


class LayerGuessesView(BaseModel):
    """What would be guessed after this layer; `final` is what the last layer's best guess has here."""

    guesses: list[Candidate]
    final: float


class MaskLayersView(BaseModel):
    """Where a mask stands, and the guesses for it from the embeddings to the last layer."""

    start: int
    end: int
    layers: list[LayerGuessesView]


class GuessesResponse(ApiResponse):
    """One entry for each mask."""

    masks: list[MaskLayersView]


class HeadView(BaseModel):
    """What a head is like: previous, next, itself, first, separator, broad or mixed, and how clearly."""

    kind: str
    share: float


class MomentView(BaseModel):
    """A token, and another one apart from it that a head reads clearly."""

    layer: int
    head: int
    token: int
    target: int
    weight: float


class HeadsResponse(ApiResponse):
    """All heads in small: by layer and head their kind, and a map of at most 24 by 24 cells."""

    tokens: list[str]
    special: list[bool]
    kinds: list[list[HeadView]]
    maps: list[list[list[list[float]]]]
    moment: MomentView | None


class HeadRequest(IntrospectionRequest):
    """A text, or two, and a head, counted from 0; without one, the mean of all heads of the layer."""

    layer: int = Field(ge=0)
    head: int | None = Field(None, ge=0)


class HeadResponse(ApiResponse):
    """Who attends to whom in this head: weights by from, to."""

    weights: list[list[float]]


class HeadStepsRequest(IntrospectionRequest):
    """A text, or two, a head and a token, all counted from 0."""

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    token: int = Field(ge=0)


class HeadStepsResponse(ApiResponse):
    """Query, scores and weights of the token, key and value of those it reads most, and the sum."""

    query: list[float]
    scores: list[float]
    weights: list[float]
    most_read: list[int]
    keys: list[list[float]]
    values: list[list[float]]
    output: list[float]


class EmbeddingRequest(IntrospectionRequest):
    """A text, or two, and one of its tokens, counted from 0."""

    token: int = Field(ge=0)


class EmbeddingPartView(BaseModel):
    """A vector: of the token, its position, its segment, their sum, or the sum as it is normalised."""

    name: str
    values: list[float]


class EmbeddingResponse(ApiResponse):
    """What is added up for the token."""

    parts: list[EmbeddingPartView]


class WordsRequest(ApiRequest):
    """A text to classify, or two; or a question and its passage."""

    first: str
    second: str | None = None


class WordView(BaseModel):
    """A word of the first text (part 0) or the second (1), and what the outcome loses without it."""

    part: int
    start: int
    end: int
    change: float


class WordsResponse(ApiResponse):
    """Which words decided: the outcome's probability, or score, less that without each word."""

    outcome: str
    value: float
    words: list[WordView]
