"""Exact match and F1 of answers as the official evaluation of SQuAD 2.0 counts them, in percent.

After evaluate-v2.0.py of rajpurkar/SQuAD-explorer, which judges SQuAD 1.1 as evaluate-v1.1.py does, with two
differences: a question without an entry in the answers counts as wrong (that script leaves it out), and the
best threshold is one that really gives its value (see `best_threshold`).
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from bertsmith.ground.errors import UserError
from bertsmith.tasks.examples import Question

Measure = Literal["exact", "f1"]
Scores = Mapping[str, float]
"""By the keys of the questions that have an answer."""

MEASURES: tuple[Measure, ...] = ("exact", "f1")
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
PERCENT = 100.0


def normalised(text: str) -> str:
    """The text in lower case without ASCII punctuation, English articles and superfluous space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact(gold: str, answer: str) -> float:
    """1.0 if both are the same once normalised, else 0.0."""
    return float(normalised(gold) == normalised(answer))


def f1(gold: str, answer: str) -> float:
    """The F1 of the words they share, counted with repetitions; an empty text matches only an empty one."""
    return _overlap(normalised(gold).split(), normalised(answer).split())


def _overlap(golds: Sequence[str], guesses: Sequence[str]) -> float:
    if not golds or not guesses:
        return float(golds == guesses)
    shared = (Counter(golds) & Counter(guesses)).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(guesses), shared / len(golds)
    return 2 * precision * recall / (precision + recall)


def squad_scores(
    questions: Sequence[Question],
    answers: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> dict[str, float]:
    """The numbers of the official script by their official names, and how many questions are `unanswered`.

    With null odds come the best thresholds, for which `answers` must hold every question's best span; with a
    threshold, questions whose odds are above it count as answered with "".
    """
    _check_labels(questions)
    raw = _raw_scores(questions, answers)
    scores = {measure: _with_threshold(questions, raw[measure], null_odds, threshold) for measure in MEASURES}
    report: dict[str, float] = {}
    for prefix, keys in _groups(questions).items():
        for measure in MEASURES:
            report[f"{prefix}{measure}"] = _percent([scores[measure].get(key, 0.0) for key in keys])
        report[f"{prefix}total"] = len(keys)
    report["unanswered"] = sum(question.key not in answers for question in questions)
    if null_odds is not None:
        for measure in MEASURES:
            best, place = _best_threshold(questions, raw[measure], null_odds)
            report |= {f"best_{measure}": best, f"best_{measure}_thresh": place}
    return report


def best_threshold(
    questions: Sequence[Question],
    answers: Mapping[str, str],
    null_odds: Mapping[str, float],
    measure: Measure,
) -> tuple[float, float]:
    """The best score in percent that a threshold on the null odds gives, and the lowest such threshold.

    The score is what `squad_scores` gives at this threshold. Not so in the official script: it stops between
    questions of equal odds, which no threshold can; it names 0.0 where it is best to answer nothing, though
    odds may be negative; and an answer that is only articles counts there as wrong where "" is right.
    """
    _check_labels(questions)
    return _best_threshold(questions, _raw_scores(questions, answers)[measure], null_odds)


def _best_threshold(
    questions: Sequence[Question], scores: Scores, null_odds: Mapping[str, float]
) -> tuple[float, float]:
    answerable = {question.key for question in questions if question.answers}
    odds = sorted((_odds_of(key, null_odds), key) for key in scores)
    now = float(len(scores.keys() - answerable))
    best, place = now, _below(odds[0][0]) if odds else 0.0
    for value, members in groupby(odds, key=lambda pair: pair[0]):
        # To answer turns a sure 0 into the score, or for an unanswerable question a sure 1.
        now += sum(scores[key] - (key not in answerable) for _, key in members)
        if now > best:
            best, place = now, value
    return PERCENT * best / max(len(questions), 1), place


def _below(lowest: float) -> float:
    """A threshold that answers nothing; 0.0 as in the official script where that does it."""
    return 0.0 if lowest > 0 else lowest - 1.0


def _check_labels(questions: Sequence[Question]) -> None:
    for question in questions:
        if not question.answers and not question.labelled:
            raise UserError(
                f"question {question.key} has no gold answer to compare with",
                where=question.where,
                remedy="evaluate a labelled file, such as dev-v1.1.json",
            )


def _raw_scores(questions: Sequence[Question], answers: Mapping[str, str]) -> dict[Measure, Scores]:
    """What each answer scores against the gold that it matches best."""
    same, overlap = {}, {}
    for question in questions:
        if question.key in answers:
            guess, golds = normalised(answers[question.key]), _golds(question)
            same[question.key] = float(guess in golds)
            overlap[question.key] = max(_overlap(gold.split(), guess.split()) for gold in golds)
    return {"exact": same, "f1": overlap}


def _golds(question: Question) -> set[str]:
    """The different golds, normalised; one that is nothing but articles and punctuation does not count."""
    return {normalised(answer.text) for answer in question.answers} - {""} or {""}


def _with_threshold(
    questions: Sequence[Question],
    scores: Scores,
    null_odds: Mapping[str, float] | None,
    threshold: float | None,
) -> Scores:
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
            f"question {key} has an answer, but no null odds", remedy="predict both with one model"
        )
    return null_odds[key]


def _groups(questions: Sequence[Question]) -> dict[str, list[str]]:
    """The keys of all questions, and of those with and without an answer where there are any."""
    groups = {
        "HasAns_": [question.key for question in questions if question.answers],
        "NoAns_": [question.key for question in questions if not question.answers],
    }
    return {"": [question.key for question in questions]} | {
        name: keys for name, keys in groups.items() if keys
    }


def _percent(scores: Sequence[float]) -> float:
    return PERCENT * sum(scores) / max(len(scores), 1)
