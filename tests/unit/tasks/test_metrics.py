"""Measures on cases small enough to be worked out by hand, and where they are not defined."""

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.metrics import (
    OF_CLASSES,
    OF_NUMBERS,
    accuracy,
    compute_metrics,
    f1,
    macro_f1,
    matthews,
    metric_in,
    micro_f1,
    pearson,
    spearman,
)

LABELS = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTIONS = np.array([1, 1, 0, 0, 0, 1, 0, 0])
"""2 of the positive class are found, 2 are missed, 1 is wrongly taken for it, 3 are rightly left."""
LABEL_SETS = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
PREDICTED_SETS = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 1]])

METRICS = {metric.name: metric.compute for metric in (*OF_CLASSES, *OF_NUMBERS)}


def scores_of(names, labels, predictions):
    """The metrics of these names."""
    metrics = [metric_in((*OF_CLASSES, *OF_NUMBERS), name) for name in names]
    return compute_metrics(metrics, labels, predictions)


def test_accuracy_is_the_fraction_of_right_predictions():
    assert accuracy(LABELS, PREDICTIONS) == 5 / 8


def test_accuracy_of_several_labels_wants_all_of_them_right():
    assert accuracy(LABEL_SETS, PREDICTED_SETS) == 1 / 3


def test_f1_is_about_class_one():
    assert f1(LABELS, PREDICTIONS) == pytest.approx(2 * 2 / (4 + 3))
    assert f1(1 - LABELS, 1 - PREDICTIONS) == pytest.approx(2 * 3 / (4 + 5))


def test_macro_f1_weighs_every_class_alike():
    assert macro_f1(LABELS, PREDICTIONS) == pytest.approx((4 / 7 + 6 / 9) / 2)
    assert macro_f1(LABEL_SETS, PREDICTED_SETS) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_micro_f1_counts_all_decisions_together():
    assert micro_f1(LABEL_SETS, PREDICTED_SETS) == pytest.approx(2 * 3 / (5 + 4))


def test_micro_f1_of_one_class_for_each_example_is_accuracy():
    assert micro_f1(LABELS, PREDICTIONS) == accuracy(LABELS, PREDICTIONS)


def test_matthews_of_two_classes_is_the_textbook_formula():
    found, left, taken, missed = 2, 3, 1, 2
    under = (found + taken) * (found + missed) * (left + taken) * (left + missed)
    assert matthews(LABELS, PREDICTIONS) == pytest.approx((found * left - taken * missed) / under**0.5)


def test_pearson_of_a_rising_and_of_a_falling_line():
    numbers = np.array([0.5, 2.0, 3.5, 5.0], np.float32)
    assert pearson(numbers, 3 * numbers - 7) == pytest.approx(1.0)
    assert pearson(numbers, -numbers) == pytest.approx(-1.0)


def test_spearman_sees_only_the_order():
    numbers = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(numbers, np.exp(numbers)) == pytest.approx(1.0)
    assert pearson(numbers, np.exp(numbers)) < 0.95


def test_equal_numbers_share_the_mean_of_their_ranks():
    labels, ranks = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.5, 2.5, 4.0])
    assert spearman(labels, np.array([0.0, 5.0, 5.0, 9.0])) == pytest.approx(pearson(labels, ranks))


def test_no_examples_score_nothing():
    nothing = np.zeros(0)
    assert scores_of(METRICS, nothing, nothing) == dict.fromkeys(METRICS, 0.0)


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman"])
def test_who_always_says_the_same_has_no_correlation(name):
    # The mean of three times 0.1 is not 0.1 in floating point, which must not look like a deviation.
    constant, varied = np.full(3, 0.1), np.array([0.0, 1.0, 2.0])
    assert METRICS[name](varied, constant) == METRICS[name](constant, varied) == 0.0


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_diverged_model_has_no_correlation(name, broken):
    assert METRICS[name](np.array([1.0, 2.0, 3.0]), np.array([1.0, broken, 3.0])) == 0.0


def test_pearson_survives_numbers_whose_squares_do_not_fit():
    numbers = np.array([1.0, 2.0, 4.0])
    for scale in (1e300, 1e-300, 5e-324):
        assert pearson(numbers, numbers * scale) == pytest.approx(1.0)


def test_matthews_of_many_examples_does_not_overflow():
    labels = np.arange(400_000) % 3
    assert matthews(labels, labels) == 1.0
    assert matthews(labels, np.roll(labels, 1)) == pytest.approx(-0.5, abs=1e-5)


def test_scores_come_in_the_order_of_their_names():
    scores = scores_of(("f1", "accuracy"), LABELS, PREDICTIONS)
    assert list(scores) == ["f1", "accuracy"]
    assert scores["accuracy"] == 5 / 8


def test_an_unknown_metric_is_answered_with_the_known_ones():
    with pytest.raises(UserError, match="unknown metric 'bleu'; choose one of accuracy, f1"):
        scores_of(("bleu",), LABELS, PREDICTIONS)


@pytest.mark.parametrize("labels", [np.array([0, -1]), np.array([0.5, np.nan])])
def test_examples_without_a_label_are_not_evaluated(labels):
    with pytest.raises(UserError, match="label to compare with"):
        scores_of(("accuracy",), labels, np.array([0, 1]))


def test_negative_numbers_are_labels():
    assert scores_of(("pearson",), np.array([-1.0, 2.0]), np.array([-3.0, 4.0]))["pearson"] == pytest.approx(
        1.0
    )


def test_a_column_of_guesses_is_not_silently_spread_over_all_golds():
    with pytest.raises(ValueError, match="differ in shape"):
        scores_of(("accuracy",), LABELS, PREDICTIONS[:, None])


@pytest.mark.parametrize("name", ["accuracy", "macro_f1", "micro_f1", "matthews"])
def test_classes_that_training_has_not_are_missed_as_any_class_that_nobody_guesses(name):
    labels, predictions = np.array([0, 1, 2, 3, 0]), np.array([0, 1, 1, 0, 0])
    strange = np.where(labels > 1, -labels, labels)
    assert scores_of((name,), strange, predictions) == scores_of((name,), labels, predictions)
    assert scores_of((name,), strange, predictions)[name] < 1
