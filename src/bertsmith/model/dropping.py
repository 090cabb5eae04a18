"""Dropout's draws, and dropout itself where torch is slow at it.

torch draws a CPU's Bernoulli numbers one by one; four of ours come from one draw of the same generator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

DRAWS = 2**16
"""So many values a draw can have: dropout of 0.1 is really 6554 / 65536."""


def drawn_below(
    share: float, shape: Sequence[int], device: torch.device, stream: torch.Generator | None = None
) -> Tensor:
    """True with the probability `real_share(share)`, each by itself; without a stream from torch's own."""
    count = torch.Size(shape).numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=stream)
    draws = words.view(torch.int16)[:count].view(*shape)
    return draws < _dropped_values(share) - DRAWS // 2


def real_share(share: float) -> float:
    """The probability that `drawn_below` really has."""
    return _dropped_values(share) / DRAWS


def _dropped_values(share: float) -> int:
    """How many of the values a draw can have fall below the share; never all, which no 16 bits can say."""
    return min(round(share * DRAWS), DRAWS - 1)


class Dropout(nn.Dropout):
    """torch's dropout, drawn faster on a CPU."""

    def forward(self, values: Tensor) -> Tensor:
        ours = values.device.type == "cpu" and self.training and 0 < self.p < 1
        if not ours or torch.compiler.is_compiling():  # the compiler fuses torch's own and cannot trace ours
            return super().forward(values)
        dropped = drawn_below(self.p, values.shape, values.device)
        kept = values.new_full((), 1 / (1 - real_share(self.p)))
        return values * torch.where(dropped, values.new_zeros(()), kept)
