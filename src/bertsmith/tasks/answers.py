"""Convert scores of starts and ends to answers, as in run_squad.py, cut from the passage's own text.

Shapes: N windows, T tokens, B best starts or ends of each window, L rows of the longest window.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import ranges
from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.recipe.finetuning_schema import AnswersSection
from bertsmith.tasks.encoded import EncodedSet, QuestionWindows
from bertsmith.tasks.example_types import Question
from bertsmith.tasks.question_windows import NOWHERE

Numbers = NDArray[np.int64]
Scores = NDArray[np.float64]

QUESTIONS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible answer; an empty text means "no answer"."""

    text: str
    start: int
    """First code point in the passage; -1 for no answer."""
    probability: float
    """Probability among all candidates."""
    start_score: float
    end_score: float


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """The answer to a question."""

    key: str
    text: str
    """passage[start:end]; empty if the passage does not contain an answer."""
    start: int
    """First code point in the passage; -1, as `end`, without an answer."""
    end: int
    score: float
    """Sum of start and end scores; without an answer, the score of no answer."""
    probability: float
    """Probability as in the n-best list; 0 if no span is possible and "no answer" is not allowed."""
    null_odds: float
    """Score of no answer minus the score of the best span, or minus 0 if no span is possible."""
    nbest: tuple[Candidate, ...]
    """Best first, with distinct texts; includes "no answer" unless `null_threshold` is off."""

    @property
    def best_span(self) -> str:
        """The best answer other than "no answer"; empty if no span is possible."""
        return next((candidate.text for candidate in self.nbest if candidate.text), "")


def answers_of(
    questions: Sequence[Question],
    encoded: EncodedSet,
    scores_T2: NDArray[np.floating],
    section: AnswersSection,
) -> list[QuestionAnswer]:
    """Return the answer to each question, given the scores of all tokens as its start and end.

    If the threshold is a number, questions with null odds above it are left unanswered; with "off" and
    "tuned" the answer is the best span.
    """
    assert encoded.windows is not None, "answers need windows of questions"
    chooser = _Chooser(encoded, encoded.windows, scores_T2.astype(np.float64), section)
    answers: list[QuestionAnswer] = []
    with progress_bar("choosing answers", len(questions)) as advance:
        for first in range(0, len(questions), QUESTIONS_AT_ONCE):
            some = questions[first : first + QUESTIONS_AT_ONCE]
            answers += chooser.answers(some, first)
            advance(len(some))
    return answers


@dataclass(frozen=True, slots=True)
class _Span:
    """A span of the passage, or no answer, with its scores."""

    text: str
    start: int
    start_score: float
    end_score: float

    @property
    def score(self) -> float:
        return self.start_score + self.end_score


