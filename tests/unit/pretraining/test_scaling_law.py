"""The fitted rule for losses: what each of its terms does, and that it agrees with the runs it is from."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertsmith.pretraining.scaling_law import MASKED, RunSize

RUNS = Path(__file__).parents[3] / "bench" / "scaling_runs.jsonl"
SIZE = RunSize(weights=1.8e6, width=192, tokens=16e6, text_tokens=60e6, batch_tokens=16_256)


@pytest.mark.parametrize("change", [{"weights": 3.2e6}, {"tokens": 32e6}, {"batch_tokens": 8_128}])
def test_a_larger_model_more_tokens_and_more_steps_have_a_lower_loss(change):
    assert MASKED.loss(replace(SIZE, **change)) < MASKED.loss(SIZE) - 0.01


def test_passes_over_a_small_text_count_less_than_fresh_text():
    repeated = replace(SIZE, text_tokens=1e6)
    assert MASKED.useful_tokens(repeated) < MASKED.useful_tokens(SIZE)
    assert MASKED.loss(repeated) > MASKED.loss(SIZE)


def test_a_text_of_more_tokens_than_are_shown_changes_nothing():
    assert MASKED.loss(replace(SIZE, text_tokens=1e12)) == MASKED.loss(SIZE)


def test_no_loss_is_above_that_of_word_frequencies():
    assert MASKED.loss(replace(SIZE, tokens=1e4, batch_tokens=5_000)) <= MASKED.frequencies


def test_other_learning_rates_than_the_best_cost_the_same_on_both_sides():
    best, least = MASKED.best_rate(SIZE), MASKED.loss(SIZE)
    assert MASKED.loss(SIZE, best) == pytest.approx(least)
    assert MASKED.loss(SIZE, 3 * best) == pytest.approx(MASKED.loss(SIZE, best / 3))
    assert MASKED.loss(SIZE, 3 * best) > least + 0.1


def test_wider_models_have_lower_rates():
    assert MASKED.best_rate(replace(SIZE, width=768)) < MASKED.best_rate(SIZE)


def test_a_lower_loss_means_more_words_right():
    right = [MASKED.words_right(loss) for loss in (6.0, 5.0, 4.0, 3.0, 2.5)]
    assert right == sorted(right)
    assert 0 < right[0] < right[-1] < 1


def test_the_law_agrees_with_its_runs():
    rows = {row["name"]: row for row in map(json.loads, RUNS.read_text(encoding="utf-8").splitlines())}
    off = []
    for row in rows.values():
        if row["objective"] == "masked":
            width = int(row["shape"].partition("x")[2])
            counts = (row["tokens_seen"], row["store_tokens"], row["batch_tokens"])
            loss = MASKED.loss(RunSize(row["layer_weights"], width, *counts), row["peak_lr"])
            off.append(abs(loss / row["fixed_mlm_loss"] - 1))
    assert len(off) > 70
    assert np.median(off) < 0.02
    assert np.quantile(off, 0.9) < 0.06
