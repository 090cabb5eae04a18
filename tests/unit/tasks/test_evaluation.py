"""What a model predicts, evaluated by the metrics of its task."""

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.answers import Candidate, QuestionAnswer
from bertsmith.tasks.example_types import Answer, Question
from bertsmith.tasks.predictions import Predictions
from bertsmith.tasks.task_config import TaskConfig
from tests.unit.tasks.encoding_tools import evaluated, sentence, text_example


def encoded(config, examples, tokenizer):
    return config.kind.encode(examples, config.labels, tokenizer, TextSection(longest=16))


def sure_of(*predicted, classes):
    return Predictions(np.eye(classes, dtype=np.float32)[list(predicted)])


def test_several_labels_that_training_has_not_are_missed(uncased) -> None:
    config = TaskConfig(task="custom", kind="multilabel", metrics=("micro_f1", "accuracy"), labels=("x", "y"))
    examples = [text_example("a", label) for label in (("x",), ("x", "?"), ("!", "?"), ("y",))]
    outcome = Predictions(np.array([[1, 0], [1, 0], [0, 0], [0, 1]], np.float32))
    metrics = evaluated(config, examples, encoded(config, examples, uncased), outcome)
    assert metrics == pytest.approx({"micro_f1": 2 * 3 / (6 + 3), "accuracy": 2 / 4})


def test_spans_of_a_type_that_training_has_not_are_missed(uncased) -> None:
    config = TaskConfig(task="ner", kind="tag", metrics=("span_f1", "accuracy"), labels=("B-LOC", "O"))
    examples = [sentence(["the", "iron", "is", "hot"], ["B-NEW", "O", "B-LOC", "O"])]
    outcome = sure_of(1, 1, 0, 1, classes=2)
    metrics = evaluated(config, examples, encoded(config, examples, uncased), outcome)
    assert metrics["recall"] == 1 / 2
    assert metrics["accuracy"] == 3 / 4


def test_each_type_of_the_file_has_an_f1_of_its_own(uncased) -> None:
    labels = ("O", "B-LOC", "B-PER", "B-ORG")
    config = TaskConfig(task="ner", kind="tag", metrics=("span_f1", "accuracy"), labels=labels)
    examples = [sentence(["the", "iron", "is", "hot"], ["B-LOC", "O", "B-PER", "B-LOC"])]
    outcome = sure_of(1, 3, 2, 0, classes=4)
    metrics = evaluated(config, examples, encoded(config, examples, uncased), outcome)
    types = {name: value for name, value in metrics.items() if name.startswith("span_f1_")}
    assert types == pytest.approx({"span_f1_LOC": 2 / 3, "span_f1_PER": 1.0})  # no ORG is in the file
    assert next(iter(metrics)) == "span_f1"


@pytest.mark.parametrize("metrics", [("span_f1",), ("span_f1", "accuracy"), ("accuracy", "macro_f1")])
def test_sentences_without_tags_cannot_be_evaluated(uncased, metrics) -> None:
    config = TaskConfig(task="ner", kind="tag", metrics=metrics, labels=("B-LOC", "O"))
    examples = [sentence(["the", "iron", "is"])]
    with pytest.raises(UserError, match="some examples lack a label to compare with"):
        evaluated(config, examples, encoded(config, examples, uncased), sure_of(1, 1, 0, classes=2))


def answered(number, text, *, odds, best="iron"):
    predicted = (Candidate(text, 0, 0.6, 0.0, 0.0), Candidate(best, 0, 0.4, 0.0, 0.0))
    return QuestionAnswer(str(number), text, 0, len(text), 0.0, 0.6, odds, predicted)


SPANS = TaskConfig(task="squad2", kind="span", metrics=("f1", "exact"))
ANSWERS = Predictions(
    np.zeros((0, 2), np.float32),
    (
        answered(0, "iron", odds=-2.0),
        answered(1, "iron hot", odds=-1.0, best="iron hot"),
        answered(2, "", odds=1.0),
        answered(3, "iron", odds=2.0),
    ),
)


def asked(number, *, answerable):
    answers = (Answer("iron", 0),) if answerable else ()
    return Question(str(number), "what?", "iron hot", answers, True, "", f"file:{number}")


def test_answers_are_evaluated_with_and_without_one_and_by_the_best_threshold() -> None:
    questions = [asked(number, answerable=number != 3) for number in range(4)]
    found = evaluated(SPANS, questions, None, ANSWERS)
    assert list(found)[:2] == ["f1", "exact"]
    assert found == pytest.approx(
        {
            "f1": (1 + 2 / 3 + 0 + 0) / 4,
            "exact": 1 / 4,
            "f1_with_answer": (1 + 2 / 3) / 3,
            "exact_with_answer": 1 / 3,
            "f1_without_answer": 0.0,
            "exact_without_answer": 0.0,
            # With a threshold of 1 the third question is answered and the fourth is not.
            "best_f1": (1 + 2 / 3 + 1 + 1) / 4,
            "best_f1_threshold": 1.0,
            "best_exact": 3 / 4,
            "best_exact_threshold": 1.0,
        }
    )


def test_where_every_question_has_an_answer_there_is_no_threshold() -> None:
    questions = [asked(number, answerable=True) for number in range(4)]
    assert set(evaluated(SPANS, questions, None, ANSWERS)) == {
        *("f1", "exact"),
        *("f1_with_answer", "exact_with_answer"),
    }


def test_numbers_are_evaluated_by_how_far_off_they_are_too(uncased) -> None:
    metrics = ("spearman", "mean_absolute_error", "root_mean_squared_error")
    config = TaskConfig(task="custom", kind="regress", metrics=metrics)
    examples = [text_example("a", label) for label in (10.0, 20.0, 30.0)]
    outcome = Predictions(np.array([10, 23, 34], np.float32))
    found = evaluated(config, examples, encoded(config, examples, uncased), outcome)
    expected = {"spearman": 1.0, "mean_absolute_error": 7 / 3, "root_mean_squared_error": (25 / 3) ** 0.5}
    assert found == pytest.approx(expected)


def test_several_labels_of_any_score_have_a_probability_without_a_warning(uncased, recwarn) -> None:
    config = TaskConfig(task="custom", kind="multilabel", metrics=("micro_f1",), labels=("x", "y", "z"))
    logits = np.array([[-1000, 0, 1000], [-89, -3, 3]], np.float32)
    split = encoded(config, [text_example("a", ("x",))], uncased)
    found = config.kind.predict(logits, split, [], config.answers)
    shares = 1 / (1 + np.exp(-np.array([-3.0, 3.0])))
    expected = [[0, 0.5, 1], [0, *shares]]
    np.testing.assert_allclose(found.scores, expected, atol=1e-7)
    assert not recwarn.list
