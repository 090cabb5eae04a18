"""Pictures of attention and word senses: all heads, arcs over the sentence, flow, and maps of a word.

Shapes: L layers, H heads, N tokens, C cells of a small map, P points.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path
from bertsmith.inference.head_introspection import HeadsOverview, Moment, inspect_heads
from bertsmith.inference.introspection import Senses, inspect_attention, inspect_senses
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextOrPair
from bertsmith.insight.pictures import BLUE, COLOURS, GREY, RED
from bertsmith.insight.report import head_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Weights = NDArray[np.float64]
MOST_TOKENS = 64
"""Maximum number of tokens; with more, arcs and lines between layers are indistinguishable."""
MOST_SENTENCES = 30
FAINTEST = 0.05
"""Minimum weight that is drawn."""
RESOLUTION = 110


def write_attention_picture(out: Path, bert: Bert, text: TextOrPair, *, title: str) -> int:
    """Draw one text's attention as arcs, flow between layers and all heads. Return the number of tokens."""
    overview = inspect_heads(bert, text)
    tokens = len(overview.tokens)
    if tokens > MOST_TOKENS:
        what = f"has {tokens} tokens, but a picture shows at most {MOST_TOKENS}"
        remedy = "shorten it, or write .html"
        raise UserError(what, where="the text", remedy=remedy)
    weights_LHNN = inspect_attention(bert, text).weights.double().numpy()

    def draw(figure: "Figure") -> None:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3, 2))[0]
        above, below = left.subplots(2, 1, height_ratios=(2, 3))
        moment = overview.moment or Moment(0, 0, 0, 0, 0.0)
        draw_arcs(above, overview.tokens, weights_LHNN[moment.layer, moment.head], moment.token)
        above.set_title(f"Head {head_name(moment.layer, moment.head)}", loc="left", fontsize=11)
        draw_flow(below, overview.tokens, weights_LHNN.mean(1))
        below.set_title("From layer to layer, a mean over heads", loc="left", fontsize=11)
        _draw_heads(right.subplots(), overview)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", parse_math=False)

    _write(out, draw, size=(max(12.0, 0.4 * tokens + 6), max(8.0, 0.2 * tokens + 5)))
    return tokens


def draw_arcs(axes: "Axes", tokens: Sequence[str], weights_NN: Weights, chosen: int) -> None:
    """Draw the tokens in a row, and arcs from each to the tokens it reads; red for the chosen token."""
    from matplotlib.patches import Arc

    for source, target in np.argwhere(weights_NN >= FAINTEST).tolist():
        if source == target:
            continue
        weight, width = float(weights_NN[source, target]), abs(target - source)
        lit = source == chosen
        arc = Arc(
            ((source + target) / 2, 0),
            *(width, width),
            theta1=0,
            theta2=180,
            lw=0.5 + 4 * weight,
            color=RED if lit else BLUE,
            alpha=0.3 + 0.7 * weight if lit else 0.5 * weight,
        )
        axes.add_patch(arc)
    axes.set(xlim=(-0.7, len(tokens) - 0.3), ylim=(0, max(1, len(tokens) / 2)), yticks=[])
    axes.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", fontsize=8, parse_math=False)
    axes.get_xticklabels()[chosen].set_color(RED)
    axes.spines[:].set_visible(False)


