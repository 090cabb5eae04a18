"""Errors of numbers, in their own unit."""

import sys

import numpy as np
import pytest

from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.tasks.metrics import mean_absolute_error, root_mean_squared_error

LABELS = np.array([90_000.0, 91_000.0], np.float32)


def test_errors_are_reported_in_the_unit_of_the_numbers():
    predictions = np.array([90_003.0, 90_996.0], np.float32)
    assert mean_absolute_error(LABELS, predictions) == 3.5
    assert root_mean_squared_error(LABELS, predictions) == pytest.approx(12.5**0.5)


def test_no_numbers_have_no_errors():
    nothing = np.empty(0, np.float32)
    assert mean_absolute_error(nothing, nothing) == root_mean_squared_error(nothing, nothing) == 0


@pytest.mark.parametrize("metric", [mean_absolute_error, root_mean_squared_error])
@pytest.mark.parametrize("prediction", [np.inf, -np.inf, np.nan])
def test_who_has_diverged_is_as_far_off_as_numbers_go(metric, prediction):
    predictions = np.array([90_000, prediction], np.float32)
    assert metric(LABELS, predictions) == sys.float_info.max


def test_only_fractions_are_reported_in_percent():
    assert metric_named("spearman").text(0.5) == "50.00"
    assert metric_named("mean_absolute_error").text(1234.5) == "1234.5"
    assert metric_named("best_f1_threshold").text(-1.25) == "-1.25"
