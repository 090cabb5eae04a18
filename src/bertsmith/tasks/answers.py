"""From scores of starts and ends to answers, as in run_squad.py, cut from the passage's own characters.

Shapes: N windows, T tokens, B best starts or ends of each window, L rows of the longest window.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import ranges
from bertsmith.ground.progress import progress_bar
from bertsmith.recipe.finetuning import AnswersSection
from bertsmith.tasks.encoded import EncodedSet, QuestionWindows
from bertsmith.tasks.examples import Question
from bertsmith.tasks.passages import NOWHERE

Numbers = NDArray[np.int64]
Scores = NDArray[np.float64]

QUESTIONS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Guess:
    """An answer that was considered; its text is empty where it is that there is none."""

    text: str
    start: int
    """First code point in the passage; -1 for no answer."""
    probability: float
    """Its share among all that were considered."""
    start_score: float
    end_score: float


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """What is answered to a question."""

    key: str
    text: str
    """passage[start:end]; empty where the answer is that there is none."""
    start: int
    """-1, as `end`, where there is no answer."""
    end: int
    score: float
    """Of start and end together; without an answer, that of none."""
    probability: float
    """As in the n-best list; 0 where no span is possible and none is no answer."""
    null_odds: float
    """Score of no answer less that of the best span, which counts as 0 where no span is possible."""
    nbest: tuple[Guess, ...]
    """Best first, no text twice; "no answer" is among them unless `null_threshold` is off."""

    @property
    def best_span(self) -> str:
        """What is answered if there must be an answer; empty where no span is possible."""
        return next((guess.text for guess in self.nbest if guess.text), "")


def answers_of(
    questions: Sequence[Question],
    encoded: EncodedSet,
    scores_T2: NDArray[np.floating],
    section: AnswersSection,
) -> list[QuestionAnswer]:
    """The answer to each question, from the scores of all tokens as its start and as its end.

    With a number as threshold, a question has no answer where its null odds are above it; with "off" and
    "tuned" its best span is the answer.
    """
    assert encoded.windows is not None, "only windows of questions lead to answers"
    judge = _Judge(encoded, encoded.windows, scores_T2.astype(np.float64), section)
    answers: list[QuestionAnswer] = []
    with progress_bar("choosing answers", len(questions)) as advance:
        for first in range(0, len(questions), QUESTIONS_AT_ONCE):
            some = questions[first : first + QUESTIONS_AT_ONCE]
            answers += judge.answers(some, first)
            advance(len(some))
    return answers


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of the passage, or none, with its scores."""

    text: str
    start: int
    start_score: float
    end_score: float

    @property
    def score(self) -> float:
        return self.start_score + self.end_score


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The spans that are possible in some windows: by question, then best first."""

    questions: Numbers
    offsets: Numbers
    """First and past-the-last code point of each."""
    scores: Scores
    """Start and end score of each."""


@dataclass(frozen=True, slots=True)
class _Judge:
    """Chooses answers from scores."""

    encoded: EncodedSet
    windows: QuestionWindows
    scores_T2: Scores
    section: AnswersSection

    def answers(self, questions: Sequence[Question], first: int) -> Iterator[QuestionAnswer]:
        """The answers to questions that stand together, the first of which has this number."""
        numbers = np.arange(first, first + len(questions) + 1)
        bounds = np.searchsorted(self.windows.questions_N, numbers)
        found = self._candidates(int(bounds[0]), int(bounds[-1]))
        places = np.searchsorted(found.questions, numbers)
        for row, question in enumerate(questions):
            mine = slice(places[row], places[row + 1])
            offsets, scores = found.offsets[mine].tolist(), found.scores[mine].tolist()
            spans = _distinct_spans(question.passage, zip(offsets, scores, strict=True), self.section.best)
            null = self._null(int(bounds[row]), int(bounds[row + 1]))
            yield _answer(question.key, null, spans, self.section)

    def _null(self, first: int, end: int) -> _Span:
        """That there is no answer, with the scores of the window that says so least."""
        rows_N = self.encoded.starts_N1[first:end]
        row = rows_N[self.scores_T2[rows_N].sum(axis=1).argmin()]
        start_score, end_score = self.scores_T2[row].tolist()
        return _Span("", NOWHERE, start_score, end_score)

    def _candidates(self, first: int, end: int) -> _Candidates:
        """The spans between the best starts and ends of these windows."""
        starts_NB, ends_NB = (self._best_rows(first, end, self.scores_T2[:, side]) for side in (0, 1))
        may_end_NB = self.windows.offsets_T2[ends_NB, 0] != NOWHERE
        lengths_NBB = ends_NB[:, None, :] - starts_NB[:, :, None] + 1
        fits_NBB = (lengths_NBB >= 1) & (lengths_NBB <= self.section.longest)
        fits_NBB &= self.windows.best_T[starts_NB][:, :, None] & may_end_NB[:, None, :]
        window, which_start, which_end = np.nonzero(fits_NBB)
        rows = starts_NB[window, which_start], ends_NB[window, which_end]
        scores = np.stack([self.scores_T2[rows[0], 0], self.scores_T2[rows[1], 1]], axis=1)
        offsets = [self.windows.offsets_T2[rows[0], 0], self.windows.offsets_T2[rows[1], 1]]
        questions = self.windows.questions_N[first + window]
        order = np.lexsort((-scores.sum(axis=1), questions))
        return _Candidates(questions[order], np.stack(offsets, axis=1)[order], scores[order])

    def _best_rows(self, first: int, end: int, scores_T: Scores) -> Numbers:
        """The rows with the highest scores of each window, best first, on a tie the earlier one."""
        starts_N, lengths_N = (
            self.encoded.starts_N1[first:end],
            np.diff(self.encoded.starts_N1[first : end + 1]),
        )
        places = ranges(np.zeros_like(lengths_N), lengths_N)
        scores_NL = np.full((end - first, int(lengths_N.max(initial=0))), -np.inf)
        scores_NL[np.repeat(np.arange(end - first), lengths_N), places] = scores_T[
            ranges(starts_N, lengths_N)
        ]
        best_NB = np.argsort(-scores_NL, axis=1, kind="stable")[:, : self.section.best]
        # Beyond the end of a short window stands its first row, which is in no passage.
        return starts_N[:, None] + np.where(best_NB < lengths_N[:, None], best_NB, 0)


def _distinct_spans(
    passage: str, candidates: Iterable[tuple[list[int], list[float]]], most: int
) -> list[_Span]:
    """The best candidates, each text once."""
    spans: dict[str, _Span] = {}
    for (start, end), scores in candidates:
        text = passage[start:end]
        if text and text not in spans:
            spans[text] = _Span(text, start, *scores)
            if len(spans) == most:
                break
    return list(spans.values())


def _answer(key: str, null: _Span, spans: list[_Span], section: AnswersSection) -> QuestionAnswer:
    null_odds = null.score - (spans[0].score if spans else 0.0)
    threshold = section.null_threshold
    is_null = not spans or (not isinstance(threshold, str) and null_odds > threshold)
    chosen = null if is_null else spans[0]
    considered = spans if threshold == "off" else sorted([*spans, null], key=lambda span: -span.score)
    nbest = _guesses(considered)
    probabilities = (guess.probability for guess in nbest if guess.text == chosen.text)
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


def _guesses(spans: Sequence[_Span]) -> tuple[Guess, ...]:
    highest = max((span.score for span in spans), default=0.0)
    shares = [math.exp(span.score - highest) for span in spans]
    total = sum(shares)
    return tuple(
        Guess(span.text, span.start, share / total, span.start_score, span.end_score)
        for span, share in zip(spans, shares, strict=True)
    )