@dataclass(frozen=True, slots=True)
class _Spans:
    """The possible spans of some windows, sorted by question and then best first."""

    questions: Numbers
    offsets: Numbers
    """First and past-the-last code point of each span."""
    scores: Scores
    """Start and end score of each span."""


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Chooses answers from scores."""

    encoded: EncodedSet
    windows: QuestionWindows
    scores_T2: Scores
    section: AnswersSection

    def answers(self, questions: Sequence[Question], first: int) -> Iterator[QuestionAnswer]:
        """Yield the answers to consecutive questions, given the number of the first."""
        numbers = np.arange(first, first + len(questions) + 1)
        windows = np.searchsorted(self.windows.questions_N, numbers)
        found = self._candidates(int(windows[0]), int(windows[-1]))
        bounds = np.searchsorted(found.questions, numbers)
        for row, question in enumerate(questions):
            mine = slice(bounds[row], bounds[row + 1])
            # Spans are sorted best first, and windows overlap: keep the first of equal texts.
            spans: dict[str, _Span] = {}
            for (start, end), scores in zip(
                found.offsets[mine].tolist(), found.scores[mine].tolist(), strict=True
            ):
                text = question.passage[start:end]
                if text and text not in spans:
                    spans[text] = _Span(text, start, *scores)
                    if len(spans) == self.section.best:
                        break
            # "No answer" must hold in all windows, so the window with its lowest score decides.
            rows_N = self.encoded.starts_N1[windows[row] : windows[row + 1]]
            null_row = rows_N[self.scores_T2[rows_N].sum(axis=1).argmin()]
            null = _Span("", NOWHERE, *self.scores_T2[null_row].tolist())
            yield _answer(question.key, null, list(spans.values()), self.section)

    def _candidates(self, first: int, end: int) -> _Spans:
        """Return the spans between the best starts and ends of these windows."""
        starts_NB, ends_NB = (self._best_rows(first, end, self.scores_T2[:, side]) for side in (0, 1))
        # Overlapping windows show the same tokens. As in run_squad.py, a span counts only in the window that
        # shows its start with most context; its end may be anywhere in that window's passage.
        may_start_NB = self.windows.best_T[starts_NB]
        may_end_NB = self.windows.offsets_T2[ends_NB, 0] != NOWHERE
        lengths_NBB = ends_NB[:, None, :] - starts_NB[:, :, None] + 1
        fits_NBB = (lengths_NBB >= 1) & (lengths_NBB <= self.section.longest)
        fits_NBB &= may_start_NB[:, :, None] & may_end_NB[:, None, :]
        window, which_start, which_end = np.nonzero(fits_NBB)
        rows = starts_NB[window, which_start], ends_NB[window, which_end]
        scores = np.stack([self.scores_T2[rows[0], 0], self.scores_T2[rows[1], 1]], axis=1)
        offsets = [self.windows.offsets_T2[rows[0], 0], self.windows.offsets_T2[rows[1], 1]]
        questions = self.windows.questions_N[first + window]
        # lexsort is stable: of equal scores the earlier window and the better start stay ahead.
        order = np.lexsort((-scores.sum(axis=1), questions))
        return _Spans(questions[order], np.stack(offsets, axis=1)[order], scores[order])

    def _best_rows(self, first: int, end: int, scores_T: Scores) -> Numbers:
        """Return the rows with the highest scores in each window, best first, on a tie the earlier one."""
        starts_N = self.encoded.starts_N1[first:end]
        lengths_N = np.diff(self.encoded.starts_N1[first : end + 1])
        columns = ranges(np.zeros_like(lengths_N), lengths_N)
        scores_NL = np.full((end - first, int(lengths_N.max(initial=0))), -np.inf)
        windows = np.repeat(np.arange(end - first), lengths_N)
        scores_NL[windows, columns] = scores_T[ranges(starts_N, lengths_N)]
        best_NB = np.argsort(-scores_NL, axis=1, kind="stable")[:, : self.section.best]
        # Past the end of a short window, repeat its first row, which is never in the passage.
        return starts_N[:, None] + np.where(best_NB < lengths_N[:, None], best_NB, 0)


def _answer(key: str, null: _Span, spans: list[_Span], section: AnswersSection) -> QuestionAnswer:
    """Choose the answer from the spans, best first, and from the scores of "no answer"."""
    null_odds = null.score - (spans[0].score if spans else 0.0)
    threshold = section.null_threshold
    is_null = not spans or (not isinstance(threshold, str) and null_odds > threshold)
    chosen = null if is_null else spans[0]
    considered = spans if threshold == "off" else sorted([*spans, null], key=lambda span: -span.score)
    # A softmax over the candidates, minus the highest score so that nothing overflows.
    highest = max((span.score for span in considered), default=0.0)
    raised = [math.exp(span.score - highest) for span in considered]
    total = sum(raised)
    nbest = tuple(
        Candidate(span.text, span.start, each / total, span.start_score, span.end_score)
        for span, each in zip(considered, raised, strict=True)
    )
    probabilities = (candidate.probability for candidate in nbest if candidate.text == chosen.text)
    return QuestionAnswer(
        key=key,
        text=chosen.text,
        start=chosen.start,
        end=chosen.start + len(chosen.text),
        score=chosen.score,
        probability=next(probabilities, 0.0),
        null_odds=null_odds,
        nbest=nbest,
    )


SquadMetric = Literal["exact", "f1"]
ScoreByKey = Mapping[str, float]
"""Scores by the keys of answered questions."""

SQUAD_METRICS: tuple[SquadMetric, ...] = ("exact", "f1")
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
PERCENT = 100.0


def normalised(text: str) -> str:
    """Return the text in lower case without ASCII punctuation, English articles and extra spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact(right: str, answer: str) -> float:
    """Return 1.0 if both are equal after normalisation, else 0.0."""
    return float(normalised(right) == normalised(answer))


def f1(right: str, answer: str) -> float:
    """Return the F1 of two texts' shared words, with repetitions; empty texts match only empty texts.

    The rule for empty texts is SQuAD 2.0's; `squad_scores` describes SQuAD 1.1's.
    """
    return _overlap(normalised(right).split(), normalised(answer).split())


