"""Numbers of any size are learned as distances from their mean, and told as they are.

A head that starts near 0 would take far more steps to reach 90,000 than a run has.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bertsmith.features.bilstm import FrozenMixScorer
from bertsmith.model.heads import OutputHead
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.tasks.task import Task


@dataclass(frozen=True, slots=True)
class NumberScale:
    """The mean and the standard deviation of the numbers that are learned."""

    mean: float
    deviation: float

    def learned(self, train: EncodedSet) -> EncodedSet:
        """The training set with its numbers as they are learned."""
        distances_M = (train.targets.astype(np.float64) - self.mean) / self.deviation
        return replace(train, targets=distances_M.astype(np.float32))

    def told(self, scores_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a model that is still learning says, as true numbers."""
        return (scores_M.astype(np.float64) * self.deviation + self.mean).astype(np.float32)

    def fold_into(self, scorer: nn.Module) -> None:
        """Let the last layer give true numbers, to whichever tool opens it."""
        layer = _last_layer(scorer)
        with torch.no_grad():
            layer.weight.mul_(self.deviation)
            layer.bias.mul_(self.deviation).add_(self.mean)

    def take_out_of(self, scorer: nn.Module) -> None:
        """Let a last layer that gives true numbers, from an earlier run, give distances."""
        layer = _last_layer(scorer)
        with torch.no_grad():
            layer.weight.div_(self.deviation)
            layer.bias.sub_(self.mean).div_(self.deviation)


def scale_of(task: Task, train: EncodedSet) -> NumberScale | None:
    """The scale of a user's own numbers; published tasks learn theirs as they are."""
    if not task.custom or train.kind != "regress":
        return None
    numbers_M = train.targets.astype(np.float64)
    return NumberScale(float(numbers_M.mean()), float(numbers_M.std()) or 1.0)


def _last_layer(scorer: nn.Module) -> nn.Linear:
    if isinstance(scorer, FrozenMixScorer):
        return scorer.output
    assert isinstance(scorer, NetworkScorer)
    head = scorer.network.heads[scorer.head]
    assert isinstance(head, OutputHead)
    return head.output
