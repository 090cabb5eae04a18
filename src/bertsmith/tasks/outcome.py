"""From a model's scores to what it says: probabilities, numbers, tags, answers.

Shapes: M items, N sequences, P tagged words, T tokens, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.answers import QuestionAnswer, answers_of
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.examples import Example, Question
from bertsmith.tasks.task_file import TaskNote

Numbers = NDArray[np.float32]

LEAST_LOGIT = -87.0
"""Below it, exp of its opposite leaves the numbers of fp32; its own share is under 1e-37."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a model says of a split."""

    scores: Numbers
    """classify, multilabel: probabilities [M, C]; choice: those of all options one after the other [N];
    regress: numbers [M]; tag: probabilities [P, C]; span: start and end scores [T, 2]."""
    answers: tuple[QuestionAnswer, ...] = ()
    """span: the answer to each question."""


def outcome_of(note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, logits: Numbers) -> Outcome:
    """What the head's raw scores come to; logits have the shape of `Outcome.scores`."""
    if note.kind == "regress":
        return Outcome(logits.reshape(-1))
    if note.kind == "multilabel":
        return Outcome(_sigmoid(logits))
    if note.kind == "choice":
        return Outcome(_softmax_of_options(logits, encoded.items_M1))
    if note.kind == "span":
        questions = [example for example in examples if isinstance(example, Question)]
        return Outcome(logits, tuple(answers_of(questions, encoded, logits, note.answers)))
    return Outcome(_softmax(logits))


def guesses_of(note: TaskNote, encoded: EncodedSet, outcome: Outcome) -> NDArray[np.int64] | Numbers:
    """The class of each item, the option of each, the tag of each word, or the numbers as they are."""
    if note.kind == "regress":
        return outcome.scores
    if note.kind == "multilabel":
        return (outcome.scores >= 0.5).astype(np.int64)
    if note.kind == "choice":
        return np.array(
            [int(options.argmax()) for options in np.split(outcome.scores, encoded.items_M1[1:-1])], np.int64
        )
    best: NDArray[np.int64] = outcome.scores.argmax(-1)
    return best


def tags_of(
    note: TaskNote, sentences: int, encoded: EncodedSet, tags_P: NDArray[np.int64]
) -> list[list[str]]:
    """The tags of each sentence's words, in order."""
    tagged: list[list[str]] = [[] for _ in range(sentences)]
    for place in np.lexsort((encoded.words_P2[:, 1], encoded.words_P2[:, 0])):
        tagged[int(encoded.words_P2[place, 0])].append(note.labels[int(tags_P[place])])
    return tagged


def average(outcomes: Sequence[Outcome]) -> Numbers:
    """What an ensemble's members say together: the mean of their probabilities, numbers or span scores."""
    scores: Numbers = np.mean([outcome.scores for outcome in outcomes], axis=0, dtype=np.float32)
    return scores


def _sigmoid(logits: Numbers) -> Numbers:
    return (1 / (1 + np.exp(-np.maximum(logits, LEAST_LOGIT)))).astype(np.float32)


def _softmax(logits: Numbers) -> Numbers:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Numbers = raised / raised.sum(-1, keepdims=True)
    return probabilities


def _softmax_of_options(logits_N: Numbers, items_M1: NDArray[np.int64]) -> Numbers:
    counts_M = np.diff(items_M1)
    raised_N = np.exp(logits_N - np.repeat(np.maximum.reduceat(logits_N, items_M1[:-1]), counts_M))
    shares_N: Numbers = raised_N / np.repeat(np.add.reduceat(raised_N, items_M1[:-1]), counts_M)
    return shares_N
