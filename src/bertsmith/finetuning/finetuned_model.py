"""The end of a fine-tuning run: a model folder that any tool opens, with plots, errors and a card."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.files import atomic_folder, atomic_path, write_json, write_text
from bertsmith.core.wording import counted
from bertsmith.features.bilstm import FeatureScorer
from bertsmith.finetuning.assignment import RESULT, Assignment, recipe_toml
from bertsmith.finetuning.evaluation import Evaluation, class_scores
from bertsmith.finetuning.finetuning_setup import lora_shape
from bertsmith.finetuning.splits import EncodedSplit
from bertsmith.inference.adapter_folder import ADAPTER_FILES, base_name, write_adapter
from bertsmith.inference.finetuned_folder import FinetunedTask, write_finetuned
from bertsmith.inference.task_model import TaskModel, mix_state
from bertsmith.model.model_folder import Model, write_model
from bertsmith.model.tensor_files import SAVED_WEIGHT_FILES
from bertsmith.tasks.metrics import Reliability, reliability
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.tasks.predictions import PredictedSplit, errors_table, hardest_errors
from bertsmith.tasks.published_scores import published_lines
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.training.journal import read_metrics, write_versions
from bertsmith.training.run_folder import RunFolder, card_text, facts_block, table_block

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
MAX_CLASSES = 40
"""A table of more classes than this is not readable any more."""
CLASSES_WITH_COUNTS = 15
TRAINING, EVALUATED, GREY = "#3b6fb6", "#d1495b", "#666666"
log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has come to its end."""

    assignment: Assignment
    model: TaskModel
    notes: tuple[str, ...]
    splits: Mapping[str, EncodedSplit]
    found: Evaluation
    steps: int
    seconds: float
    examples: int
    baselines: Mapping[str, Mapping[str, float]]
    """What the constant answer gets on each split."""
    early_end: dict[str, float] | None = None
    """How a trial was ended that was not worth more time."""

    @property
    def config(self) -> TaskConfig:
        """How the model is to be asked."""
        return self.found.config

    @property
    def layer_weights(self) -> dict[str, float]:
        """What a weighted sum of frozen layers has learned; otherwise empty."""
        scorer = self.model.objective.scorer
        return scorer.layer_weights() if isinstance(scorer, FeatureScorer) else {}


def write_results(folder: RunFolder, finished: Finished) -> None:
    """Write everything that people and tools look at; the result file comes last."""
    write_versions(folder.path)
    write_text(folder.path / "recipe.toml", recipe_toml(finished.assignment.recipe))
    card = model_card(finished)
    write_text(folder.path / "card.md", card)
    _write_model_folder(folder, finished, card)
    for name, split in finished.splits.items():
        _write_split(folder, finished, name, split)
    draw_learning_curve(
        folder.path / "curves.png", read_metrics(folder.path), finished.config.deciding_metric.name
    )
    result = {
        "task": finished.config.task,
        "measures": finished.found.metrics,
        "seconds": round(finished.seconds, 3),
        "steps": finished.steps,
        "examples": finished.examples,
        "baselines": finished.baselines,
        "early_end": finished.early_end,
        "layer_weights": finished.layer_weights,
        "classes": {
            split: {label: asdict(scores) for label, scores in of_split.items()}
            for split, of_split in class_scores(finished.found, finished.splits).items()
        },
    }
    write_json(folder.path / RESULT, result)


def _write_model_folder(folder: RunFolder, finished: Finished, card: str) -> None:
    scorer = finished.model.objective.scorer
    assert isinstance(scorer, NetworkScorer | FeatureScorer)
    mix = mix_state(scorer) if isinstance(scorer, FeatureScorer) else {}
    with atomic_folder(folder.model, replaces=(*SAVED_WEIGHT_FILES, *ADAPTER_FILES)) as fresh:
        if finished.config.head.encoder == "lora":
            base = base_name(finished.assignment.model)
            shape = lora_shape(finished.assignment.recipe.lora)
            write_adapter(fresh, scorer.network, finished.config.head_name, shape=shape, base=base)
        else:
            # Over frozen features the network has no head whose outputs could be named.
            keys = {} if mix else finished.config.kind.config_keys(finished.config.labels)
            write_model(fresh, Model(scorer.network, keys))
        write_finetuned(fresh, FinetunedTask(finished.config, mix))
        finished.model.tokenizer.save(fresh)
        write_text(fresh / "recipe.toml", recipe_toml(finished.assignment.recipe))
        write_text(fresh / "card.md", card)


