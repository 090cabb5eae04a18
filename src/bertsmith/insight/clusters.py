"""Similarity of heads: the Jensen-Shannon divergence of their attention, and a map of the heads in the plane.

After Clark et al. 2019, section 6. Memory holds all layers of one group of texts at a time.

Shapes: L layers, H heads, A = L x H heads in the order of the layers, G texts of similar length, N tokens of
the longest of these texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextInput
from bertsmith.insight.attention_pass import Analysis, attention_pass
from bertsmith.insight.surface import Surface, shortened, smoothing_term
from bertsmith.model.transformer.transformer_config import with_heads

SMOOTHING = 1e-3
"""Weight of the uniform distribution mixed into attention, as published: .999 a + .001 / n."""
MAX_STEPS, ENOUGH = 1000, 1e-10
"""Limits of the map's optimisation, as published: steps, and the relative change of stress that ends it."""
BROAD, POSITION, SPECIAL = 3.8, 0.5, 0.6
"""Published thresholds that name a head: entropy, attention to a neighbour, attention to special tokens."""

Distances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeadMap:
    """The mean divergence between heads, over all tokens, and a point for each head."""

    distances_AA: Distances
    points_A2: Distances
    shape: tuple[int, int]

    def within_and_across(self) -> tuple[float, float]:
        """Return the mean divergence between two heads of one layer, and of different layers."""
        layers, heads = self.shape
        layer_A = np.repeat(np.arange(layers), heads)
        same_AA = layer_A[:, None] == layer_A[None]
        other_AA = ~np.eye(len(layer_A), dtype=np.bool_)
        across = float(self.distances_AA[~same_AA].mean()) if layers > 1 else float("nan")
        return float(self.distances_AA[same_AA & other_AA].mean()) if heads > 1 else float("nan"), across


def study_clusters(bert: Bert, texts: Sequence[TextInput], *, longest: int) -> HeadMap:
    """Measure the divergence of each pair of heads over all tokens, in nats, and map the heads."""
    encoded = shortened(bert, texts, longest)
    config = with_heads(bert.model.network.config)
    heads, device = config.layers * config.heads, bert.engine.device
    total_AA = torch.zeros(heads, heads, dtype=torch.float64, device=device)
    analysis = Analysis(
        prepare=lambda numbers: smoothing_term([len(encoded[each]) for each in numbers], SMOOTHING, device),
        reduce=_smooth,
    )
    for _, layers in attention_pass(bert, encoded, analysis, what="attention"):
        total_AA += divergences(torch.cat(layers, dim=1))
    distances_AA = (total_AA / sum(map(len, encoded))).cpu().numpy()
    return HeadMap(distances_AA, plane_of(distances_AA), (config.layers, config.heads))


def _smooth(smoothing_G1NN: Tensor, weights_GHNN: Tensor) -> Tensor:
    return (1 - SMOOTHING) * weights_GHNN.float() + smoothing_G1NN


def divergences(smooth_GANN: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of each pair of heads, summed over tokens [A, A]."""
    entropy_A = _entropy(smooth_GANN)
    heads = smooth_GANN.shape[1]
    found_AA = torch.zeros(heads, heads, dtype=torch.float64, device=smooth_GANN.device)
    for head in range(heads - 1):
        # One head against all later ones: all pairs at once would take A times the memory of the attention.
        between = _entropy((smooth_GANN[:, head : head + 1] + smooth_GANN[:, head + 1 :]) / 2)
        found_AA[head, head + 1 :] = between - (entropy_A[head] + entropy_A[head + 1 :]) / 2
    return found_AA + found_AA.T


def _entropy(smooth_GANN: Tensor) -> Tensor:
    """Return the entropy of each head, summed over the tokens of all texts [A]."""
    return -(smooth_GANN * smooth_GANN.log()).sum((0, 2, 3), dtype=torch.float64)


def plane_of(distances_AA: Distances) -> Distances:
    """Return points with distances close to the given ones (metric scaling, by SMACOF) [A, 2].

    The start is classical scaling instead of random points, so that the map is deterministic.
    """
    count = len(distances_AA)
    centre = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centre @ distances_AA**2 @ centre)
    points = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    before = np.inf
    for _ in range(MAX_STEPS):
        apart_AA = np.linalg.norm(points[:, None] - points[None], axis=-1)
        stress = ((apart_AA - distances_AA) ** 2).sum() / 2
        if before - stress <= ENOUGH * max(stress, 1e-300):
            break
        before = stress
        # The Guttman transform: each point moves to the position that its distances imply.
        ratio_AA = np.divide(distances_AA, apart_AA, out=np.zeros_like(apart_AA), where=apart_AA > 0)
        pull_AA = np.diag(ratio_AA.sum(1)) - ratio_AA
        points = pull_AA @ points / count
    largest = points[np.abs(points).argmax(0), np.arange(2)]
    turned_A2: Distances = points * np.where(largest < 0, -1.0, 1.0)
    return turned_A2


def kinds_of_heads(surface: Surface) -> list[str]:
    """Return the kind of each head by the published thresholds; "other" if it reaches none of them."""
    found = []
    for layer, head in np.ndindex(surface.measures["previous"].shape):
        value = {name: float(values[layer, head]) for name, values in surface.measures.items()}
        special = value["[CLS]"] + value["[SEP]"] + value["punctuation"]
        kinds = {
            "previous": value["previous"] > POSITION,
            "next": value["next"] > POSITION,
            "special": special > SPECIAL,
            "broad": value["entropy"] > BROAD,
        }
        found.append(next((kind for kind, holds in kinds.items() if holds), "other"))
    return found
