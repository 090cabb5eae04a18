"""The distance that each layer moves a token: L2 distance and angle between its input and its output.

As in Lan et al. 2019 (ALBERT, figure 1) for BERT and ALBERT: shared layers move tokens more evenly.

Shapes: L layers, T packed tokens, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextInput
from bertsmith.insight.pictures import BLUE, GREEN, GREY, RED
from bertsmith.insight.random_control import of_untrained
from bertsmith.insight.report import Report, Table
from bertsmith.insight.surface import shortened
from bertsmith.packed import PackedBatch, unpack

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class LayerDistances:
    """Means over all tokens of all texts, including special tokens, for each layer."""

    distances_L: list[float]
    angles_L: list[float]
    """Mean angle of each layer, in degrees."""
    texts: int
    tokens: int


def untrained_distances(bert: Bert, texts: Sequence[TextInput], *, longest: int, seed: int) -> LayerDistances:
    """Measure networks with random weights on the same tokens, as the mean of three."""
    found = of_untrained(bert, lambda twin: layer_distances(twin, texts, longest=longest), seed=seed)
    means_2L = np.mean([(each.distances_L, each.angles_L) for each in found], axis=0)
    return replace(found[0], distances_L=means_2L[0].tolist(), angles_L=means_2L[1].tolist())


def layer_distances(bert: Bert, texts: Sequence[TextInput], *, longest: int) -> LayerDistances:
    """Measure how far each layer of a model moves the tokens of these texts."""
    encoded = shortened(bert, texts, longest)

    def sums(batch: PackedBatch) -> list[Tensor]:
        states = bert.engine.network.encoder.hidden_states(batch)
        moved = [moved_by(before, after) for before, after in zip(states, states[1:], strict=False)]
        measures_TL2 = torch.stack([torch.stack(each, -1) for each in moved], 1)
        return [each.sum(0).cpu() for each in unpack(measures_TL2, batch.layout)]

    tokens = sum(map(len, encoded))
    means_L2 = torch.stack(bert.engine.predict_encoded(encoded, sums)).sum(0) / tokens
    return LayerDistances(means_L2[:, 0].tolist(), means_L2[:, 1].tolist(), len(encoded), tokens)


def moved_by(before_TD: Tensor, after_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the L2 distance of each pair of states, and the angle between them in degrees."""
    one_TD, other_TD = before_TD.double(), after_TD.double()
    distance_T = (other_TD - one_TD).norm(dim=-1)
    cosine_T = torch.nn.functional.cosine_similarity(one_TD, other_TD, dim=-1).clamp(-1, 1)
    return distance_T, torch.rad2deg(cosine_T.acos())


def layers_report(found: Mapping[str, LayerDistances], untrained: Mapping[str, LayerDistances]) -> Report:
    """Report the distances of several models side by side, and of the same networks before training."""
    first = next(iter(found.values()))
    title = f"How far each layer moves a token, {first.texts:,} texts of {first.tokens:,} tokens"
    notes = ("Mean L2 distance and mean angle in degrees between a layer's input and its output.",)
    tables = (
        _table(title, found, notes),
        _table("The same of untrained networks, means of 3 random initialisations", untrained, ()),
    )
    values = {
        name: {
            **_plain(each),
            "texts": each.texts,
            "tokens": each.tokens,
            "untrained": _plain(untrained[name]),
        }
        for name, each in found.items()
    }
    return Report("layers", tables, values, lambda figure: _draw(figure, found, untrained), (10, 4.2))


def _plain(found: LayerDistances) -> dict[str, list[float]]:
    return {"l2": found.distances_L, "angle": found.angles_L}


def _table(title: str, found: Mapping[str, LayerDistances], notes: tuple[str, ...]) -> Table:
    most = max(len(each.distances_L) for each in found.values())
    columns = ["layer", *(f"{name} {what}" for name in found for what in ("L2", "angle"))]
    rows = []
    for layer in range(most):
        cells: list[str | float | None] = [str(layer + 1)]
        for each in found.values():
            known = layer < len(each.distances_L)
            cells += [each.distances_L[layer], each.angles_L[layer]] if known else [None, None]
        rows.append(cells)
    return Table(title, tuple(columns), rows, notes)


def _draw(
    figure: "Figure", found: Mapping[str, LayerDistances], untrained: Mapping[str, LayerDistances]
) -> None:
    left, right = figure.subplots(1, 2)
    for (name, each), colour in zip(found.items(), cycle([BLUE, RED, GREEN, GREY]), strict=False):
        layers = range(1, len(each.distances_L) + 1)
        left.plot(layers, each.distances_L, color=colour, marker="o", label=name)
        right.plot(layers, each.angles_L, color=colour, marker="o", label=name)
        left.plot(layers, untrained[name].distances_L, color=colour, lw=1, linestyle=":")
        right.plot(layers, untrained[name].angles_L, color=colour, lw=1, linestyle=":")
    left.set(title="L2 distance", xlabel="layer", ylim=(0, None))
    right.set(title="Angle (degrees)", xlabel="layer", ylim=(0, None))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    right.legend(frameon=False)
    title = "Between the input and the output of each layer (dotted: untrained)"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    figure.tight_layout()
