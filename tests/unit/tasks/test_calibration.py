"""Reliability on cases worked out by hand."""

import numpy as np
import pytest

from bertsmith.tasks.metrics import reliability


def two_classes(*of_first: float) -> np.ndarray:
    return np.array([[share, 1 - share] for share in of_first])


def test_the_error_is_the_mean_gap_of_confidence_and_accuracy():
    probabilities = two_classes(0.9, 0.9, 0.9, 0.9, 0.35)
    found = reliability(probabilities, np.array([0, 0, 1, 1, 1]), bins=4)
    assert found.counts_B.tolist() == [0, 0, 1, 4]
    assert found.confidences_B == pytest.approx([0, 0, 0.65, 0.9])
    assert found.accuracies_B == pytest.approx([0, 0, 1.0, 0.5])
    assert found.expected_error == pytest.approx((0.35 * 1 + 0.4 * 4) / 5)


def test_who_is_as_often_right_as_sure_has_no_error():
    found = reliability(two_classes(0.75, 0.75, 0.75, 0.75), np.array([0, 0, 0, 1]))
    assert found.expected_error == pytest.approx(0.0)


def test_full_confidence_has_a_bin():
    found = reliability(two_classes(1.0, 0.0), np.array([0, 0]), bins=10)
    assert found.counts_B[-1] == 2
    assert found.expected_error == pytest.approx(0.5)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    assert reliability(two_classes(0.5), np.array([0]), bins=2).counts_B.tolist() == [1, 0]


def test_no_examples_have_no_error():
    found = reliability(np.zeros((0, 3)), np.zeros(0, np.int64))
    assert found.expected_error == 0.0
    assert not np.isnan(found.accuracies_B).any()