def draw_flow(axes: "Axes", tokens: Sequence[str], weights_LNN: Weights) -> None:
    """Draw the tokens before and after each layer, and lines to each from the tokens that it reads."""
    from matplotlib.collections import LineCollection

    found_K3 = np.argwhere(weights_LNN >= FAINTEST)
    weights_K = weights_LNN[tuple(found_K3.T)]
    lines = [((layer, target), (layer + 1, source)) for layer, source, target in found_K3.tolist()]
    axes.add_collection(LineCollection(lines, linewidths=3 * weights_K, colors=BLUE, alpha=0.6))
    layers = len(weights_LNN)
    axes.set(xlim=(-0.05, layers + 0.05), ylim=(len(tokens) - 0.5, -0.5))
    axes.set_xticks(range(layers + 1), ["words", *_numbers(layers)], fontsize=8)
    axes.set_yticks(range(len(tokens)), tokens, fontsize=7, parse_math=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _draw_heads(axes: "Axes", overview: HeadsOverview) -> None:
    """Draw a small map of each head, a row for each layer."""
    maps_LHCC = overview.maps.double().sqrt().numpy()  # most weights are small
    layers, heads, cells, _ = maps_LHCC.shape
    room = cells + max(1, cells // 8)
    mosaic = np.full((layers * room, heads * room), np.nan)
    for layer, head in np.ndindex(layers, heads):
        rows, columns = slice(layer * room, layer * room + cells), slice(head * room, head * room + cells)
        mosaic[rows, columns] = maps_LHCC[layer, head]
    axes.imshow(mosaic, cmap=COLOURS, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([head * room + cells / 2 for head in range(heads)], _numbers(heads), fontsize=8)
    axes.set_yticks([layer * room + cells / 2 for layer in range(layers)], _numbers(layers), fontsize=8)
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title("All heads: rows read columns", loc="left", fontsize=11)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(1, count + 1)]


def write_senses_picture(out: Path, bert: Bert, word: str, sentences: Sequence[str], *, title: str) -> int:
    """Draw a word's vectors in the first, middle and last layer. Return the number of sentences with it."""
    found = inspect_senses(bert, word, sentences)
    numbers = sorted({point.sentence for point in found.points})
    if len(numbers) > MOST_SENTENCES:
        what = f"{len(numbers)} sentences have the word, but a picture shows at most {MOST_SENTENCES}"
        raise UserError(what, key="input", remedy="give fewer, or write .html")
    listed = [f"{numbers.index(point.sentence) + 1}" for point in found.points]

    def draw(figure: "Figure") -> None:
        maps, legend = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 0.3 + 0.14 * len(numbers)))[
            :, 0
        ]
        draw_senses(maps, found, listed)
        lines = [f"{place + 1}  {sentences[number]}" for place, number in enumerate(numbers)]
        legend.text(0.02, 0.98, "\n".join(lines), va="top", fontsize=8, parse_math=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", parse_math=False)

    _write(out, draw, size=(12, 5 + 0.2 * len(numbers)))
    return len(numbers)


def draw_senses(figure: "Figure", found: Senses, names: Sequence[str]) -> None:
    """Draw the points of three layers on one scale, so that the points of layer 0 coincide."""
    last = len(found.layers) - 1
    shown = sorted({0, last // 2, last})
    planes = {layer: cast("Weights", found.layers[layer].plane.double().numpy()) for layer in shown}
    half = max(float(np.abs(plane - plane.mean(0)).max()) for plane in planes.values()) * 1.15 or 1.0
    tones = planes[last][:, 0]
    for axes, (layer, plane_P2) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], planes.items(), strict=True
    ):
        (x_P, y_P), (x, y) = plane_P2.T, plane_P2.mean(0)
        axes.scatter(x_P, y_P, c=tones, cmap="coolwarm", s=160, alpha=0.8, edgecolors="white")
        for name, place in zip(names, plane_P2.tolist(), strict=True):
            axes.text(*place, name, ha="center", va="center", fontsize=7)
        axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half), xticks=[], yticks=[], aspect="equal")
        axes.set_title(f"layer {layer}", loc="left", fontsize=11)
        axes.spines[:].set_color(GREY)


def _write(out: Path, draw: "Callable[[Figure], None]", *, size: tuple[float, float]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "pip install bertsmith[plots], or write .html"
        raise UserError("drawing pictures needs matplotlib", remedy=remedy) from error
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    with atomic_path(out) as fresh:
        figure.savefig(fresh, format="png", dpi=RESOLUTION)
