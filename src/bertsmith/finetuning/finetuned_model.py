"""Results of a fine-tuning run: a model folder that any tool can open, with plots, errors and a card."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, atomic_path, write_text
from bertsmith.core.wording import counted
from bertsmith.features.bilstm import BiLstmScorer
from bertsmith.finetuning.assignment import Assignment, recipe_toml
from bertsmith.finetuning.evaluation import Evaluation, class_scores, simple_baseline
from bertsmith.finetuning.finetuning_setup import Run, lora_shape
from bertsmith.finetuning.run_plots import (
    LearningCurve,
    draw_calibration,
    draw_confusion,
    draw_learning_curve,
)
from bertsmith.finetuning.splits import EncodedSplit
from bertsmith.finetuning.suited_settings import DEFAULTS_FILE
from bertsmith.inference.adapter_folder import ADAPTER_FILES, base_name, write_adapter
from bertsmith.inference.finetuned_folder import FinetunedTask, write_finetuned
from bertsmith.inference.model_path import model_folder
from bertsmith.inference.task_model import TaskModel
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.folder.tensor_files import SAVED_WEIGHT_FILES
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.tasks.metrics import reliability
from bertsmith.tasks.predictions import PredictedSplit, errors_table, hardest_errors
from bertsmith.tasks.published_scores import published_lines
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.training.curves import CURVES_FILE
from bertsmith.training.journal import read_metrics, write_versions
from bertsmith.training.run_folder import RunFolder, card_text, facts_block, table_block, usage_block

LINEAR_PROBE = "linear probe"


@dataclass(frozen=True, slots=True)
class Finished:
    """A run with completed training and its evaluation."""

    run: Run
    model: TaskModel
    """Model with the config that it predicts with."""
    notes: tuple[str, ...]
    found: Evaluation
    steps: int
    seconds: float
    baselines: Mapping[str, Mapping[str, float]]
    """Metrics of the constant answer on each split."""
    references: Mapping[str, Mapping[str, Mapping[str, float]]]
    """Metrics of simpler models by name and split."""

    @property
    def assignment(self) -> Assignment:
        """Return the assignment of the run."""
        return self.run.assignment

    @property
    def splits(self) -> Mapping[str, EncodedSplit]:
        """Return the splits that the model was evaluated on."""
        return self.run.evaluation_splits

    @property
    def epochs(self) -> float:
        """Return the number of epochs that the steps correspond to."""
        return min(self.run.recipe.run.epochs, round(self.steps / self.run.batches.steps_per_epoch, 2))

    @property
    def config(self) -> TaskConfig:
        """Return the config that the model predicts with."""
        return self.found.config

    @property
    def layer_weights(self) -> dict[str, float]:
        """Return the learned weights of a weighted sum of layers; empty for other models."""
        scorer = self.model.scorer
        return scorer.layer_weights() if isinstance(scorer, BiLstmScorer) else {}


def references_of(
    run: Run, found: Evaluation, *, best_step: int
) -> tuple[dict[str, dict[str, dict[str, float]]], list[str]]:
    """Return the metrics of simpler models by name and split, and notes about them for the user."""
    references: dict[str, dict[str, dict[str, float]]] = {}
    notes: list[str] = []
    metrics, simple = found.config.metrics, found.config.kind.simple_model
    lines = [line for line in read_metrics(run.folder.path) if line["kind"] == "held-out"]
    if run.solved and run.tunes and lines and lines[0]["step"] == 0:
        of_probe = {name: lines[0][name] for name in metrics if name in lines[0]}
        references[LINEAR_PROBE] = {next(iter(found.metrics)): of_probe}
        if best_step == 0:
            notes.append(
                "tuning did not improve on the linear probe, so its weights were kept; `quick` stops there"
            )
    if simple and run.assignment.task.own:
        try:
            references[simple] = simple_baseline(found.config, run.train, run.evaluation_splits)
        except UserError as error:
            notes.append(f"{simple}: {error.line()}")
    return references, notes


def write_results(folder: RunFolder, finished: Finished) -> dict[str, Any]:
    """Write the model folder, plots, error tables and card; return the facts for the result file."""
    write_versions(folder.path)
    write_text(folder.path / "recipe.toml", recipe_toml(finished.assignment.recipe))
    _draw_curve(folder, finished)
    card = model_card(finished, picture=(folder.path / CURVES_FILE).exists())
    write_text(folder.path / "card.md", card)
    _write_model_folder(folder, finished, card)
    folder.write_manifest()
    for name, split in finished.splits.items():
        _write_split(folder, finished, name, split)
    for name, split in islice(finished.splits.items(), 1):
        _write_judged(folder.path / f"predictions-{name}.npz", finished, name, split)
    return {
        "task": finished.config.task,
        "metrics": finished.found.metrics,
        "examples": finished.run.examples,
        "baselines": finished.baselines,
        "references": finished.references,
        "layer_weights": finished.layer_weights,
        "classes": {
            split: {label: asdict(scores) for label, scores in of_split.items()}
            for split, of_split in class_scores(finished.found, finished.splits).items()
        },
    }


def _draw_curve(folder: RunFolder, finished: Finished) -> None:
    metric = finished.config.deciding_metric
    baseline = finished.baselines.get(next(iter(finished.splits), ""), {}).get(metric.name)
    draw_learning_curve(folder.path / CURVES_FILE, LearningCurve(read_metrics(folder.path), metric, baseline))


def _write_model_folder(folder: RunFolder, finished: Finished, card: str) -> None:
    scorer = finished.model.scorer
    mix = scorer.own_state()
    with atomic_folder(folder.model, replaces=(*SAVED_WEIGHT_FILES, *ADAPTER_FILES)) as fresh:
        if finished.config.head.encoder == "lora":
            base = base_name(finished.assignment.model)
            shape = lora_shape(finished.assignment.recipe.lora)
            write_adapter(fresh, scorer.network, finished.config.head_name, shape=shape, base=base)
        else:
            # Under a BiLSTM the network lacks a head, so there are no outputs to name.
            keys = {} if mix else finished.config.kind.config_keys(finished.config.labels)
            write_model(fresh, Model(scorer.network, keys))
            defaults = model_folder(finished.assignment.model) / DEFAULTS_FILE
            if defaults.is_file():  # they suit further fine-tuning of this model as well
                shutil.copy(defaults, fresh / DEFAULTS_FILE)
        write_finetuned(fresh, FinetunedTask(finished.config, mix))
        finished.model.tokenizer.save(fresh)
        write_text(fresh / "recipe.toml", recipe_toml(finished.assignment.recipe))
        write_text(fresh / "card.md", card)
        if (folder.path / CURVES_FILE).exists():  # the card shows it
            shutil.copy(folder.path / CURVES_FILE, fresh / CURVES_FILE)


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


def _write_judged(file: Path, finished: Finished, name: str, split: EncodedSplit) -> None:
    """Write what the metrics of the deciding split were computed from, for intervals between runs."""
    predicted = PredictedSplit(split.examples, split.encoded, finished.found.predictions[name])
    arrays: dict[str, Any] = finished.config.kind.judged(predicted)
    with atomic_path(file) as temporary, temporary.open("wb") as handle:
        np.savez_compressed(handle, **arrays)


def model_card(finished: Finished, *, picture: bool) -> str:
    """Return the model card as Markdown: description, training, results and usage."""
    config, recipe = finished.config, finished.assignment.recipe
    run, optim = recipe.run, recipe.optim
    introduction = (
        f"{finished.assignment.model.name} fine-tuned for {config.task} ({config.kind.name}) with bertsmith."
    )
    steps, rates = "", ""
    if finished.steps:
        taken = f"{counted(finished.epochs, 'epoch')}, {counted(finished.steps, 'step')}"
        steps = f"{taken} of {run.examples} examples, "
        rates = (
            f"peak learning rate {optim.peak_lr:g}, {optim.schedule} schedule, "
            f"warm-up {optim.warmup_fraction:.0%}, "
        )
    facts = [
        f"{counted(finished.run.examples, 'training example')}, {steps}"
        f"{finished.seconds / 60:.1f} minutes, seed {run.seed}.",
        f"{rates}encoder {recipe.head.encoder}{' under a BiLSTM' if config.head.has_bilstm else ''}, "
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
        (
            split,
            name.replace("_", " "),
            _shown(name, value),
            _shown(name, finished.baselines.get(split, {}).get(name)),
            *(_shown(name, each.get(split, {}).get(name)) for each in finished.references.values()),
        )
        for split, metrics in finished.found.metrics.items()
        for name, value in metrics.items()
    ]
    table = table_block(("split", "metric", "value", "constant answer", *finished.references), results)
    published = [line for split in finished.found.metrics for line in published_lines(config.task, split)]
    blocks = [facts_block(facts), table, *([facts_block(published)] if published else [])]
    blocks += [usage_block(_usage(finished)), *([[f"![Learning curve]({CURVES_FILE})"]] if picture else [])]
    caveat = "The labels are the data's, mistakes and prejudices included."
    header = {
        "library_name": "bertsmith",
        "pipeline_tag": config.kind.pipeline_tag,
        "base_model": finished.assignment.model.name,
        "tags": ["bertsmith", config.task],
    }
    return card_text(config.task, introduction, blocks, caveat=caveat, header=header)


def weights_text(weights: Mapping[str, float]) -> str:
    """Format the learned weights of layers."""
    return ", ".join(f"{name} {value:.3f}" for name, value in weights.items())


def _usage(finished: Finished) -> str:
    """Return example code that predicts with the model, by its kind."""
    text = '("The first text.", "The second one.")' if finished.config.pairs else '"A text of your own."'
    asked = finished.config.kind.usage.format(text=text)
    # A placeholder: the folder that contains this card may be moved.
    return f'import bertsmith\n\nbert = bertsmith.load("path/to/this/folder")\nprint({asked})'


def _shown(name: str, value: float | None) -> str:
    """Format a metric's value as in the terminal; empty if it is None."""
    return "" if value is None else metric_named(name).text(value)
