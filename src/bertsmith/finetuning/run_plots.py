"""Plots of a fine-tuning run: learning curve, confusion matrix and calibration."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import atomic_path
from bertsmith.tasks.metrics import Metric, Reliability
from bertsmith.training.curves import GREY, HELD_OUT, Panel, draw_panel, dress_axes, run_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CLASSES = 40
"""Maximum number of classes in a confusion matrix: a larger one is not readable."""
CLASSES_WITH_COUNTS = 15
log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Data of a learning curve."""

    lines: Sequence[Mapping[str, Any]]
    """Lines of the run's journal."""
    metric: Metric
    """The deciding metric, on the development set."""
    baseline: float | None
    """The constant answer's value of that metric."""


def draw_learning_curve(path: Path, curve: LearningCurve) -> None:
    """Plot the training loss, and to its right the deciding metric on the development set."""
    figure = _figure((12, 4.6))
    if figure is None:
        log.warning("plots are not drawn: pip install bertsmith[plots]")
        return
    entries = [line for line in curve.lines if line["kind"] != "event"]
    last_step = max((line["step"] for line in entries), default=0)
    for axes, panel in zip(figure.subplots(1, 2), _panels(curve), strict=True):
        axes.set_xlim(0, max(1, 1.02 * last_step))
        dress_axes(axes, panel)
        draw_panel(axes, panel, entries)
    if entries:
        title = run_title(path.parent.resolve().name, entries)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, weight="bold", parse_math=False)
    _save(figure, path)


def _panels(curve: LearningCurve) -> tuple[Panel, Panel]:
    metric, baseline = curve.metric, curve.baseline
    scale, last = ("{x:.0%}", "{x:.2%}") if metric.in_percent else ("{x:g}", "{x:.4g}")
    level = "" if baseline is None else f"constant answer, {last.format(x=baseline)}"
    return (
        Panel("Loss", "loss", "{x:g}", "{x:.3f}"),
        Panel(f"Development set: {metric.label}", metric.name, scale, last, baseline, level),
    )


def draw_confusion(
    path: Path, targets: NDArray[np.int64], predictions: NDArray[np.int64], labels: Sequence[str]
) -> None:
    """Plot the confusion matrix, unless it has too many classes."""
    if len(labels) > MAX_CLASSES:
        return
    figure = _figure((1.9 + 0.45 * max(6, len(labels)), 1.6 + 0.4 * max(6, len(labels))))
    if figure is None:
        return
    counts = np.zeros((len(labels), len(labels)), np.int64)
    known = targets >= 0  # labels that do not occur in training do not have a row
    np.add.at(counts, (targets[known], predictions[known]), 1)
    fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes = figure.subplots()
    shades = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="guessed", ylabel="right")
    axes.set_title("Confusion matrix", loc="left", fontsize=11, weight="bold")
    legend = figure.colorbar(shades, ax=axes, format="{x:.0%}", shrink=0.8)
    legend.set_label("shade: fraction of the row", fontsize=8)
    if len(labels) <= CLASSES_WITH_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=colour, fontsize=8)
    _save(figure, path)


def draw_calibration(path: Path, reliability: Reliability) -> None:
    """Plot the accuracy at each level of confidence (reliability diagram) and the number of examples."""
    figure = _figure((5.4, 6.4))
    if figure is None:
        return
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="confidence = accuracy")
    filled = reliability.counts_B > 0
    axes.plot(
        reliability.confidences_B[filled],
        reliability.accuracies_B[filled],
        color=HELD_OUT,
        marker="o",
        label=f"the model; expected error {reliability.expected_error:.1%}",
    )
    axes.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title("Calibration", loc="left", fontsize=11, weight="bold")
    axes.legend(frameon=False)
    widths_B = np.diff(reliability.edges_B1)
    bars = below.bar(reliability.edges_B1[:-1], reliability.counts_B, widths_B, align="edge", color=HELD_OUT)
    written = [f"{count:,}" if count else "" for count in reliability.counts_B.tolist()]
    below.bar_label(bars, written, fontsize=7)
    below.set(xlabel="confidence", ylabel="examples")
    below.margins(y=0.2)
    for each in (axes, below):
        each.spines[["top", "right"]].set_visible(False)
        each.grid(color="#e8e8e8", linewidth=0.8)
        each.set_axisbelow(True)
        each.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    _save(figure, path)


def _figure(size: tuple[float, float]) -> "Figure | None":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None  # `draw_learning_curve`, which every run calls, warns of it
    return Figure(figsize=size, layout="constrained")


def _save(figure: "Figure", path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
