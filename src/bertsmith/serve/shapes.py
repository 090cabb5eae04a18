"""The JSON of our own routes. Offsets count Unicode code points; `end` is past the last one."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
TextOrPair = str | Pair
Several = Annotated[list[str], Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Ask(BaseModel):
    """A request: nothing in it is guessed, converted or ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="Name of a model; without it the first that can do it.")


class Reply(BaseModel):
    """A reply, with the model that gave it."""

    model: str


class ErrorContent(BaseModel):
    """What went wrong."""

    message: str
    type: str
    request_id: str


class ErrorReply(BaseModel):
    """The reply to every request that fails."""

    error: ErrorContent


class FillAsk(Ask):
    """A text with masks."""

    text: str
    top: int = Field(5, ge=1, le=100)


class GuessReply(BaseModel):
    """A token for a mask."""

    token: str
    probability: float


class MaskReply(BaseModel):
    """A mask, and what may stand in its place, the most probable first."""

    start: int
    end: int
    guesses: list[GuessReply]


class FillReply(Reply):
    """Every mask of the text, each by itself."""

    masks: list[MaskReply]


class NextAsk(Ask):
    """Does the second text follow the first?"""

    first: str
    second: str


class NextReply(Reply):
    """Whether it does, and how probably."""

    follows: bool
    probability: float


class ClassifyAsk(Ask):
    """Texts, or pairs of texts for a model that was fine-tuned on pairs."""

    texts: Annotated[list[TextOrPair], Field(min_length=1)]


class ClassReply(BaseModel):
    """The class of a text."""

    label: str
    probability: float
    probabilities: dict[str, float]


class LabelsReply(BaseModel):
    """The classes of a text that may have any number of them: those of at least 0.5."""

    labels: list[str]
    probabilities: dict[str, float]


class ScoreReply(BaseModel):
    """The number that a model for regression gives a text."""

    score: float


class ClassifyReply(Reply):
    """One result for each text, by the kind of model."""

    results: list[ClassReply | LabelsReply | ScoreReply]


class TagAsk(Ask):
    """Texts whose words are to be tagged."""

    texts: Several


class WordReply(BaseModel):
    """A word and its tag."""

    text: str
    start: int
    end: int
    tag: str
    probability: float


class EntityReply(BaseModel):
    """A stretch of a text; the probability is the mean of its words'."""

    text: str
    start: int
    end: int
    label: str
    probability: float


class TaggedReply(BaseModel):
    """The words of a text, and the stretches that their tags mark."""

    words: list[WordReply]
    entities: list[EntityReply]


class TagReply(Reply):
    """One result for each text."""

    results: list[TaggedReply]


class AnswerAsk(Ask):
    """A question and the passage that may answer it."""

    question: str
    passage: str
    best: int = Field(3, ge=1, le=20)


class SpanReply(BaseModel):
    """A stretch of the passage; no answer is an empty text that starts at -1."""

    text: str
    start: int
    end: int
    probability: float


class AnswerReply(Reply):
    """The answer, and after it what else was considered, the best first."""

    answers: list[SpanReply]
    no_answer: bool
    no_answer_probability: float | None
    decided_by_threshold: bool = Field(
        description="Whether something else is more probable, but the model's no-answer threshold decided."
    )


class CompareAsk(Ask):
    """Texts to compare, each with each."""

    texts: Annotated[list[str], Field(min_length=2)]


class CompareReply(Reply):
    """The cosine of the mean-pooled vectors of each two texts."""

    similarity: list[list[float]]


class LookAsk(Ask):
    """A text, or two."""

    first: str
    second: str | None = None


class TokensAsk(LookAsk):
    """A text, or two, and which of the random maskings to show."""

    seed: Seed = 0


class TokenReply(BaseModel):
    """A token as the model takes it, and what masking did to it: nothing, mask, random or kept."""

    text: str
    id: int
    segment: int
    position: int
    start: int
    end: int
    masking: str
    shown: str


class TokensReply(Reply):
    """All tokens, the special ones among them."""

    tokens: list[TokenReply]


class AttentionReply(Reply):
    """Who attends to whom: weights by layer, head, from, to."""

    tokens: list[str]
    layers: int
    heads: int
    weights: list[list[list[list[float]]]]


class SensesAsk(Ask):
    """A word, and sentences in which it stands."""

    word: str
    sentences: Several


class PointReply(BaseModel):
    """One occurrence of the word, and its place on the map."""

    sentence: int
    start: int
    end: int
    x: float
    y: float


class SensesReply(Reply):
    """Every occurrence, and the cosine of each two."""

    points: list[PointReply]
    similarity: list[list[float]]


class ModelReply(BaseModel):
    """What a model is and can do."""

    name: str
    abilities: list[str]
    labels: list[str]
    mask: str | None = Field(description="How a mask is written; null where the model has none.")
    pairs: bool = Field(description="Whether it takes pairs of texts.")
    single: bool = Field(description="Whether it takes single texts.")
    loaded: bool
    layers: int
    heads: int
    width: int
    longest: int


class ModelsReply(BaseModel):
    """The models of this server."""

    models: list[ModelReply]


class StatusReply(BaseModel):
    """How the server is."""

    status: str


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of failures."""
    return {status: {"model": ErrorReply} for status in statuses}
