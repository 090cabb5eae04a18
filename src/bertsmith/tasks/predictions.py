"""Predictions of a model for a split: probabilities, numbers, span scores and answers.

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
"""Lowest logit: for lower ones, exp(-logit) overflows fp32; their probability is under 1e-37."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a model for a split."""

    scores: Numbers
    """classify, multilabel: probabilities [M, C]; choice: probabilities of all options one after the other
    [N]; regress: numbers [M]; tag: probabilities [P, C]; span: start and end scores [T, 2].
    """
    answers: tuple[QuestionAnswer, ...] = ()
    """span: the answer to each question."""
    thresholds: tuple[float, ...] = ()
    """Minimum probability of each label (multilabel), or of the second of two classes; empty: 0.5."""


@dataclass(frozen=True, slots=True)
class PredictedSplit(Generic[ExampleT]):
    """The examples of a split, as read and as tokens, with a model's predictions."""

    examples: Sequence[ExampleT]
    encoded: EncodedSet
    predictions: Predictions


@dataclass(frozen=True, slots=True)
class HardError:
    """A wrong prediction of the model."""

    where: str
    text: str
    label: str
    """The right result."""
    predicted: str
    confidence: float
    """Probability of the prediction; for numbers, the absolute error."""
    in_percent: bool = True
    """True if the confidence is shown in percent; otherwise in the task's own unit."""

    @property
    def confidence_text(self) -> str:
        """The confidence as text for people."""
        return f"{self.confidence:.1%}" if self.in_percent else f"{self.confidence:.2f}"


def hardest_errors(errors: Iterable[HardError]) -> list[HardError]:
    """Return the errors with the highest confidence, worst first."""
    return sorted(errors, key=lambda error: -error.confidence)[:MAX_ERRORS]


def errors_table(errors: Sequence[HardError]) -> str:
    """Return the errors as a Markdown table for people."""
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
    """Return an ensemble's scores: the mean of its members' probabilities, numbers or span scores."""
    scores: Numbers = np.mean([member.scores for member in members], axis=0, dtype=np.float32)
    return scores


def mean_surprise(probabilities: Numbers) -> float:
    """Return the mean of -log p over the right results: the cross-entropy; 0 without any."""
    if not probabilities.size:
        return 0.0
    least = np.finfo(np.float32).tiny
    return float(-np.log(np.maximum(probabilities, least), dtype=np.float64).mean())


def sigmoid(logits: Numbers) -> Numbers:
    """Return the probability of each class, independently."""
    return (1 / (1 + np.exp(-np.maximum(logits, MIN_LOGIT)))).astype(np.float32)


def softmax(logits: Numbers) -> Numbers:
    """Return the probabilities of mutually exclusive classes, along the last axis."""
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Numbers = raised / raised.sum(-1, keepdims=True)
    return probabilities


def softmax_of_items(logits_N: Numbers, items_M1: NDArray[np.int64]) -> Numbers:
    """Return the probability of each sequence among all sequences of its item."""
    counts_M = np.diff(items_M1)
    raised_N = np.exp(logits_N - np.repeat(np.maximum.reduceat(logits_N, items_M1[:-1]), counts_M))
    probabilities_N: Numbers = raised_N / np.repeat(np.add.reduceat(raised_N, items_M1[:-1]), counts_M)
    return probabilities_N
