"""Intervals of a metric, or of the difference of two ways to train: the multi-bootstrap (Sellam et al. 2022).

A draw takes pre-training seeds with replacement, then fine-tuning runs of each seed, then test examples.
Shapes: S pre-training seeds, R fine-tuning runs of a seed, M examples, B draws, K sums of a metric.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.seeds import stream
from bertsmith.tasks.metrics import Metric

DRAWS = 1_000
TAIL = 2.5
"""Percent on either side of the interval."""
BLOCK = 50
"""Draws computed at once."""
HELD = {1: {2: 49, 3: 73, 4: 81, 5: 82}, 3: {2: 73, 3: 79, 4: 86, 5: 86}}
"""Percent of simulated 95 % intervals that contain the true difference, by fine-tuning runs of each seed and
by pre-training seeds (three runs of 10 seeds: 92). The deviation of runs is half of the deviation of the
seeds' differences, and examples add no noise.
"""

Values = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the 95 % interval of its draws."""

    value: float
    low: float
    high: float
    seeds: int
    """The smaller number of pre-training seeds of the two sides."""
    runs: int = 1
    """The smaller number of fine-tuning runs of a seed of the two sides."""

    def caution(self) -> str:
        """Return a warning if the seeds are too few for a 95 % interval, else ""."""
        held = HELD[1 if self.runs == 1 else 3]
        if self.seeds > max(held):
            return ""
        if self.seeds == 1:
            return "one seed: the interval covers only the examples, not other seeds"
        return (
            f"{self.seeds} seeds: the interval is too narrow; in simulations with noise of seeds alone "
            f"it contained the true value at best {held[self.seeds]} times in 100, not 95"
        )


@dataclass(frozen=True, slots=True)
class Sums:
    """A metric that follows from sums over examples, so that a draw only needs to weigh them."""

    of_examples: Callable[[Values, Values], Floats]
    """Maps targets [M] and predictions [..., M] to the values to sum [..., M, K]."""
    value: Callable[[Floats, int], Floats]
    """Maps sums [..., K] and the number of examples to the metric [...]."""


def _f1_sums(targets_M: Values, predictions: Values) -> Floats:
    right, named = (targets_M == 1) & (predictions == 1), (targets_M == 1) * 1.0 + (predictions == 1)
    return np.stack([right, named], axis=-1)


MEAN = Metric("mean", compute=lambda _, values: float(values.mean()))
"""Metric of values that were already measured, for each example or for whole runs."""
SUMS = {
    "mean": Sums(lambda _, found: found[..., None] * 1.0, lambda sums, m: sums[..., 0] / m),
    "accuracy": Sums(
        lambda targets, found: (targets == found)[..., None] * 1.0, lambda sums, m: sums[..., 0] / m
    ),
    "f1": Sums(_f1_sums, lambda sums, _: 2 * sums[..., 0] / np.maximum(sums[..., 1], 1)),
    "mean_absolute_error": Sums(
        lambda targets, found: np.abs(targets - found)[..., None], lambda sums, m: sums[..., 0] / m
    ),
    "root_mean_squared_error": Sums(
        lambda targets, found: np.square(targets - found)[..., None],
        lambda sums, m: np.sqrt(sums[..., 0] / m),
    ),
}
"""Sums by the metric's name; any other metric is computed again for each draw."""


def multi_bootstrap(
    ours_SRM: Values,
    theirs_SRM: Values | None,
    targets_M: Values,
    metric: Metric,
    *,
    paired: bool = True,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Return the mean metric of all runs, or the difference of ours from theirs, with its interval.

    Paired sides share their seeds (the same initial weights and data, one setting changed) and are drawn
    together; others are drawn separately. Examples are always drawn together.
    """
    sides = [ours_SRM] if theirs_SRM is None else [ours_SRM, theirs_SRM]
    if paired and len({side.shape[:2] for side in sides}) > 1:
        raise ValueError(f"paired runs differ in shape: {[side.shape[:2] for side in sides]}")
    measured = [_measurement(metric, side, targets_M) for side in sides]
    chance, examples = stream(seed, "multi-bootstrap"), len(targets_M)
    equal_M, once_1M = np.full(examples, 1 / examples), np.ones((1, examples), np.int64)
    found_B: list[Floats] = []
    for first in range(0, draws, BLOCK):
        count = min(BLOCK, draws - first)
        times_BM = chance.multinomial(examples, equal_M, size=count)
        weights = [_run_weights(chance, side.shape[0], side.shape[1], count) for side in sides]
        of_sides = zip(measured, [weights[0]] * len(sides) if paired else weights, strict=True)
        found_B.append(_difference([(of(times_BM) * runs).sum((1, 2)) for of, runs in of_sides]))
    low, high = np.percentile(np.concatenate(found_B), [TAIL, 100 - TAIL])
    value = _difference([of(once_1M).mean((1, 2)) for of in measured])[0]
    seeds, runs = (min(side.shape[axis] for side in sides) for axis in (0, 1))
    return Interval(float(value), float(low), float(high), seeds, runs)


def _difference(sides: list[Floats]) -> Floats:
    return sides[0] if len(sides) == 1 else sides[0] - sides[1]


def _run_weights(chance: np.random.Generator, seeds: int, runs: int, draws: int) -> Floats:
    """Return the share of each run in each draw [B, S, R]: seeds are drawn, then as many runs of each."""
    times_BS = chance.multinomial(seeds, np.full(seeds, 1 / seeds), size=draws)
    times_BSR = chance.multinomial(times_BS * runs, np.full(runs, 1 / runs))
    shares_BSR: Floats = times_BSR / (seeds * runs)
    return shares_BSR


def _measurement(metric: Metric, side_SRM: Values, targets_M: Values) -> Callable[[Values], Floats]:
    """Return a function from counts of each example in draws [B, M] to the metric of each run [B, S, R]."""
    if (by_sums := SUMS.get(metric.name)) is not None and side_SRM.ndim == 3:
        summed_SRMK = by_sums.of_examples(targets_M, side_SRM)
        return lambda times_BM: by_sums.value(
            np.moveaxis(np.tensordot(summed_SRMK, times_BM, axes=(2, 1)), -1, 0), len(targets_M)
        )
    compute = metric.compute
    assert compute is not None, f"{metric.name} is not computed from labels and predictions alone"

    def anew(times_BM: Values) -> Floats:
        drawn = [np.repeat(np.arange(len(targets_M)), times_M) for times_M in times_BM]
        found = [
            [[compute(targets_M[rows], run_M[rows]) for run_M in of_seed] for of_seed in side_SRM]
            for rows in drawn
        ]
        return np.array(found)

    return anew
