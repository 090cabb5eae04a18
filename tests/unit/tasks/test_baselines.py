"""What the constant answer gets, and how well each class is found."""

import numpy as np
import pytest

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import Answer, Question
from bertsmith.tasks.kinds.registry import KINDS
from bertsmith.tasks.kinds.text_kind import best_label_threshold
from bertsmith.tasks.metrics import ACCURACY, F1, ClassScores
from bertsmith.tasks.predictions import PredictedSplit, Predictions


def baseline(kind, metrics, targets, labels=()):
    encoded = EncodedSet.without_tokens(KINDS[kind].unit, np.asarray(targets))
    return KINDS[kind].baseline(metrics, labels, [], encoded)


def test_of_classes_the_most_frequent_is_always_given():
    found = baseline("classify", ("accuracy", "f1"), [0, 1, 1, 1], ("no", "yes"))
    assert found == {"accuracy": 0.75, "f1": pytest.approx(6 / 7)}


def test_of_numbers_the_mean_is_always_given():
    found = baseline("regress", ("spearman", "mean_absolute_error"), np.array([1, 3, 8], np.float32))
    assert found == {"spearman": 0, "mean_absolute_error": pytest.approx(8 / 3)}


@pytest.mark.parametrize(
    ("targets", "right"),
    [
        ([[1, 1, 0], [1, 1, 0], [1, 0, 1]], 2 * 5 / (6 + 6)),  # a and b: half of the examples have them
        ([[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]], 2 * 2 / (5 + 3)),  # a: nothing else is near
    ],
)
def test_of_several_labels_those_of_every_second_example_are_given_or_the_most_frequent(targets, right):
    assert baseline("multilabel", ("micro_f1",), targets, ("a", "b", "c")) == {
        "micro_f1": pytest.approx(right)
    }


def test_of_options_the_place_that_is_right_most_often_is_chosen():
    encoded = EncodedSet.without_tokens("sequence", np.array([2, 2, 0]))
    items = np.array([0, 4, 8, 10])  # the last item has two options only
    encoded = EncodedSet(
        "sequence",
        encoded.tokens_T,
        encoded.segments_T,
        np.zeros(11, np.int64),
        items,
        encoded.targets,
        encoded.rows_P,
        encoded.words_P2,
        encoded.passages_N2,
    )
    assert KINDS["choice"].baseline(("accuracy",), (), [], encoded) == {"accuracy": 1.0}


@pytest.mark.parametrize(("unanswered", "found"), [(0, {}), (3, {"f1": 0.75, "exact": 0.75})])
def test_of_questions_no_answer_is_given_where_some_have_none(unanswered, found):
    questions = [
        Question(str(n), "what?", "iron", () if n < unanswered else (Answer("iron", 0),), True, "", "")
        for n in range(4)
    ]
    encoded = EncodedSet.without_tokens("token", np.zeros((4, 2), np.int64))
    assert KINDS["span"].baseline(("f1", "exact"), (), questions, encoded) == found


def test_each_class_has_its_precision_recall_and_f1():
    scores = np.eye(3, dtype=np.float32)[[0, 0, 1, 1]]
    split = PredictedSplit([], EncodedSet.without_tokens("item", np.array([0, 1, 1, 2])), Predictions(scores))
    assert KINDS["classify"].class_scores(("a", "b", "c"), split) == {
        "a": ClassScores(0.5, 1.0, pytest.approx(2 / 3), 1),
        "b": ClassScores(0.5, 0.5, 0.5, 2),
        "c": ClassScores(0.0, 0.0, 0.0, 1),
    }


def test_each_of_several_labels_has_its_precision_recall_and_f1():
    scores = np.array([[0.9, 0.1], [0.8, 0.7]], np.float32)
    targets = np.array([[1, 0, 0], [0, 1, 1]])  # the third column is a label that training does not have
    split = PredictedSplit([], EncodedSet.without_tokens("item", targets), Predictions(scores))
    assert KINDS["multilabel"].class_scores(("a", "b"), split) == {
        "a": ClassScores(0.5, 1.0, pytest.approx(2 / 3), 1),
        "b": ClassScores(1.0, 1.0, 1.0, 1),
    }


def test_the_threshold_that_is_tuned_separates_what_one_half_does_not():
    targets, scores = np.array([0, 0, 0, 1, 1]), np.array([0.1, 0.2, 0.1, 0.3, 0.4], np.float32)
    for metric in (F1, ACCURACY):
        assert best_label_threshold(metric, targets, scores) == pytest.approx(0.25)


def test_where_no_threshold_is_better_the_usual_one_stays():
    targets, scores = np.array([0, 1, 0, 1]), np.array([0.1, 0.9, 0.2, 0.8], np.float32)
    assert best_label_threshold(ACCURACY, targets, scores) == 0.5
    assert best_label_threshold(ACCURACY, np.zeros(4, np.int64), scores) > 0.9
