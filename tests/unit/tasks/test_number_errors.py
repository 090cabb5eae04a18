"""Errors of numbers, in their own unit."""

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


def test_only_fractions_are_told_in_percent():
    assert measure_text("spearman", 0.5) == "50.00"
    assert measure_text("mean_absolute_error", 1234.5) == "1234.5"
