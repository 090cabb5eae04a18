"""What a model predicts of a split: probabilities, numbers, span scores and answers.

Shapes: M items, N sequences, P tagged words, T tokens, C classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Example

Numbers = NDArray[np.float32]
ExampleT = TypeVar("ExampleT", bound=Example)

MAX_ERRORS = 50
MIN_LOGIT = -87.0
"""Below it, exp of its opposite leaves the numbers of fp32; its own probability is under 1e-37."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model predicts of a split."""

    scores: Numbers
    """classify, multilabel: probabilities [M, C]; choice: those of all options one after the other [N];
    regress: numbers [M]; tag: probabilities [P, C]; span: start and end scores [T, 2]."""
    answers: tuple[QuestionAnswer, ...] = ()
    """span: the answer to each question."""
    thresholds: tuple[float, ...] = ()
    """multilabel: from which probability on each label is given; two classes: the second one; empty: 0.5."""


@dataclass(frozen=True, slots=True)
class PredictedSplit(Generic[ExampleT]):
    """The examples of a split, as they are and as tokens, with what a model predicts of them."""

    examples: Sequence[ExampleT]
    encoded: EncodedSet
    predictions: Predictions


@dataclass(frozen=True, slots=True)
class HardError:
    """Something the model got wrong."""

    where: str
    text: str
    label: str
    """What is right."""
    predicted: str
    confidence: float
    """The probability it gave to its prediction; for numbers, how far off it was."""
    in_percent: bool = True
    """Whether people read the confidence in percent; otherwise in the task's own unit."""

    @property
    def confidence_text(self) -> str:
        """As people read it."""
        return f"{self.confidence:.1%}" if self.in_percent else f"{self.confidence:.2f}"


def hardest_errors(errors: Iterable[HardError]) -> list[HardError]:
    """The errors that the model was surest of, worst first."""
    return sorted(errors, key=lambda error: -error.confidence)[:MAX_ERRORS]


def errors_table(errors: Sequence[HardError]) -> str:
    """The errors as a table for people."""
    column = "sure" if all(error.in_percent for error in errors) else "off by"
    lines = [
        "# The hardest errors",
        "",
        f"| {column} | right | guessed | text | where |",
        "|---|---|---|---|---|",
    ]
    for error in errors:
        cells = (error.confidence_text, error.label, error.predicted, error.text, error.where)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def average_scores(members: Sequence[Predictions]) -> Numbers:
    """What an ensemble predicts together: the mean of its members' probabilities, numbers or span scores."""
    scores: Numbers = np.mean([member.scores for member in members], axis=0, dtype=np.float32)
    return scores


def mean_surprise(probabilities: Numbers) -> float:
    """The mean of -log p over what was right: the cross-entropy; 0 where there is nothing."""
    if not probabilities.size:
        return 0.0
    least = np.finfo(np.float32).tiny
    return float(-np.log(np.maximum(probabilities, least), dtype=np.float64).mean())


def sigmoid(logits: Numbers) -> Numbers:
    """The probability of each class by itself."""
    return (1 / (1 + np.exp(-np.maximum(logits, MIN_LOGIT)))).astype(np.float32)


def softmax(logits: Numbers) -> Numbers:
    """The probabilities of classes that exclude each other, along the last axis."""
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Numbers = raised / raised.sum(-1, keepdims=True)
    return probabilities


def softmax_of_items(logits_N: Numbers, items_M1: NDArray[np.int64]) -> Numbers:
    """The probabilities of sequences among those of their item."""
    counts_M = np.diff(items_M1)
    raised_N = np.exp(logits_N - np.repeat(np.maximum.reduceat(logits_N, items_M1[:-1]), counts_M))
    probabilities_N: Numbers = raised_N / np.repeat(np.add.reduceat(raised_N, items_M1[:-1]), counts_M)
    return probabilities_N
