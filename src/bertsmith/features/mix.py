"""A learned mix of an encoder's layers (Peters et al. 2018, equation 1).

Shapes: L states of a token, T packed tokens, D model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LayerMix(nn.Module):
    """The sum of all layers' states with weights that add up to 1, times one number; at first their mean."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights_L = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """From one [T, D] for each layer to their mix [T, D]."""
        assert len(states) == len(self.weights_L), "one weight for each layer"
        shares_L = self.weights_L.softmax(0)
        mixed_TD = sum(share * state for share, state in zip(shares_L, states, strict=True))
        assert isinstance(mixed_TD, Tensor)
        return self.gamma * mixed_TD
