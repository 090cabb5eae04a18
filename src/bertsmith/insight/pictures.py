"""Drawing for several analyses: a grid of heat maps with a cell for each head, and names of points.

Shapes: L layers, H heads.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bertsmith.insight.surface import PerHead

BLUE, RED, GREY, GREEN = "#3b6fb6", "#d1495b", "#666666", "#2a9d8f"
COLOURS = "Blues"
POINTS_OF_AN_INCH = 72
MARK, GAP = 4, 7
"""Half the size of a point, and the distance from a point to its name, in points of print."""
ABOVE_GRIDS, BELOW_GRIDS = 0.65, 0.5
"""Inches for the title above grids of heads, and for the axis label below."""
ROWS_AWAY = 24
"""Maximum distance of a name above or below its point, in half lines."""

Box = tuple[float, float, float, float]
"""Left, bottom, right and top of a box, in pixels."""


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
        # Each map's title gives its scale: a colour bar for each map would take seconds to lay out.
        place.set_title(f"{name}  (0 to {top:.3g})", fontsize=9)
        place.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=7)
        place.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)], fontsize=7)
    for place in axes[len(grids) :]:
        place.set_axis_off()
    # Inches, not fractions: a line of print has the same height in every picture.
    height = figure.get_figheight()
    bottom, top = BELOW_GRIDS / height, 1 - ABOVE_GRIDS / height
    figure.subplots_adjust(left=0.05, right=0.99, bottom=bottom, top=top, wspace=0.08, hspace=0.3)
    figure.supxlabel("head", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", parse_math=False)


def name_points(
    axes: "Axes",
    points: Mapping[str, tuple[float, float]],
    *,
    size: float = 8,
    bars: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Write each point's name near it, clear of other names and points, with a thin line to the point.

    `bars` are the ends of vertical bars through points, which names avoid as well. Draw everything else
    before: points move when axes change their limits.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes are made by a figure"
    figure.draw_without_rendering()  # the layout is settled here
    pixel = figure.dpi / POINTS_OF_AN_INCH
    places = {name: axes.transData.transform(point) for name, point in points.items()}
    frame = axes.get_window_extent()
    taken: list[Box] = [_around(x, y, MARK * pixel) for x, y in places.values()]
    for name, ends in (bars or {}).items():
        (x, low), (_, high) = (axes.transData.transform((points[name][0], end)) for end in ends)
        taken.append((x - pixel, low, x + pixel, high))
    for name, (x, y) in sorted(places.items(), key=lambda each: -each[1][1]):
        line = {"arrowstyle": "-", "lw": 0.4, "color": GREY, "shrinkA": 0, "shrinkB": MARK}
        label = axes.annotate(
            *(name, points[name], (0, 0)), textcoords="offset points", fontsize=size, arrowprops=line
        )
        label.set_in_layout(False)
        extent = label.get_window_extent()
        boxes = list(_boxes_beside((x, y), (extent.width, extent.height), gap=GAP * pixel))
        inside = [box for box in boxes if frame.x0 <= box[0] and box[2] <= frame.x1]
        inside = [box for box in inside if frame.y0 <= box[1] and box[3] <= frame.y1] or boxes
        free = (box for box in inside if not any(_overlap(box, other) for other in taken))
        chosen = next(free, inside[0])
        taken.append(chosen)
        label.set_position(((chosen[0] - x) / pixel, (chosen[1] - y) / pixel))


def _around(x: float, y: float, half: float) -> Box:
    return x - half, y - half, x + half, y + half


def _boxes_beside(place: tuple[float, float], size: tuple[float, float], *, gap: float) -> Iterator[Box]:
    """Yield the possible boxes of a name, the nearest first: right and left, then further up and down."""
    (x, y), (width, height) = place, size
    for row in sorted(range(-ROWS_AWAY, ROWS_AWAY + 1), key=lambda row: (abs(row), -row)):
        bottom = y + (row - 1) * height / 2
        for left in (x + gap, x - gap - width):
            yield left, bottom, left + width, bottom + height


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
