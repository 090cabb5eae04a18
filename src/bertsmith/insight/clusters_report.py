"""The table and the map of heads with similar attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertsmith.insight.clusters import HeadMap
from bertsmith.insight.pictures import BLUE, GREEN, GREY, RED, name_points
from bertsmith.insight.report import Report, Table, head_name
from bertsmith.insight.report_views import clusters_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR_OF_KIND = {"previous": BLUE, "next": GREEN, "special": RED, "broad": "#e9c46a", "other": GREY}
PAIRS = 8


def clusters_report(
    found: HeadMap, kinds: Sequence[str], untrained: Sequence[HeadMap], *, model: str
) -> Report:
    """Report which heads, and heads of one layer, attend alike, compared with untrained networks."""
    title = f"{model}: heads with similar attention"
    values = {
        "model": model,
        "distances": found.distances_AA,
        "points": found.points_A2,
        "kinds": list(kinds),
        "untrained": [
            dict(zip(("within", "across"), each.within_and_across(), strict=True)) for each in untrained
        ],
    }
    tables = (_layers(title, found, untrained), _nearest(found, kinds))
    view = clusters_view(found, kinds)
    return Report("clusters", tables, values, lambda figure: _draw(figure, title, found, kinds), (8, 7), view)


def _layers(title: str, found: HeadMap, untrained: Sequence[HeadMap]) -> Table:
    within, across = found.within_and_across()
    controls = [each.within_and_across() for each in untrained]
    near = within / across
    as_near = sum(one / other <= near for one, other in controls)
    named = [("trained", (within, across)), *((f"untrained {n}", c) for n, c in enumerate(controls, 1))]
    rows = [(model, one, other, one / other) for model, (one, other) in named]
    notes = (
        "Mean Jensen-Shannon divergence of two heads' attention in nats, over all tokens.",
        f"Heads of one layer {'are' if near < 1 else 'are not'} nearer to each other; "
        f"in {as_near} of {len(controls)} untrained networks they are as near.",
    )
    return Table(title, ("", "one layer", "two layers", "ratio"), rows, notes)


def _nearest(found: HeadMap, kinds: Sequence[str]) -> Table:
    heads = found.shape[1]
    names = [head_name(*divmod(number, heads)) for number in range(len(kinds))]
    first, second = np.triu_indices(len(names), 1)
    order = np.argsort(found.distances_AA[first, second], kind="stable")[:PAIRS]
    rows = [
        (
            f"{names[one]} and {names[other]}",
            f"{kinds[one]}, {kinds[other]}",
            float(found.distances_AA[one, other]),
        )
        for one, other in zip(first[order].tolist(), second[order].tolist(), strict=True)
    ]
    return Table("The most similar heads", ("heads", "kinds", "divergence"), rows)


def _draw(figure: "Figure", title: str, found: HeadMap, kinds: Sequence[str]) -> None:
    axes = figure.subplots()
    for kind, colour in COLOUR_OF_KIND.items():
        chosen = [number for number, name in enumerate(kinds) if name == kind]
        if chosen:
            x_C, y_C = found.points_A2[chosen].T
            axes.scatter(x_C, y_C, color=colour, s=30, label=f"{kind} ({len(chosen)})")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks([])  # only distances mean something
    axes.set_yticks([])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(COLOUR_OF_KIND))
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.06, top=0.93)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", parse_math=False)
    names = [head_name(*divmod(number, found.shape[1])) for number in range(len(kinds))]
    name_points(axes, dict(zip(names, found.points_A2.tolist(), strict=True)), size=7)
