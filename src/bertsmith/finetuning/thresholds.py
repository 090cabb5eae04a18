"""SQuAD 2.0: from which null score on a question has no answer, and how well that carries over."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from bertsmith.ground.seeds import stream
from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.tasks.examples import Question
from bertsmith.tasks.squad_scores import best_threshold, squad_scores

SPLITS = 5
MARGIN = 1.0
"""By so much the threshold is above all null odds, where every question is best answered."""


@dataclass(frozen=True, slots=True)
class ThresholdTrial:
    """The threshold of one half of the articles, and what it gives on the other, in percent."""

    threshold: float
    tuned_f1: float
    zero_f1: float
    """With threshold 0 on the same half."""
    tuned_exact: float
    zero_exact: float


def tuned_threshold(questions: Sequence[Question], answers: Sequence[QuestionAnswer]) -> float:
    """The threshold that gives the best F1 on these questions, in the middle of all that give it."""
    odds = _odds(answers)
    _, least = best_threshold(questions, _texts(answers), odds, "f1")
    above = min((each for each in odds.values() if each > least), default=least + 2 * MARGIN)
    middle = (least + above) / 2
    return middle if middle < above else least  # neighbouring floats have no middle


def threshold_trials(
    questions: Sequence[Question], answers: Sequence[QuestionAnswer], *, splits: int = SPLITS
) -> list[ThresholdTrial]:
    """Tune on one half of the articles and judge on the other, over several random halves."""
    articles = sorted({question.article for question in questions})
    trials = []
    for number in range(splits):
        order = stream(0, "threshold halves", number).permutation(len(articles))
        first = {articles[place] for place in order[: len(articles) // 2]}
        places = [place for place, question in enumerate(questions) if question.article in first]
        others = sorted(set(range(len(questions))) - set(places))
        if places and others:
            trials.append(_trial(questions, answers, places, others))
    return trials


def _trial(
    questions: Sequence[Question], answers: Sequence[QuestionAnswer], places: list[int], others: list[int]
) -> ThresholdTrial:
    threshold = tuned_threshold([questions[place] for place in places], [answers[place] for place in places])
    judged_questions = [questions[place] for place in others]
    judged_answers = [answers[place] for place in others]
    tuned, zero = (
        squad_scores(judged_questions, _decided(judged_answers, each)) for each in (threshold, 0.0)
    )
    return ThresholdTrial(threshold, tuned["f1"], zero["f1"], tuned["exact"], zero["exact"])


def threshold_report(
    questions: Sequence[Question], answers: Sequence[QuestionAnswer], *, threshold: float
) -> dict[str, Any]:
    """The tuned threshold, each trial and their means, for thresholds.json; answers are best spans."""
    trials = threshold_trials(questions, answers)
    names = [field.name for field in fields(ThresholdTrial)]
    mean = {name: float(np.mean([getattr(trial, name) for trial in trials])) for name in names if trials}
    return {"tuned": threshold, "halves": [asdict(trial) for trial in trials], "mean": mean}


def _texts(answers: Sequence[QuestionAnswer]) -> dict[str, str]:
    """The best span of each question: while the threshold is not yet decided, that is its answer."""
    return {answer.key: answer.text for answer in answers}


def _decided(answers: Sequence[QuestionAnswer], threshold: float) -> dict[str, str]:
    """What is answered with this threshold."""
    return {answer.key: "" if answer.null_odds > threshold else answer.text for answer in answers}


def _odds(answers: Sequence[QuestionAnswer]) -> dict[str, float]:
    return {answer.key: answer.null_odds for answer in answers}
