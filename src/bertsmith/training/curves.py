"""Plot of a run's curves, drawn from its journal."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import atomic_path
from bertsmith.core.measures import FIXED_PREFIX, Declaration, Metric
from bertsmith.training.journal import Kind, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "curves.png"
TRAINING, HELD_OUT, FIXED, GREY = "#3b6fb6", "#d1495b", "#2a9d8f", "#666666"
SMOOTHING_SHARE = 0.02
"""Width of the running mean over the training curve, as a fraction of its points."""
LEAST_REACH = 4
"""Minimum points on each side in the running mean, but at most a tenth of the curve: the batches of a short
run are as noisy as a long one's.
"""

Entries = Sequence[Mapping[str, Any]]
Numbers = NDArray[np.float64]
log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps at which it was written."""

    steps: Numbers
    values: Numbers


@dataclass(frozen=True, slots=True)
class Panel:
    """One part of the picture: the curves of a metric."""

    title: str
    metric: str
    scale: str
    """Format of the numbers on the y axis."""
    last: str
    """Format of the last value of a line."""
    level: float | None = None
    """Reference value, drawn as a horizontal line."""
    level_label: str = ""
    level_metric: str = ""
    """Name of the level in the lines of held-out results, if it differs from stage to stage."""


def panels(declared: Declaration, *, unigram_entropy: float | None) -> tuple[Panel, ...]:
    """Return the panels of a run with these metrics, in reading order; the first is the large one."""
    return (
        *(panel_of(each, unigram_entropy) for each in declared.metrics if each.panel),
        Panel("Learning rate", "learning_rate", "{x:.3g}", "{x:.3g}"),
        Panel("Tokens a second", "tokens_per_second", "{x:,.0f}", "{x:,.0f}"),
    )


def panel_of(metric: Metric, unigram_entropy: float | None) -> Panel:
    """Return the panel of one metric."""
    forms = ("{x:.0%}", "{x:.1%}") if metric.in_percent else ("{x:g}", "{x:.3f}")
    if metric.level == "unigram" and unigram_entropy is not None:
        label = f"unigram entropy {unigram_entropy:.2f}: word frequency alone"
        return Panel(metric.panel, metric.name, *forms, unigram_entropy, label)
    # Not compared with one half: published next-sentence pairs are random more often than not.
    label = "always the more frequent answer"
    return Panel(metric.panel, metric.name, *forms, level_label=label, level_metric=metric.level)


def draw_curves(folder: Path, drawn: Sequence[Panel]) -> Path | None:
    """Draw a journal as curves.png; return the path, or None without metrics or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("curves are not drawn: pip install bertsmith[plots]")
        return None
    entries = [entry for entry in read_metrics(folder) if entry["kind"] != "event"]
    if not entries:
        log.warning("%s: curves are not drawn: the log is still empty", folder)
        return None
    figure = Figure(figsize=(15, 8.2), layout="constrained")
    _draw_panels(figure, entries, drawn)
    title = run_title(folder.resolve().name, entries)
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, weight="bold", parse_math=False)
    with atomic_path(folder / CURVES_FILE) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return folder / CURVES_FILE


def series_of(entries: Entries, kind: Kind, metric: str) -> Series:
    """Return a metric's values in the lines of one kind, without NaN."""
    found = [(entry["step"], entry[metric]) for entry in entries
             if entry["kind"] == kind and entry.get(metric) is not None]  # fmt: skip
    pairs = np.array(found, dtype=np.float64).reshape(-1, 2)
    return Series(pairs[:, 0], pairs[:, 1])


def by_stage(entries: Entries) -> list[Entries]:
    """Return the lines of held-out results, grouped by stage."""
    held_out = [entry for entry in entries if entry["kind"] == "held-out"]
    stages = sorted({entry.get("stage", 0) for entry in held_out})
    return [[entry for entry in held_out if entry.get("stage", 0) == stage] for stage in stages]


