"""The tables and the picture of the surface analysis."""

from collections.abc import Sequence

import numpy as np

from bertsmith.insight.pictures import draw_head_grids
from bertsmith.insight.report import UNTRAINED_TOO, Report, Table, head_name
from bertsmith.insight.report_views import measures_view
from bertsmith.insight.surface import GRADIENTS, MEASURES, SHARES, WITH_MASKED_LM, PerHead, Surface

NO_FRACTIONS = ("entropy", *WITH_MASKED_LM)
BY_LAYER = (*SHARES, "A to B", "B to A", *NO_FRACTIONS)
UNITS = {"entropy": (1, "nats"), "entropy of [CLS]": (1, "nats")}
UNITS |= dict.fromkeys(WITH_MASKED_LM, (1000, "× 10⁻³"))  # small compared with a fraction


def surface_report(surface: Surface, untrained: Sequence[Surface], *, model: str) -> Report:
    """Report the surface measures, compared with untrained networks."""
    known = [name for name in (*MEASURES, *WITH_MASKED_LM) if not np.isnan(surface.measures[name]).all()]
    grids = {name: surface.measures[name] for name in known}
    title = f"{model}: what heads attend to, {surface.texts:,} texts of {surface.tokens:,} tokens"
    values = {
        "model": model,
        "texts": surface.texts,
        "tokens": surface.tokens,
        "measures": grids,
        "untrained": [{name: each.measures[name] for name in known} for each in untrained],
    }
    tables = (_strongest(title, surface, untrained, known), _by_layer(surface, untrained, known))
    height = 2.4 * -(-len(grids) // 4) + 0.6
    lead = (
        "Each square is a head: the fraction of its attention to each target, over all tokens of all texts."
    )
    view = measures_view(grids, [each.measures for each in untrained], lead=lead, units=UNITS)
    return Report(
        "surface",
        tables,
        values,
        lambda figure: draw_head_grids(figure, grids, title=title),
        (13, height),
        view,
    )


def _strongest(title: str, surface: Surface, untrained: Sequence[Surface], known: Sequence[str]) -> Table:
    rows = []
    for name in known:
        values_LH = surface.measures[name]
        layer, head = np.unravel_index(np.nanargmax(values_LH), values_LH.shape)
        control = max(float(np.nanmax(each.measures[name])) for each in untrained)
        best = float(values_LH[layer, head])
        over_half = int((values_LH > 0.5).sum()) if name not in UNITS else None
        marked = UNTRAINED_TOO if control >= best else ""
        where = head_name(int(layer), int(head))
        rows.append((name, where, best, over_half, float(np.nanmean(values_LH)), control, marked))
    columns = ("measure", "largest in", "value", "heads > 0.5", "mean", "untrained", "")
    notes = (
        "Fractions of attention; entropies in nats (of uniform attention: the logarithm of the length).",
        "Gradients: mean absolute change of the masked-LM loss with one attention weight.",
        "Importance: mean absolute change of a text's masked-LM loss with a gate on the head's output.",
        f"untrained: the largest value in {len(untrained)} random initialisations; {UNTRAINED_TOO} if one "
        "of them is as large.",
    )
    return Table(title, columns, rows, notes)


def _by_layer(surface: Surface, untrained: Sequence[Surface], known: Sequence[str]) -> Table:
    names = [name for name in BY_LAYER if name in known]
    rows: list[tuple[str | float, ...]] = []

    def row(what: str, value: dict[str, PerHead], layer: slice) -> None:
        rows.append((what, *(float(np.mean(value[name][layer])) for name in names)))

    layers = len(next(iter(surface.measures.values())))
    for layer in range(layers):
        row(f"layer {layer + 1}", surface.measures, slice(layer, layer + 1))
    means = {name: np.mean([each.measures[name] for each in untrained], axis=0) for name in names}
    row("untrained", means, slice(None))
    # A gradient is small compared with a fraction: times 1000, its digits show.
    shown = [f"1000 x {name}" if name in GRADIENTS else name for name in names]
    scale = [1000.0 if name in GRADIENTS else 1.0 for name in names]
    scaled = [(first, *(float(v) * s for v, s in zip(rest, scale, strict=True))) for first, *rest in rows]
    return Table("Means over the heads of a layer", ("", *shown), scaled)
