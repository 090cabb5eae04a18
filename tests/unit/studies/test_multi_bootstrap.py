"""The multi-bootstrap: the same as drawing by hand, and honest about few seeds."""

import numpy as np
import pytest

from bertsmith.studies.multi_bootstrap import HELD, SUMS, Interval, multi_bootstrap
from bertsmith.tasks.metrics import (
    ACCURACY,
    F1,
    MATTHEWS,
    MEAN_ABSOLUTE_ERROR,
    ROOT_MEAN_SQUARED_ERROR,
    SPEARMAN,
)


def classes(seeds, runs, examples, right=0.7, seed=0):
    chance = np.random.default_rng(seed)
    targets = chance.integers(2, size=examples)
    wrong = chance.random((seeds, runs, examples)) > right
    return np.where(wrong, 1 - targets, targets), targets


def drawn_by_hand(ours, theirs, targets, metric, *, paired, draws, seed):
    """The plain form: loops over seeds, runs and examples, with draws of its own."""
    chance, found = np.random.default_rng(seed), []

    def runs_of(side):
        for one in chance.integers(len(side), size=len(side)):
            for run in chance.integers(side.shape[1], size=side.shape[1]):
                yield one, run

    for _ in range(draws):
        rows = chance.integers(len(targets), size=len(targets))

        def mean(side, runs, rows=rows):
            return np.mean([metric.compute(targets[rows], side[one, run][rows]) for one, run in runs])

        first = list(runs_of(ours))
        second = first if paired else list(runs_of(theirs))
        found.append(mean(ours, first) - mean(theirs, second))
    return np.percentile(found, [2.5, 97.5])


@pytest.mark.parametrize("metric", [ACCURACY, F1, MATTHEWS, SPEARMAN], ids=lambda each: each.name)
@pytest.mark.parametrize("paired", [True, False])
def test_it_agrees_with_drawing_by_hand(metric, paired):
    ours, targets = classes(3, 2, 40, 0.8)
    theirs, _ = classes(3, 2, 40, 0.7)
    found = multi_bootstrap(ours, theirs, targets, metric, paired=paired, draws=200)
    plain = drawn_by_hand(ours, theirs, targets, metric, paired=paired, draws=200, seed=1)
    width = plain[1] - plain[0]
    assert (found.low, found.high) == pytest.approx(tuple(plain), abs=0.25 * width)
    each = [
        np.mean([metric.compute(targets, run) for of_seed in side for run in of_seed])
        for side in (ours, theirs)
    ]
    assert found.value == pytest.approx(each[0] - each[1])


@pytest.mark.parametrize(
    "metric", [ACCURACY, F1, MEAN_ABSOLUTE_ERROR, ROOT_MEAN_SQUARED_ERROR], ids=lambda each: each.name
)
def test_sums_give_what_the_metric_itself_gives(metric, monkeypatch):
    ours, targets = classes(3, 2, 40)
    by_sums = multi_bootstrap(ours, None, targets, metric, draws=60)
    monkeypatch.delitem(SUMS, metric.name)
    anew = multi_bootstrap(ours, None, targets, metric, draws=60)
    assert (by_sums.value, by_sums.low, by_sums.high) == pytest.approx((anew.value, anew.low, anew.high))


def test_what_pairs_share_cancels_out():
    chance = np.random.default_rng(0)
    targets = np.ones(400, np.int64)
    by_seed = chance.uniform(0.5, 0.9, size=(6, 1, 1))
    shared = chance.random((6, 1, 400))
    theirs = (shared < by_seed).astype(np.int64)
    ours = (shared < by_seed + 0.05).astype(np.int64)
    together = multi_bootstrap(ours, theirs, targets, ACCURACY, draws=400)
    apart = multi_bootstrap(ours, theirs, targets, ACCURACY, paired=False, draws=400)
    assert together.low > 0
    assert together.high - together.low < (apart.high - apart.low) / 3


def test_several_labels_and_unequal_sides_are_drawn_too():
    chance = np.random.default_rng(0)
    targets = chance.integers(2, size=(30, 3))
    ours, theirs = (chance.integers(2, size=(seeds, 1, 30, 3)) for seeds in (2, 3))
    found = multi_bootstrap(ours, theirs, targets, ACCURACY, paired=False, draws=50)
    assert found.low <= found.value <= found.high
    assert found.seeds == 2
    with pytest.raises(ValueError, match="paired runs differ in shape"):
        multi_bootstrap(ours, theirs, targets, ACCURACY)


def held(seeds, runs=3, trials=200):
    """How many of 100 intervals hold the true difference, 0: all noise is that of seeds and of runs."""
    chance, inside = np.random.default_rng(seeds), 0
    for trial in range(trials):
        # With one example, whose target is 0, the error is the number that a run predicts.
        of_seeds, of_runs = chance.normal(0, 1, (seeds, 1, 1)), chance.normal(0, 0.5, (2, seeds, runs, 1))
        ours, theirs = 10 + of_seeds + of_runs[0], 10 + of_runs[1]
        found = multi_bootstrap(ours, theirs, np.zeros(1), MEAN_ABSOLUTE_ERROR, draws=200, seed=trial)
        inside += found.low <= 0 <= found.high
    return 100 * inside / trials


@pytest.mark.parametrize(("runs", "seeds"), [(runs, seeds) for runs in HELD for seeds in HELD[runs]])
def test_few_seeds_hold_the_truth_as_often_as_the_caution_says(runs, seeds):
    assert held(seeds, runs) == pytest.approx(HELD[runs][seeds], abs=6)
    assert f"at best {HELD[runs][seeds]} times in 100" in Interval(0, 0, 0, seeds, runs).caution()


def test_many_seeds_need_no_caution():
    assert held(10) > 88
    assert Interval(0, 0, 0, 10).caution() == ""
    assert "one seed" in Interval(0, 0, 0, 1).caution()
