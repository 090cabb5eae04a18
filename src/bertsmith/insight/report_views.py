"""Data of the reports' HTML views: measures of every head, relations and their heads, the map of heads.

Shapes: L layers, H heads, A = L x H heads in the order of the layers, 2 directions, R relations.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertsmith.insight.report import View

if TYPE_CHECKING:
    from bertsmith.insight.clusters import HeadMap
    from bertsmith.insight.relations import HeadRelations
    from bertsmith.insight.surface import PerHead

PERCENT = (100, "%")
"""Factor and unit for showing a fraction."""
EMPTY = 1e-6
"""Top of a scale if all values are 0; large enough that `plain` does not round it to 0."""


def measures_view(
    measures: "Mapping[str, PerHead]",
    untrained: "Sequence[Mapping[str, PerHead]]",
    *,
    lead: str,
    units: Mapping[str, tuple[int, str]] | None = None,
) -> View:
    """Return measures [L, H] of all heads and the untrained maximum, as fractions except those in `units`."""
    shown = [
        {
            "name": name,
            "values": values_LH,
            "untrained": max(float(each[name].max()) for each in untrained),
            "scale": _scale(values_LH, (units or {}).get(name, PERCENT)),
        }
        for name, values_LH in measures.items()
    ]
    return View("measures_view", {"lead": lead, "measures": shown})


def _scale(values_LH: "PerHead", unit: tuple[int, str]) -> dict[str, float | str]:
    return {"factor": unit[0], "unit": unit[1], "top": max(float(values_LH.max()), EMPTY)}


def relations_view(found: "HeadRelations", untrained: "Sequence[HeadRelations]", *, how: str) -> View:
    """Return the scores of layers and heads for each relation."""
    from bertsmith.insight.relations import DIRECTIONS

    relations = [
        {
            "name": score.relation,
            "count": score.count,
            "layer": score.layer,
            "head": score.head,
            "direction": DIRECTIONS.index(score.direction),
            "right": score.accuracy,
            "low": score.low,
            "high": score.high,
            "offset": score.offset,
            "baseline": score.baseline,
            "beats": score.beats,
            "untrained": max(each.scores[at].accuracy for each in untrained),
        }
        for at, score in enumerate(found.scores)
    ]
    data = {
        "lead": how,
        "directions": DIRECTIONS,
        "relations": relations,
        "accuracy": np.round(found.accuracy_L2HR.transpose(3, 1, 0, 2), 4),
    }
    return View("relations_view", data)


def clusters_view(found: "HeadMap", kinds: Sequence[str]) -> View:
    """Return heads as points, with the distances between them."""
    data = {
        "lead": "Heads near each other have similar attention. Choose one to see the nearest heads.",
        "points": np.round(found.points_A2, 4),
        "kinds": list(kinds),
        "heads": found.shape[1],
        "distances": np.round(found.distances_AA, 4),
    }
    return View("clusters_view", data)
