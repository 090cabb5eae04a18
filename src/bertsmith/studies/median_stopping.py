"""When a trial of a search is not worth its time: the median stopping rule of Google Vizier.

Golovin et al. 2017, 3.2.2: a trial is stopped at a step if its best value until then is strictly worse than
the median, over the completed trials, of the mean of their values up to the same step.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bertsmith.core.measures import Metric
from bertsmith.finetuning.finetuning_state import EarlyEnd

MIN_TRIALS = 3
"""A median over fewer completed trials says too little; Vizier's paper leaves this open."""
MEDIAN_STOPPING_NOTE = (
    f"after {MIN_TRIALS} complete trials, one ends early whose best figure is worse than the median of their "
    "means up to the same evaluation (median stopping rule, Golovin et al. 2017)"
)


@dataclass(frozen=True, slots=True)
class MedianStopping:
    """The rule, knowing the trials that ran to their end."""

    metric: Metric
    curves: Sequence[Sequence[float]]
    """The values of each at its evaluations, compared by their number: trials differ in steps."""

    def __call__(self, values: Sequence[float]) -> EarlyEnd | None:
        """How a trial with these values so far ends early, or None where it goes on."""
        number = len(values)
        means = [statistics.fmean(curve[:number]) for curve in self.curves if len(curve) >= number]
        if len(means) < MIN_TRIALS:
            return None
        best = max(values) if self.metric.larger_is_better else min(values)
        median = statistics.median(means)
        return EarlyEnd(number, best, median) if self.metric.is_better(median, than=best) else None
