"""Errors of numbers, in their own unit."""

import sys

import numpy as np
import pytest

from bertsmith.tasks.number_errors import mean_absolute_error, measure_text, root_mean_squared_error

GOLDS = np.array([90_000.0, 91_000.0], np.float32)


def test_errors_are_told_in_the_unit_of_the_numbers():
    guesses = np.array([90_003.0, 90_996.0], np.float32)
    assert mean_absolute_error(GOLDS, guesses) == 3.5
    assert root_mean_squared_error(GOLDS, guesses) == pytest.approx(12.5**0.5)


def test_no_numbers_have_no_errors():
    nothing = np.empty(0, np.float32)
    assert mean_absolute_error(nothing, nothing) == root_mean_squared_error(nothing, nothing) == 0


@pytest.mark.parametrize("measure", [mean_absolute_error, root_mean_squared_error])
@pytest.mark.parametrize("guess", [np.inf, -np.inf, np.nan])
def test_who_has_diverged_is_as_far_off_as_numbers_go(measure, guess):
    guesses = np.array([90_000, guess], np.float32)
    assert measure(GOLDS, guesses) == sys.float_info.max


def test_only_fractions_are_told_in_percent():
    assert measure_text("spearman", 0.5) == "50.00"
    assert measure_text("mean_absolute_error", 1234.5) == "1234.5"
    assert measure_text("best_f1_threshold", -1.25) == "-1.25"
