"""The end of a fine-tuning run: a model folder that any tool opens, with plots, errors and a card."""

from collections.abc import Mapping
from dataclasses import dataclass

from bertsmith.core.files import atomic_folder, write_json, write_text
from bertsmith.features.bilstm import FrozenMixScorer
from bertsmith.finetuning.assignment import RESULT, Assignment, recipe_toml
from bertsmith.finetuning.evaluation import Evaluation
from bertsmith.finetuning.plots import draw_calibration, draw_confusion, draw_learning_curve
from bertsmith.finetuning.splits import EncodedSplit
from bertsmith.inference.finetuned_folder import FinetunedTask, write_finetuned
from bertsmith.inference.task_model import TaskModel, mix_state
from bertsmith.model.model_folder import Model, write_model
from bertsmith.model.tensor_files import WEIGHT_FILES
from bertsmith.tasks.metrics import reliability
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.tasks.predictions import PredictedSplit, errors_table, hardest_errors
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.training.journal import read_metrics, write_versions
from bertsmith.training.model_card import card_text, facts_block, table_block
from bertsmith.training.run_folder import RunFolder


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

    @property
    def config(self) -> TaskConfig:
        """How the model is to be asked."""
        return self.found.config


def write_results(folder: RunFolder, finished: Finished) -> None:
    """Write everything that people and tools look at; the result file comes last."""
    write_versions(folder.path)
    write_text(folder.path / "recipe.toml", recipe_toml(finished.assignment.recipe))
    card = model_card(finished)
    write_text(folder.path / "card.md", card)
    _write_model_folder(folder, finished, card)
    for name, split in finished.splits.items():
        _write_split(folder, finished, name, split)
    draw_learning_curve(folder.path / "curves.png", read_metrics(folder.path), finished.config.metrics[0])
    result = {
        "task": finished.config.task,
        "measures": finished.found.metrics,
        "seconds": round(finished.seconds, 3),
        "steps": finished.steps,
        "examples": finished.examples,
    }
    write_json(folder.path / RESULT, result)


def _write_model_folder(folder: RunFolder, finished: Finished, card: str) -> None:
    scorer = finished.model.objective.scorer
    assert isinstance(scorer, NetworkScorer | FrozenMixScorer)
    mix = mix_state(scorer) if isinstance(scorer, FrozenMixScorer) else {}
    with atomic_folder(folder.model, replaces=WEIGHT_FILES) as fresh:
        # Under a mix the network has no head whose outputs could be named.
        write_model(
            fresh,
            Model(scorer.network, {} if mix else finished.config.kind.config_keys(finished.config.labels)),
        )
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
        f"{finished.examples:,} training examples, {run.epochs:g} epochs, {finished.steps:,} steps of "
        f"{run.examples} examples, {finished.seconds / 60:.1f} minutes, seed {run.seed}.",
        f"peak learning rate {optim.peak_lr:g}, {optim.schedule} schedule, "
        f"warm-up {optim.warmup_fraction:.0%}, encoder {recipe.head.encoder}, "
        f"longest sequence {recipe.text.longest}.",
        *finished.notes,
    ]
    if isinstance(config.answers.null_threshold, float):
        facts.append(f"Null threshold {config.answers.null_threshold:.4f}: {config.null_rule}.")
    results = [
        (split, name.replace("_", " "), f"{value:.4f}")
        for split, metrics in finished.found.metrics.items()
        for name, value in metrics.items()
    ]
    blocks = [facts_block(facts), table_block(("split", "measure", "value"), results)]
    caveat = "The labels are those of the data, mistakes and prejudices included."
    return card_text(config.task, introduction, blocks, caveat=caveat)
