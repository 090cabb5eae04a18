"""The end of a fine-tuning run: a model folder that any tool opens, with pictures, errors and a card."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bertsmith.features.bilstm import FrozenMixScorer
from bertsmith.finetuning.errors import errors_text, hardest_errors
from bertsmith.finetuning.examining import Examination
from bertsmith.finetuning.folder import RESULT, Assignment, TuningFolder, recipe_toml
from bertsmith.finetuning.material import Sheet
from bertsmith.finetuning.pictures import draw_calibration, draw_confusion, draw_learning_curve
from bertsmith.ground.files import atomic_folder, write_json, write_text
from bertsmith.inference.task_model import TaskModel, mix_state
from bertsmith.inference.tuned import Tuned, write_tuned
from bertsmith.model.tensor_files import WEIGHT_FILES
from bertsmith.model.weights import Model, write_model
from bertsmith.tasks.calibration import reliability
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.tasks.outcome import guesses_of
from bertsmith.tasks.task_file import TaskNote
from bertsmith.training.journal import read_metrics, write_versions

PROBLEM_TYPES = {
    "classify": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regress": "regression",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has come to its end."""

    assignment: Assignment
    model: TaskModel
    notes: tuple[str, ...]
    exams: Mapping[str, Sheet]
    found: Examination
    steps: int
    seconds: float
    examples: int

    @property
    def note(self) -> TaskNote:
        """How the model is to be asked."""
        return self.found.note


def write_results(folder: TuningFolder, finished: Finished) -> None:
    """Write everything that people and tools look at; the result file comes last."""
    write_versions(folder.path)
    write_text(folder.path / "recipe.toml", recipe_toml(finished.assignment.recipe))
    card = model_card(finished)
    write_text(folder.path / "card.md", card)
    _write_model_folder(folder, finished, card)
    for name, sheet in finished.exams.items():
        _write_exam(folder, finished, name, sheet)
    draw_learning_curve(folder.path / "curves.png", read_metrics(folder.path), finished.note.metrics[0])
    result = {
        "task": finished.note.task,
        "measures": finished.found.measures,
        "seconds": round(finished.seconds, 3),
        "steps": finished.steps,
        "examples": finished.examples,
    }
    write_json(folder.path / RESULT, result)


def _write_model_folder(folder: TuningFolder, finished: Finished, card: str) -> None:
    scorer = finished.model.objective.scorer
    assert isinstance(scorer, NetworkScorer | FrozenMixScorer)
    mix = mix_state(scorer) if isinstance(scorer, FrozenMixScorer) else {}
    with atomic_folder(folder.model, replaces=WEIGHT_FILES) as fresh:
        # Under a mix the network has no head whose outputs could be named.
        write_model(fresh, Model(scorer.network, {} if mix else _label_keys(finished.note)))
        write_tuned(fresh, Tuned(finished.note, mix))
        finished.model.tokenizer.save(fresh)
        write_text(fresh / "recipe.toml", recipe_toml(finished.assignment.recipe))
        write_text(fresh / "card.md", card)


def _label_keys(note: TaskNote) -> dict[str, Any]:
    """What tells other tools the names of the outputs and the kind of the problem."""
    keys: dict[str, Any] = {}
    labels = note.labels if note.kind in ("classify", "multilabel", "tag") else ()
    if note.kind == "regress":
        labels = ("score",)
    if labels:
        keys["id2label"] = {str(number): label for number, label in enumerate(labels)}
        keys["label2id"] = {label: number for number, label in enumerate(labels)}
    if note.kind in PROBLEM_TYPES:
        keys["problem_type"] = PROBLEM_TYPES[note.kind]
    return keys


def _write_exam(folder: TuningFolder, finished: Finished, name: str, sheet: Sheet) -> None:
    note, encoded, outcome = finished.note, sheet.encoded, finished.found.outcomes[name]
    errors = hardest_errors(note, sheet.examples, encoded, outcome)
    write_text(folder.path / f"errors-{name}.md", errors_text(errors))
    if note.kind in ("classify", "tag"):
        guesses = guesses_of(note, encoded, outcome).astype(int)
        golds = encoded.targets.astype(int)
        draw_confusion(folder.path / f"confusion-{name}.png", golds, guesses, note.labels)
        draw_calibration(folder.path / f"calibration-{name}.png", reliability(outcome.scores, golds))


def model_card(finished: Finished) -> str:
    """What the model is, how it came to be and how right it is, as Markdown."""
    note, recipe = finished.note, finished.assignment.recipe
    run, optim = recipe.run, recipe.optim
    lines = [
        f"# {note.task}",
        "",
        f"{finished.assignment.model.name} fine-tuned for {note.task} ({note.kind}) with bertsmith.",
        "",
        f"- {finished.examples:,} training examples, {run.epochs:g} epochs, {finished.steps:,} steps of "
        f"{run.examples} examples, {finished.seconds / 60:.1f} minutes, seed {run.seed}.",
        f"- peak learning rate {optim.peak_lr:g}, {optim.schedule} schedule, "
        f"warm-up {optim.warmup_share:.0%}, encoder {recipe.head.encoder}, "
        f"longest sequence {recipe.text.longest}.",
        *(f"- {remark}" for remark in finished.notes),
    ]
    if isinstance(note.answers.null_threshold, float):
        lines.append(f"- Null threshold {note.answers.null_threshold:.4f}: {note.null_rule}.")
    lines += ["", "| split | measure | value |", "|---|---|---|"]
    for split, measures in finished.found.measures.items():
        lines += [f"| {split} | {name.replace('_', ' ')} | {value:.4f} |" for name, value in measures.items()]
    return "\n".join([*lines, "", "The labels are those of the data, mistakes and prejudices included.", ""])