def _overlap(right: Sequence[str], predicted: Sequence[str]) -> float:
    if not right or not predicted:
        return float(right == predicted)
    shared = (Counter(right) & Counter(predicted)).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def squad_scores(
    questions: Sequence[Question],
    answers: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> dict[str, float]:
    """Return the official script's metrics by their official names, and the number of `unanswered` questions.

    Null odds add the best thresholds, for which `answers` must have every question's best span. With a
    threshold, questions whose odds are above it count as answered with "".

    If every question has an answer, as in SQuAD 1.1, exact and F1 are those of evaluate-v1.1.py; else
    those of evaluate-v2.0.py. The two scripts differ for texts of only articles and punctuation ("A."):

    - such a right answer counts in 1.1; 2.0 drops it, or replaces it by "" if no other is left;
    - a predicted answer that is also empty has F1 0 against it in 1.1 (no word is shared) and 1 in 2.0;
      it is an exact match in both;
    - questions without an answer exist only in 2.0: "" is right, and F1 is 1 or 0.

    Unlike the scripts, this also returns the HasAns_ metrics for 1.1. A question missing from `answers` is
    wrong and counted, as in 1.1; 2.0 leaves it out of the total, or stops with a KeyError.
    """
    _check_labels(questions)
    raw = _raw_scores(questions, answers)
    scores = {
        metric: _with_threshold(questions, raw[metric], null_odds, threshold) for metric in SQUAD_METRICS
    }
    groups = {
        "": [question.key for question in questions],
        "HasAns_": [question.key for question in questions if question.answers],
        "NoAns_": [question.key for question in questions if not question.answers],
    }
    report: dict[str, float] = {}
    for prefix, keys in groups.items():
        if prefix and not keys:  # as in the official script: SQuAD 1.1 lacks the NoAns_ metrics
            continue
        for metric in SQUAD_METRICS:
            total = sum(scores[metric].get(key, 0.0) for key in keys)
            report[f"{prefix}{metric}"] = PERCENT * total / max(len(keys), 1)
        report[f"{prefix}total"] = len(keys)
    report["unanswered"] = sum(question.key not in answers for question in questions)
    if null_odds is not None:
        for metric in SQUAD_METRICS:
            best, best_odds = _best_threshold(questions, raw[metric], null_odds)
            report |= {f"best_{metric}": best, f"best_{metric}_thresh": best_odds}
    return report


def question_scores(
    questions: Sequence[Question], answers: Mapping[str, str]
) -> dict[str, NDArray[np.float64]]:
    """Return exact match and F1 of each question as fractions; `squad_scores` returns their means."""
    found = _raw_scores(questions, answers)
    return {
        metric: np.array([found[metric].get(question.key, 0.0) for question in questions])
        for metric in SQUAD_METRICS
    }


def best_threshold(
    questions: Sequence[Question],
    answers: Mapping[str, str],
    null_odds: Mapping[str, float],
    metric: SquadMetric,
) -> tuple[float, float]:
    """Return the best score in percent of any threshold on the null odds, and the lowest such threshold.

    The score is what `squad_scores` gives with this threshold. The official script differs: it also tries
    thresholds between questions of equal odds, which cannot be separated. It returns 0.0 if answering nothing
    is best, though odds may be negative. And an answer of only articles counts there as wrong if "" is right.
    """
    _check_labels(questions)
    return _best_threshold(questions, _raw_scores(questions, answers)[metric], null_odds)


def _best_threshold(
    questions: Sequence[Question], scores: ScoreByKey, null_odds: Mapping[str, float]
) -> tuple[float, float]:
    answerable = {question.key for question in questions if question.answers}
    odds = sorted((_odds_of(key, null_odds), key) for key in scores)
    # At first nothing is answered. As in the official script, this is threshold 0.0 if that suffices.
    now = float(len(scores.keys() - answerable))
    lowest = odds[0][0] if odds else 1.0
    best, threshold = now, 0.0 if lowest > 0 else lowest - 1.0
    for value, members in groupby(odds, key=lambda pair: pair[0]):
        # Answering a question replaces its score of 0 (or 1, if it is unanswerable) by its raw score.
        now += sum(scores[key] - (key not in answerable) for _, key in members)
        if now > best:
            best, threshold = now, value
    return PERCENT * best / max(len(questions), 1), threshold


def _check_labels(questions: Sequence[Question]) -> None:
    for question in questions:
        if not question.answers and not question.labelled:
            raise UserError(
                f"question {question.key} lacks a right answer to compare with",
                where=question.where,
                remedy="evaluate a labelled file, for example dev-v1.1.json",
            )


def _raw_scores(questions: Sequence[Question], answers: Mapping[str, str]) -> dict[SquadMetric, ScoreByKey]:
    """Return each answer's score against the right answer that it matches best; see `squad_scores`."""
    is_squad_2 = not all(question.answers for question in questions)
    same, overlap = {}, {}
    for question in questions:
        if question.key in answers:
            candidate = normalised(answers[question.key])
            right = {normalised(answer.text) for answer in question.answers}
            if is_squad_2:
                right = right - {""} or {""}
            same[question.key] = float(candidate in right)
            shares_nothing = not candidate and not is_squad_2
            overlaps = (_overlap(each.split(), candidate.split()) for each in right)
            overlap[question.key] = 0.0 if shares_nothing else max(overlaps)
    return {"exact": same, "f1": overlap}


def _with_threshold(
    questions: Sequence[Question],
    scores: ScoreByKey,
    null_odds: Mapping[str, float] | None,
    threshold: float | None,
) -> ScoreByKey:
    if threshold is None:
        return scores
    if null_odds is None:
        raise ValueError("a threshold needs null odds")
    return {
        question.key: float(not question.answers)
        if _odds_of(question.key, null_odds) > threshold
        else scores[question.key]
        for question in questions
        if question.key in scores
    }


def _odds_of(key: str, null_odds: Mapping[str, float]) -> float:
    if key not in null_odds:
        raise UserError(
            f"question {key} has an answer, but null odds are missing", remedy="predict both with one model"
        )
    return null_odds[key]
