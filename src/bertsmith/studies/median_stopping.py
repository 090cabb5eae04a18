"""The median stopping rule of Google Vizier, which ends poor trials of a search early.

Golovin et al. 2017, 3.2.2: a trial is stopped at a step if its best value until then is strictly worse than
the median, over the completed trials, of the mean of their values up to the same step.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bertsmith.core.measures import Metric
from bertsmith.training.early_stopping import EarlyEnd

MIN_TRIALS = 3
"""Minimum number of completed trials for a meaningful median; Vizier's paper leaves it open."""
MEDIAN_STOPPING_NOTE = (
    f"after {MIN_TRIALS} complete trials, one ends early if its best is worse than the median of their "
    "means up to the same evaluation (median stopping rule, Golovin et al. 2017)"
)


@dataclass(frozen=True, slots=True)
class MedianStopping:
    """The rule with the completed trials that it compares to."""

    metric: Metric
    curves: Sequence[Sequence[float]]
    """Values of each trial at its evaluations; compared by evaluation number, because steps differ."""

    def __call__(self, values: Sequence[float]) -> EarlyEnd | None:
        """Return the early end of a trial with these values so far, or None if it continues."""
        number = len(values)
        means = [statistics.fmean(curve[:number]) for curve in self.curves if len(curve) >= number]
        if len(means) < MIN_TRIALS:
            return None
        best = max(values) if self.metric.larger_is_better else min(values)
        median = statistics.median(means)
        return EarlyEnd(number, best, median) if self.metric.is_better(median, than=best) else None
