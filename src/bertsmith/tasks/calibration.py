"""Whether a model is as often right as it is sure.

Shapes: M examples, C classes, B bins.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Reliability:
    """Confidence (the likeliest class's probability) and accuracy in bins of equal width."""

    edges_B1: NDArray[np.float64]
    """A confidence on an edge belongs to the bin below it."""
    counts_B: NDArray[np.int64]
    confidences_B: NDArray[np.float64]
    """Means; 0.0 in empty bins."""
    accuracies_B: NDArray[np.float64]
    expected_error: float
    """The mean distance of confidence and accuracy, each bin by its examples (Guo et al. 2017)."""


def reliability(
    probabilities_MC: NDArray[np.floating], golds_M: NDArray[np.int64], *, bins: int = 10
) -> Reliability:
    """The reliability diagram of these predictions and its expected calibration error."""
    sure_M = probabilities_MC.max(1, initial=0.0).astype(np.float64)
    right_M = np.argmax(probabilities_MC, 1) == golds_M
    edges_B1 = np.linspace(0.0, 1.0, bins + 1)
    bins_M = np.searchsorted(edges_B1[1:-1], sure_M)
    counts_B = np.bincount(bins_M, minlength=bins)
    filled_B = np.maximum(counts_B, 1)
    confidences_B = np.bincount(bins_M, weights=sure_M, minlength=bins) / filled_B
    accuracies_B = np.bincount(bins_M, weights=right_M, minlength=bins) / filled_B
    error = float(np.abs(confidences_B - accuracies_B) @ counts_B) / max(len(golds_M), 1)
    return Reliability(edges_B1, counts_B, confidences_B, accuracies_B, error)
