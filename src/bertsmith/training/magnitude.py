"""Unstructured pruning by magnitude: the smallest weights of all layers become zero and stay zero.

Masks are not stored: a mask is true at every nonzero weight. So saved and restored weights include their
masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.model.network import Network, published_names

Masks = dict[str, Tensor]
"""Masks by bertsmith's names of weights; True for each weight that is kept."""
GRADUAL = (0.1, 0.7)
"""Fractions of a run between which weights are pruned: after the warm-up, with time to recover at the end."""
UPDATES = 100
"""Number of intervals of a run; masks are recomputed after each interval that is within GRADUAL."""


def prunable_weights(network: Network) -> dict[str, nn.Parameter]:
    """Return the matrices of the layers; embeddings, norms, biases and heads stay (Chen et al. 2020)."""
    hidden = network.encoder.matrices()
    return {name: parameter for name, parameter in network.named_parameters() if parameter in hidden}


def cubic_sparsity(final: float, done: float) -> float:
    """Return the sparsity at a fraction of the schedule (Zhu & Gupta 2017, from a dense start).

    It rises quickly while many weights are dispensable, and slowly in the end.
    """
    return final * (1 - (1 - min(max(done, 0.0), 1.0)) ** 3)


@dataclass(frozen=True, slots=True)
class GradualSchedule:
    """The steps of a run at which masks are recomputed, and the sparsity of each."""

    final: float
    steps: int

    @property
    def last(self) -> int:
        """The last step at which weights are pruned."""
        return max(1, round(GRADUAL[1] * self.steps))

    def is_due(self, taken: int) -> bool:
        """True if masks are recomputed after this many steps."""
        every = max(1, self.steps // UPDATES)
        return GRADUAL[0] * self.steps <= taken <= self.last and (taken % every == 0 or taken == self.last)

    def sparsity(self, taken: int) -> float:
        """Return the fraction of weights that are zero after this many steps."""
        first = GRADUAL[0] * self.steps
        return cubic_sparsity(self.final, (taken - first) / (self.last - first))


def magnitude_masks(weights: Mapping[str, Tensor], sparsity: float) -> Masks:
    """Return masks without this fraction of all weights, the smallest, and without all zeros."""
    magnitudes = torch.cat([weight.detach().abs().flatten() for weight in weights.values()])
    count = round(sparsity * len(magnitudes))
    threshold = magnitudes.kthvalue(count).values if count else magnitudes.new_zeros(())
    return {name: weight.detach().abs() > threshold for name, weight in weights.items()}


def masks_of(weights: Mapping[str, Tensor]) -> Masks:
    """Return masks of the weights that are not zero."""
    return {name: weight.detach() != 0 for name, weight in weights.items()}


def apply_masks(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Set the weights outside of the masks to zero."""
    with torch.no_grad():
        for name, weight in weights.items():
            weight.mul_(masks[name])


def sparsity_of(network: Network) -> float:
    """Return the fraction of the layers' weights that are zero."""
    weights = prunable_weights(network).values()
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def published_masks(network: Network) -> Masks:
    """Return the masks by the published names of the weights, for a file."""
    masks = masks_of(prunable_weights(network))
    found: Masks = {}
    for ours, theirs in published_names(network.config, dict.fromkeys(network.heads, 0)).items():
        if ours in masks:
            parts = masks[ours].cpu().chunk(len(theirs))
            found |= {name: part.clone() for name, part in zip(theirs, parts, strict=True)}
    return found
