"""From which probability on a label is given, tuned on a development set."""

import numpy as np
from numpy.typing import NDArray

from bertsmith.tasks.metrics import Metric, Values

USUAL_THRESHOLD = 0.5
MAX_THRESHOLDS = 200
"""So many are tried, at quantiles of the probabilities: more would fit the development set only."""


def best_label_threshold(metric: Metric, targets_M: Values, scores_M: NDArray[np.float32]) -> float:
    """The threshold whose decisions the metric likes best; of equals the one nearest to the usual."""
    assert metric.compute is not None
    known_M = targets_M >= 0
    targets_M, scores_M = targets_M[known_M], scores_M[known_M].astype(np.float64)
    found = np.unique(np.quantile(scores_M, np.linspace(0, 1, MAX_THRESHOLDS), method="nearest"))
    # In the middle between two probabilities: safest for others. Below and above all of them, too.
    bounds = np.concatenate([[0.0], found, [1.0]])
    tried: set[float] = {USUAL_THRESHOLD, *((bounds[1:] + bounds[:-1]) / 2).tolist()}
    values = {each: metric.compute(targets_M, (scores_M >= each).astype(np.int64)) for each in tried}
    sign = 1 if metric.larger_is_better else -1
    return max(tried, key=lambda each: (sign * values[each], -abs(each - USUAL_THRESHOLD)))
