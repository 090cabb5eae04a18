"""Pictures that several studies draw: a grid of heat maps with a cell for each head.

Shapes: L layers, H heads.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bertsmith.insight.surface import PerHead

BLUE, RED, GREY, GREEN = "#3b6fb6", "#d1495b", "#666666", "#2a9d8f"
COLOURS = "Blues"


def draw_head_grids(
    figure: "Figure", grids: "Mapping[str, PerHead]", *, title: str, columns: int = 4
) -> None:
    """Draw a heat map with a row for each layer and a column for each head, for each of several measures."""
    rows = -(-len(grids) // columns)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    layers, heads = next(iter(grids.values())).shape
    for place, (name, values_LH) in zip(axes, grids.items(), strict=False):
        top = max(float(np.nanmax(values_LH)), 1e-9)
        place.imshow(values_LH, cmap=COLOURS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        # One scale for each map, said in its title: a colour bar for each takes seconds to lay out.
        place.set_title(f"{name}  (0 to {top:.3g})", fontsize=9)
        place.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=7)
        place.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=7)
    for place in axes[len(grids) :]:
        place.set_axis_off()
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.08, top=0.9, wspace=0.08, hspace=0.3)
    figure.supxlabel("head", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", parse_math=False)
