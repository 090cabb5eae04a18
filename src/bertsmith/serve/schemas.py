"""JSON schemas of bertsmith's own routes. Offsets count Unicode code points; `end` is past the last one."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from bertsmith.inference.fill_mask import Candidate

# fail_fast: the first wrong item of a list is enough. Errors of a million items take seconds and a gigabyte.
SentPair = Annotated[list[str], Field(fail_fast=True, min_length=2, max_length=2)]
SentTextOrPair = str | SentPair
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class ApiRequest(BaseModel):
    """A request: nothing in it is guessed, converted or ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="Name of a model; by default the first with this ability.")


class ApiResponse(BaseModel):
    """A response, with the name of the model that gave it."""

    model: str


class ErrorDetail(BaseModel):
    """Message, type and request id of an error."""

    message: str
    type: str
    request_id: str


class ErrorResponse(BaseModel):
    """The response to every failed request."""

    error: ErrorDetail


class FillRequest(ApiRequest):
    """A text with masks."""

    text: str
    top: int = Field(5, ge=1, le=100)


class FilledMask(BaseModel):
    """A mask, and the tokens that may replace it, the most probable first."""

    start: int
    end: int
    guesses: list[Candidate]


class FillResponse(ApiResponse):
    """All masks of the text, each filled independently."""

    masks: list[FilledMask]


class NextRequest(ApiRequest):
    """Two texts, to predict if the second follows the first."""

    first: str
    second: str


class NextResponse(ApiResponse):
    """The prediction, and the probability that the second text follows."""

    follows: bool
    probability: float


class ClassifyRequest(ApiRequest):
    """Texts, or pairs of texts for a model that was fine-tuned on pairs."""

    texts: Annotated[list[SentTextOrPair], Field(fail_fast=True, min_length=1)]


class ClassResult(BaseModel):
    """The class of a text."""

    label: str
    probability: float
    probabilities: dict[str, float]


class LabelsResult(BaseModel):
    """The classes of a text that may have any number of them: those with a probability of at least 0.5."""

    labels: list[str]
    probabilities: dict[str, float]


class ScoreResult(BaseModel):
    """The number that a regression model gives a text."""

    score: float


class ClassifyResponse(ApiResponse):
    """One result for each text, by the kind of model."""

    results: list[ClassResult | LabelsResult | ScoreResult]


class TagRequest(ApiRequest):
    """Texts to tag word by word."""

    texts: Texts


class WordResult(BaseModel):
    """A word and its tag."""

    text: str
    start: int
    end: int
    tag: str
    probability: float


class EntityResult(BaseModel):
    """An entity in a text; its probability is the mean over its words."""

    text: str
    start: int
    end: int
    label: str
    probability: float


class TagResult(BaseModel):
    """The words of a text, and the entities that their tags mark."""

    words: list[WordResult]
    entities: list[EntityResult]


class TagResponse(ApiResponse):
    """One result for each text."""

    results: list[TagResult]


class AnswerRequest(ApiRequest):
    """A question and the passage that may answer it."""

    question: str
    passage: str
    best: int = Field(3, ge=1, le=20)


class AnswerSpan(BaseModel):
    """A part of the passage; no answer is an empty text that starts at -1."""

    text: str
    start: int
    end: int
    probability: float


class AnswerResponse(ApiResponse):
    """The answer, followed by the other candidates, the best first."""

    answers: list[AnswerSpan]
    no_answer: bool
    no_answer_probability: float | None
    decided_by_threshold: bool = Field(
        description="True if something else is more probable, but the model's no-answer threshold decided."
    )


class ChooseRequest(ApiRequest):
    """A context and its options: possible continuations, or possible answers to a question."""

    context: str
    options: Annotated[list[str], Field(fail_fast=True, min_length=2)]


class ChooseResponse(ApiResponse):
    """The option that fits best, its index from 0, and the probabilities of all options in order."""

    index: int
    option: str
    probabilities: list[float]


class CompareRequest(ApiRequest):
    """Texts to compare with each other."""

    texts: Annotated[list[str], Field(fail_fast=True, min_length=2)]


class CompareResponse(ApiResponse):
    """The cosine of every two text vectors, pooled as configured in the model's folder."""

    similarity: list[list[float]]


class ModelDescription(BaseModel):
    """Properties and abilities of a model."""

    name: str
    abilities: list[str]
    labels: list[str]
    mask: str | None = Field(description="Text of a mask; null if the model does not have one.")
    pairs: bool = Field(description="True if it accepts pairs of texts.")
    single: bool = Field(description="True if it accepts single texts.")
    loaded: bool
    layers: int
    heads: int | None = Field(description="Attention heads per layer; null if the model does not have them.")
    width: int
    longest: int


class ModelsResponse(BaseModel):
    """The models of this server."""

    models: list[ModelDescription]


class StatusResponse(BaseModel):
    """The status of the server."""

    status: str


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses for the OpenAPI document."""
    return {status: {"model": ErrorResponse} for status in statuses}
