"""Scaling of numeric targets: they are learned as distances from their mean, and predicted as true numbers.

A head that starts near 0 would need far more steps to reach 90,000 than a run has.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import Scorer
from bertsmith.tasks.task import Task
from bertsmith.tasks.text_encoding import Targets

LARGEST_TARGET = 1e30
"""Maximum size of a target: squares of distances, and a layer's products, still fit into double precision."""


@dataclass(frozen=True, slots=True)
class TargetScaler:
    """The mean and the standard deviation of the training targets."""

    mean: float
    deviation: float

    def transform(self, targets_M: Targets | NDArray[np.float16]) -> NDArray[np.float32]:
        """Return the standardised targets, as they are learned."""
        return ((targets_M.astype(np.float64) - self.mean) / self.deviation).astype(np.float32)

    def inverse_transform(self, scores_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the true numbers for the scores of a model that predicts standardised targets."""
        return (scores_M.astype(np.float64) * self.deviation + self.mean).astype(np.float32)

    def fold_into(self, scorer: Scorer) -> None:
        """Change the last layer so that it predicts true numbers, in any tool that opens the model."""
        layer = scorer.last_layer()
        with torch.no_grad():  # deviation * (Wx + b) + mean
            layer.weight.mul_(self.deviation)
            layer.bias.mul_(self.deviation).add_(self.mean)

    def take_out_of(self, scorer: Scorer) -> None:
        """Change a last layer that predicts true numbers (from an earlier run) to standardised ones."""
        layer = scorer.last_layer()
        with torch.no_grad():
            layer.weight.div_(self.deviation)
            layer.bias.sub_(self.mean).div_(self.deviation)


def fit_target_scaler(task: Task, train: EncodedSet, scorer: Scorer) -> TargetScaler | None:
    """Return the scaler for a user's own numbers; other tasks learn their targets unscaled."""
    if not task.custom or not task.kind.numeric:
        return None
    if scorer.last_layer().bias is None:
        what = (
            "your own numbers are learned as distances from their mean, and this head lacks the bias for it"
        )
        raise UserError(what, remedy="use a model of another family than GPT-2, or labels instead of numbers")
    numbers_M = train.targets.astype(np.float64)
    largest = float(np.abs(numbers_M).max(initial=0.0))
    if not largest < LARGEST_TARGET:
        what = f"its numbers reach {largest:g}, too large for a model's 32 bits"
        raise UserError(what, where="the training file", remedy=f"keep them below {LARGEST_TARGET:g}")
    # If all numbers are equal, their deviation is 0, and nothing must be divided by it.
    return TargetScaler(float(numbers_M.mean()), float(numbers_M.std()) or 1.0)
