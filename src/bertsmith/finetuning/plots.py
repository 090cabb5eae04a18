"""Pictures of a fine-tuned model: how it learned, what it mixes up, how far its certainty can be trusted."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import atomic_path
from bertsmith.tasks.metrics import Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAINING, EVALUATED, GREY = "#3b6fb6", "#d1495b", "#666666"
MOST_CLASSES = 40
"""A table of more classes than this is not readable any more."""
CLASSES_WITH_COUNTS = 15

log = logging.getLogger("bertsmith")


def draw_learning_curve(path: Path, lines: Sequence[Mapping[str, Any]], metric: str) -> None:
    """The training loss, and beside it the deciding metric on the development set."""
    figure = _figure((9, 4))
    if figure is None:
        return
    training = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "held-out" and metric in line]
    left, right = figure.subplots(1, 2)
    left.plot([line["step"] for line in training], [line["loss"] for line in training], color=TRAINING)
    left.set(title="Training loss", xlabel="step")
    steps, values = [line["step"] for line in evaluations], [line[metric] for line in evaluations]
    right.plot(steps, values, color=EVALUATED, marker="o")
    right.set(title=f"Development set: {metric.replace('_', ' ')}", xlabel="step")
    for axes in (left, right):
        _plain(axes)
    _save(figure, path)


def draw_confusion(
    path: Path, targets: NDArray[np.int64], predictions: NDArray[np.int64], labels: Sequence[str]
) -> None:
    """How often each class was taken for each other."""
    if len(labels) > MOST_CLASSES:
        return
    figure = _figure((1.5 + 0.45 * max(6, len(labels)), 1.2 + 0.4 * max(6, len(labels))))
    if figure is None:
        return
    counts = np.zeros((len(labels), len(labels)), np.int64)
    known = targets >= 0  # what training does not have has no row
    np.add.at(counts, (targets[known], predictions[known]), 1)
    fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes = figure.subplots()
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="guessed", ylabel="right", title="What is taken for what")
    if len(labels) <= CLASSES_WITH_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=colour, fontsize=8)
    _save(figure, path)


def draw_calibration(path: Path, reliability: Reliability) -> None:
    """How often the model is right when it is so and so sure."""
    figure = _figure((5, 5))
    if figure is None:
        return
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="as sure as right")
    filled = reliability.counts_B > 0
    axes.plot(
        reliability.confidences_B[filled],
        reliability.accuracies_B[filled],
        color=EVALUATED,
        marker="o",
        label=f"the model; expected error {reliability.expected_error:.1%}",
    )
    axes.set(xlabel="how sure it is", ylabel="how often it is right", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title("Calibration")
    axes.legend(frameon=False)
    _plain(axes)
    _save(figure, path)


def _figure(size: tuple[float, float]) -> "Figure | None":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no plots are drawn: pip install bertsmith[plots] to have them")
        return None
    return Figure(figsize=size, layout="constrained")


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def _save(figure: "Figure", path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
