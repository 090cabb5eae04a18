"""Predictions for texts, as Python objects and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertsmith.core.measures import bits, perplexity


@dataclass(frozen=True, slots=True)
class Classification:
    """The class of a text, or its classes if it may have any number of them."""

    label: str
    """The most probable label."""
    probability: float
    """Probability of `label`."""
    probabilities: dict[str, float]
    """Probability of every label; they sum to 1 unless a text may have several labels."""
    labels: tuple[str, ...]
    """The one label; if a text may have several, all with a probability of at least 0.5."""
    is_several: bool = False
    """True if a text may have any number of labels."""


@dataclass(frozen=True, slots=True)
class NextSentence:
    """Prediction that the second text follows the first or not, and the probability that it does."""

    follows: bool
    probability: float


@dataclass(frozen=True, slots=True)
class TaggedWord:
    """A word of a sentence and its tag."""

    word: str
    tag: str
    start: int
    """First code point in the sentence; a sentence given in words counts as joined by single spaces."""
    end: int
    """Past the last code point."""
    probability: float


@dataclass(frozen=True, slots=True)
class Entity:
    """A span of a text, and its type."""

    type: str
    text: str
    """text[start:end], unchanged."""
    start: int
    end: int
    probability: float
    """Mean of its words' probabilities."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The right one of several pairs."""

    index: int
    """Index from 0."""
    probabilities: tuple[float, ...]
    """Probability of each pair; they sum to 1."""


@dataclass(frozen=True, slots=True)
class WordLikelihood:
    """A word of a text and its log-probability."""

    word: str
    start: int
    """First code point in the text."""
    end: int
    """Past the last code point."""
    log_probability: float
    """Sum over its pieces, in nats."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-likelihood of a text and of each of its words."""

    log_likelihood: float
    """Sum over the tokens, in nats; of a masked model, the pseudo-log-likelihood."""
    tokens: int
    """Number of tokens that were predicted, without special ones."""
    characters: int
    """Number of characters without white space, which some vocabularies drop."""
    words: tuple[WordLikelihood, ...]
    """Words and punctuation marks; their log-probabilities add up to the log-likelihood."""
    is_pseudo: bool
    """True for a masked model, which predicts each token from all others."""

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss per token; of a masked model, the pseudo-perplexity."""
        return perplexity(-self.log_likelihood / max(1, self.tokens))

    @property
    def bits_per_character(self) -> float:
        """Loss in bits per character, comparable across vocabularies."""
        return bits(-self.log_likelihood) / max(1, self.characters)


if TYPE_CHECKING:
    from bertsmith.inference.fill_mask import Candidate
    from bertsmith.tasks.answers import QuestionAnswer

Json = dict[str, Any]

ABILITIES = {
    "fill": "predict words",
    "extend": "continue texts",
    "next": "judge whether one sentence follows another",
    "classify": "classify texts",
    "score": "give texts a number",
    "tag": "tag words",
    "answer": "answer questions",
    "choose": "choose among texts",
    "embed": "embed texts",
    "look": "show its inside",
}
"""The abilities of a `Bert` in words."""


def masks_to_json(
    offsets: Sequence[tuple[int, int]], candidates: "Sequence[Sequence[Candidate]]"
) -> list[Json]:
    """Return the masks of a text, each with its candidates."""
    return [
        {
            "start": start,
            "end": end,
            "guesses": [{"token": each.token, "probability": each.probability} for each in of_mask],
        }
        for (start, end), of_mask in zip(offsets, candidates, strict=True)
    ]


def classification_to_json(found: Classification | float) -> Json:
    """Return the class of a text, its classes if it may have any number of them, or its number."""
    if isinstance(found, float):
        return {"score": found}
    if found.is_several:
        return {"labels": list(found.labels), "probabilities": found.probabilities}
    return {"label": found.label, "probability": found.probability, "probabilities": found.probabilities}


def likelihood_to_json(found: Likelihood, *, with_words: bool) -> Json:
    """Return the likelihood of a text, and of its words if requested."""
    words = [
        {"text": each.word, "start": each.start, "end": each.end, "log_probability": each.log_probability}
        for each in found.words
    ]
    return {
        "log_likelihood": found.log_likelihood,
        "tokens": found.tokens,
        "perplexity": found.perplexity,
        "bits_per_character": found.bits_per_character,
        "pseudo": found.is_pseudo,
        **({"words": words} if with_words else {}),
    }


def choice_to_json(found: Choice, options: Sequence[str]) -> Json:
    """Return the index of the option that fits best, the option, and the probability of each."""
    return {"index": found.index, "option": options[found.index], "probabilities": list(found.probabilities)}


def tags_to_json(words: Sequence[TaggedWord], entities: Sequence[Entity]) -> Json:
    """Return the words of a text with their tags, and the entities that they form."""
    return {
        "words": [{"text": word.word, "tag": word.tag, **_span_to_json(word)} for word in words],
        "entities": [{"text": each.text, "label": each.type, **_span_to_json(each)} for each in entities],
    }


def answers_to_json(found: "Sequence[QuestionAnswer]") -> Json:
    """Return the answer to a question and the other candidates, the best first."""
    none = next((candidate.probability for candidate in found[0].nbest if not candidate.text), None)
    return {
        "answers": [{"text": each.text, **_span_to_json(each)} for each in found],
        "no_answer": not found[0].text,
        "no_answer_probability": none,
        "decided_by_threshold": is_decided_by_threshold(found[0]),
    }


def is_decided_by_threshold(answer: "QuestionAnswer") -> bool:
    """True if another answer is more probable, but the no-answer threshold decided."""
    return any(candidate.probability > answer.probability for candidate in answer.nbest)


def _span_to_json(found: "TaggedWord | Entity | QuestionAnswer") -> Json:
    return {"start": found.start, "end": found.end, "probability": found.probability}
