"""The average of a run's last weights, often better than the last ones alone (Izmailov et al. 2018).

It lies in the optimiser's state, beside the moments: whoever saves and loads these has it, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bertsmith.model.torch_internals import foreach_lerp_
from bertsmith.training.distributed import held

AVERAGE = "average"
"""Its key in the optimiser's state of a parameter, and in saved checkpoints."""


@dataclass
class WeightAverage:
    """A running average of what an optimiser trains of a module."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    decay: float | Literal["equal"] = "equal"
    """Of an exponential average; or all weights count the same."""
    count: int = 0
    """How many weights were averaged."""

    @torch.no_grad()
    def add(self) -> None:
        """Take the present weights into the average; on a GPU, those of the step that was launched last."""
        self.count += 1
        if self.count == 1:
            for each in self._parameters():
                self.optimizer.state[each][AVERAGE] = each.detach().clone()
            return
        weights = [held(each) for each in self._parameters()]
        foreach_lerp_(self._averages(), weights, 1 / self.count if self.decay == "equal" else 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the weights are their average, if there is one yet."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        if self.count:
            # After a forward without backward, FSDP keeps whole weights that it would use again as they were.
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
