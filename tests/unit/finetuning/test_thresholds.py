"""A threshold is judged on the half of the articles that it was not tuned on."""

import pytest

from bertsmith.finetuning.evaluation import threshold_report, threshold_trials
from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.tasks.example_types import Answer, Question

ODDS = {"low": 0.0, "high": 10.0}
"""Two articles, in each of which a threshold of its own is always right, and half right on the other."""


@pytest.fixture
def two_articles():
    questions, answers = [], []
    for article, odds in ODDS.items():
        for number in range(4):
            key, answerable = f"{article}{number}", number % 2 == 0
            right = (Answer("iron", 0),) if answerable else ()
            questions.append(Question(key, "what?", "iron", right, True, article, "file:1"))
            own = odds if answerable else odds + 2
            answers.append(QuestionAnswer(key, "iron", 0, 4, 0.0, 0.5, own, ()))
    return questions, answers


def test_the_other_half_evaluates(two_articles):
    trials = threshold_trials(*two_articles, splits=12)
    tuned_on = {"low" if trial.threshold < 5 else "high" for trial in trials}
    assert len(trials) == 12 and tuned_on == {"low", "high"}
    for trial in trials:
        is_low = trial.threshold < 5
        assert ODDS["low" if is_low else "high"] <= trial.threshold < ODDS["low" if is_low else "high"] + 2
        assert (trial.tuned_f1, trial.tuned_exact) == (50, 50)
        # At 0 all of the high article is left unanswered, and all of the low one is right.
        assert (trial.zero_f1, trial.zero_exact) == ((50, 50) if is_low else (100, 100))


def test_the_report_tells_what_the_other_halves_evaluated(two_articles):
    assert threshold_report(*two_articles, threshold=0.0)["mean"]["tuned_f1"] == 50
