"""The average of a run's last weights, often better than the last ones alone (Izmailov et al. 2018).

It is part of the optimiser's state, like the moments, and so is saved and loaded with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bertsmith.model.kernels.torch_internals import foreach_lerp_
from bertsmith.training.distributed import held

AVERAGE = "average"
"""Key of the average in a parameter's optimiser state, and in saved checkpoints."""


@dataclass
class WeightAverage:
    """A running average of a module's trained weights."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    decay: float | Literal["equal"] = "equal"
    """Decay of an exponential average; "equal" gives all steps the same weight."""
    count: int = 0
    """Number of averaged steps."""

    @torch.no_grad()
    def add(self) -> None:
        """Add the current weights to the average; on a GPU, after the step that was launched last."""
        self.count += 1
        if self.count == 1:
            for each in self._parameters():
                self.optimizer.state[each][AVERAGE] = each.detach().clone()
            return
        weights = [held(each) for each in self._parameters()]
        foreach_lerp_(self._averages(), weights, 1 / self.count if self.decay == "equal" else 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, replace the weights by their average, if there is one yet."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        if self.count:
            # After a forward without backward, FSDP keeps whole weights and would use the old ones again.
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
            for parameter, average in zip(self._parameters(), self._averages(), strict=True):
                weights = held(parameter).clone()
                held(parameter).copy_(average)
                average.copy_(weights)

    def _parameters(self) -> list[Tensor]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def _averages(self) -> list[Tensor]:
        return [held(self.optimizer.state[each][AVERAGE]) for each in self._parameters()]
