"""What a model says of texts, as JSON objects: one shape for the command line and the server.

Offsets count Unicode code points; `end` is past the last one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bertsmith.inference.replies import Classification, Entity, TaggedWord

if TYPE_CHECKING:
    from bertsmith.inference.filling import Guess
    from bertsmith.tasks.answers import QuestionAnswer

Facts = dict[str, Any]

DOES = {
    "fill": "fill masks",
    "next": "say whether one sentence follows another",
    "classify": "classify texts",
    "score": "give texts a number",
    "tag": "tag words",
    "answer": "answer questions",
    "choose": "choose among texts",
    "embed": "embed texts",
    "look": "show its inside",
}
"""The abilities of a `Bert` in words."""


def mask_facts(places: Sequence[tuple[int, int]], guesses: "Sequence[Sequence[Guess]]") -> list[Facts]:
    """The masks of a text, each with what may stand in its place."""
    return [
        {
            "start": start,
            "end": end,
            "guesses": [{"token": guess.token, "probability": guess.probability} for guess in each],
        }
        for (start, end), each in zip(places, guesses, strict=True)
    ]


def class_facts(found: Classification | float) -> Facts:
    """The class of a text, its classes where it may have any number of them, or its number."""
    if isinstance(found, float):
        return {"score": found}
    if found.is_several:
        return {"labels": list(found.labels), "probabilities": found.probabilities}
    return {"label": found.label, "probability": found.probability, "probabilities": found.probabilities}


def tag_facts(words: Sequence[TaggedWord], entities: Sequence[Entity]) -> Facts:
    """The words of a text with their tags, and what they make up together."""
    return {
        "words": [{"text": word.word, "tag": word.tag, **_place(word)} for word in words],
        "entities": [{"text": each.text, "label": each.type, **_place(each)} for each in entities],
    }


def answer_facts(found: "Sequence[QuestionAnswer]") -> Facts:
    """The answer to a question and what else was considered, the best first."""
    none = next((guess.probability for guess in found[0].nbest if not guess.text), None)
    return {
        "answers": [{"text": each.text, **_place(each)} for each in found],
        "no_answer": not found[0].text,
        "no_answer_probability": none,
        "decided_by_threshold": is_decided_by_threshold(found[0]),
    }


def is_decided_by_threshold(answer: "QuestionAnswer") -> bool:
    """Whether something else was more probable, but the model's threshold for no answer decided."""
    return any(guess.probability > answer.probability for guess in answer.nbest)


def _place(found: "TaggedWord | Entity | QuestionAnswer") -> Facts:
    return {"start": found.start, "end": found.end, "probability": found.probability}
