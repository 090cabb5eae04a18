"""Targets of any size are learned as distances from their mean, and predicted as they are.

A head that starts near 0 would take far more steps to reach 90,000 than a run has.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.features.bilstm import FeatureScorer
from bertsmith.model.heads import OutputHead
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.tasks.task import Task
from bertsmith.tasks.text_encoding import Targets

LARGEST_TARGET = 1e30
"""Squares of distances, and the products of a layer, still fit into double precision and its sums."""


@dataclass(frozen=True, slots=True)
class TargetScaler:
    """The mean and the standard deviation of the training targets."""

    mean: float
    deviation: float

    def transform(self, targets_M: Targets | NDArray[np.float16]) -> NDArray[np.float32]:
        """The targets as they are learned."""
        return ((targets_M.astype(np.float64) - self.mean) / self.deviation).astype(np.float32)

    def inverse_transform(self, scores_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a model that is still learning predicts, as true numbers."""
        return (scores_M.astype(np.float64) * self.deviation + self.mean).astype(np.float32)

    def fold_into(self, scorer: nn.Module) -> None:
        """Let the last layer give true numbers, to whichever tool opens it."""
        layer = last_layer(scorer)
        with torch.no_grad():  # deviation * (Wx + b) + mean
            layer.weight.mul_(self.deviation)
            layer.bias.mul_(self.deviation).add_(self.mean)

    def take_out_of(self, scorer: nn.Module) -> None:
        """Let a last layer that gives true numbers, from an earlier run, give distances."""
        layer = last_layer(scorer)
        with torch.no_grad():
            layer.weight.div_(self.deviation)
            layer.bias.sub_(self.mean).div_(self.deviation)


def fit_target_scaler(task: Task, train: EncodedSet) -> TargetScaler | None:
    """The scaler of a user's own numbers; published tasks learn theirs as they are."""
    if not task.custom or not task.kind.numeric:
        return None
    numbers_M = train.targets.astype(np.float64)
    largest = float(np.abs(numbers_M).max(initial=0.0))
    if not largest < LARGEST_TARGET:
        what = f"its numbers reach {largest:g}, too far for a model's 32 bits"
        raise UserError(what, where="the training file", remedy=f"keep them below {LARGEST_TARGET:g}")
    # Numbers that are all the same have no deviation, but must not be divided by 0.
    return TargetScaler(float(numbers_M.mean()), float(numbers_M.std()) or 1.0)


def last_layer(scorer: nn.Module) -> nn.Linear:
    """Return the layer that gives a scorer's scores."""
    if isinstance(scorer, FeatureScorer):
        return scorer.output
    assert isinstance(scorer, NetworkScorer)
    head = scorer.network.heads[scorer.head]
    assert isinstance(head, OutputHead)
    return head.output