def _write_split(folder: RunFolder, finished: Finished, name: str, split: EncodedSplit) -> None:
    config, predictions = finished.config, finished.found.predictions[name]
    predicted = PredictedSplit(split.examples, split.encoded, predictions)
    errors = hardest_errors(config.kind.errors(config.labels, predicted))
    write_text(folder.path / f"errors-{name}.md", errors_table(errors))
    targets = split.encoded.targets.astype(int)
    if "confusion" in config.kind.plots:
        likeliest = config.kind.predicted_targets(split.encoded, predictions)
        draw_confusion(folder.path / f"confusion-{name}.png", targets, likeliest, config.labels)
    if "calibration" in config.kind.plots:
        draw_calibration(folder.path / f"calibration-{name}.png", reliability(predictions.scores, targets))


def model_card(finished: Finished) -> str:
    """What the model is, how it came to be and how right it is, as Markdown."""
    config, recipe = finished.config, finished.assignment.recipe
    run, optim = recipe.run, recipe.optim
    introduction = (
        f"{finished.assignment.model.name} fine-tuned for {config.task} ({config.kind.name}) with bertsmith."
    )
    facts = [
        f"{counted(finished.examples, 'training example')}, {counted(run.epochs, 'epoch')}, "
        f"{counted(finished.steps, 'step')} of "
        f"{run.examples} examples, {finished.seconds / 60:.1f} minutes, seed {run.seed}.",
        f"peak learning rate {optim.peak_lr:g}, {optim.schedule} schedule, "
        f"warm-up {optim.warmup_fraction:.0%}, encoder {recipe.head.encoder}, "
        f"longest sequence {recipe.text.longest}.",
        *finished.notes,
    ]
    if finished.layer_weights:
        facts.append(f"Learned weights of the layers: {weights_text(finished.layer_weights)}.")
    if isinstance(config.answers.null_threshold, float):
        facts.append(f"Null threshold {config.answers.null_threshold:.4f}: {config.null_rule}.")
    if isinstance(config.answers.label_thresholds, tuple):
        given = ", ".join(f"{each:.4f}" for each in config.answers.label_thresholds)
        facts.append(f"Thresholds of the labels, tuned on the development set: {given}.")
    results = [
        (split, name.replace("_", " "), f"{value:.4f}", _shown(finished.baselines.get(split, {}).get(name)))
        for split, metrics in finished.found.metrics.items()
        for name, value in metrics.items()
    ]
    table = table_block(("split", "metric", "value", "constant answer"), results)
    published = [line for split in finished.found.metrics for line in published_lines(config.task, split)]
    blocks = [facts_block(facts), table, *([facts_block(published)] if published else [])]
    caveat = "The labels are those of the data, mistakes and prejudices included."
    return card_text(config.task, introduction, blocks, caveat=caveat)


def weights_text(weights: Mapping[str, float]) -> str:
    """The learned weights of layers, for people."""
    return ", ".join(f"{name} {value:.3f}" for name, value in weights.items())


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


# ---- plots


def draw_learning_curve(path: Path, lines: Sequence[Mapping[str, Any]], metric: str) -> None:
    """The training loss, and beside it the deciding metric on the development set."""
    figure = _figure((9, 4))
    if figure is None:
        log.warning("no plots are drawn: pip install bertsmith[plots] to have them")
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
    if len(labels) > MAX_CLASSES:
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
        return None  # what every run has drawn, its learning curve, says so
    return Figure(figsize=size, layout="constrained")


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def _save(figure: "Figure", path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