def smoothed(series: Series) -> Series:
    """Return the running mean of a series; the window is cut off at both ends."""
    count = len(series.values)
    reach = max(round(count * SMOOTHING_SHARE / 2), min(LEAST_REACH, count // 10))
    place = np.arange(count)
    first, past = np.maximum(place - reach, 0), np.minimum(place + reach + 1, count)
    sums = np.concatenate(([0.0], np.cumsum(series.values)))
    return Series(series.steps, (sums[past] - sums[first]) / (past - first))


def _draw_panels(figure: "Figure", entries: Entries, drawn: Sequence[Panel]) -> None:
    last_step = max(entry["step"] for entry in entries)
    below = len(drawn) - 2
    # A number of columns that fits both rows: two thirds and one third above, equal parts below.
    grid = figure.add_gridspec(2, 3 * below, height_ratios=(1.25, 1))
    places = [grid[0, : 2 * below], grid[0, 2 * below :]]
    places += [grid[1, 3 * number : 3 * (number + 1)] for number in range(below)]
    for place, panel in zip(places, drawn, strict=True):
        axes = figure.add_subplot(place)
        axes.set_xlim(0, max(1, last_step))
        dress_axes(axes, panel)
        draw_panel(axes, panel, entries)
    _write_tokens_below_steps(figure.axes[0], series_of(entries, "train", "tokens"))


def dress_axes(axes: "Axes", panel: Panel) -> None:
    """Set title, grid and scales, the same in all pictures of runs."""
    axes.set_title(panel.title, loc="left", fontsize=11, weight="bold", pad=8)
    axes.set_xlabel("step", fontsize=9)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(panel.scale)
    axes.tick_params(labelsize=9)
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_panel(axes: "Axes", panel: Panel, entries: Entries) -> None:
    """Draw the smoothed curves of a metric, each with its last value, and the reference level."""
    training, held_out = (series_of(entries, kind, panel.metric) for kind in ("train", "held-out"))
    if not len(training.steps) + len(held_out.steps):
        axes.text(0.5, 0.5, "not part of this run", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_yticks([])
        return
    if len(training.steps):
        mean = training if panel.metric == "learning_rate" else smoothed(training)
        axes.plot(training.steps, training.values, color=TRAINING, alpha=0.25, linewidth=0.8)
        axes.plot(
            mean.steps, mean.values, color=TRAINING, linewidth=1.8, label=_label("training", mean, panel)
        )
    if len(held_out.steps):
        manner = {"color": HELD_OUT, "linewidth": 1.6, "marker": "o", "ms": 3.5}
        _draw_by_stage(axes, panel.metric, entries, {**manner, "label": _label("held-out", held_out, panel)})
    fixed = series_of(entries, "held-out", FIXED_PREFIX + panel.metric)
    if len(fixed.steps):  # the same sequences in all stages: one line
        label = _label("fixed evaluation", fixed, panel)
        axes.plot(fixed.steps, fixed.values, color=FIXED, linewidth=1.4, marker="s", ms=3, label=label)
    levels = series_of(entries, "held-out", panel.level_metric)
    if len(levels.steps):
        manner = {"color": GREY, "linestyle": ":", "linewidth": 1.8, "marker": "|"}
        _draw_by_stage(
            axes, panel.level_metric, entries, {**manner, "label": _label(panel.level_label, levels, panel)}
        )
    if panel.level is not None:
        axes.axhline(panel.level, color=GREY, linestyle=":", linewidth=1.8, label=panel.level_label)
    if panel.metric in ("learning_rate", "tokens_per_second"):
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, frameon=False)


def _draw_by_stage(axes: "Axes", metric: str, entries: Entries, manner: dict[str, Any]) -> None:
    """Draw a separate line for each stage: stages of other lengths are evaluated on other sequences."""
    for stage in by_stage(entries):
        part = series_of(stage, "held-out", metric)
        axes.plot(part.steps, part.values, **manner)
        manner = {**manner, "label": None}


def _label(what: str, series: Series, panel: Panel) -> str:
    """Return the label of a line, with its last value."""
    return f"{what}, now {panel.last.format(x=series.values[-1])}"


def _write_tokens_below_steps(axes: "Axes", tokens: Series) -> None:
    """Write the tokens seen up to a step under each step of the axis."""
    if not len(tokens.steps):
        return
    steps, seen = np.insert(tokens.steps, 0, 0.0), np.insert(tokens.values, 0, 0.0)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}\n{_short(np.interp(step, steps, seen))}")
    axes.set_xlabel("step, and tokens seen", fontsize=9)


def _short(count: float) -> str:
    """Format a large number with one decimal and a letter."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return f"{count:.0f}"


def run_title(name: str, entries: Entries) -> str:
    """Return the run's name with its step, tokens and time so far."""
    parts = [name, f"step {max(entry['step'] for entry in entries):,}"]
    tokens, seconds = (series_of(entries, "train", metric).values for metric in ("tokens", "seconds"))
    parts += [f"{_short(tokens[-1])} tokens"] if len(tokens) else []
    parts += [str(timedelta(seconds=round(seconds[-1])))] if len(seconds) else []
    return "  ·  ".join(parts)
