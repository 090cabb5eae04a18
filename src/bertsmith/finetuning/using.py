"""A fine-tuned model, or several together, asked about a file: what they say, and how right they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import write_json, write_text
from bertsmith.inference.task_model import TaskModel, open_task_model
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding_cache import encoding_key
from bertsmith.tasks.examples import ChoiceExample, Example, TaggedExample
from bertsmith.tasks.judging import judged
from bertsmith.tasks.outcome import Outcome, average, guesses_of, outcome_of, tags_of
from bertsmith.tasks.prediction_files import write_answers, write_choices, write_tags
from bertsmith.tasks.reading import has_split, read_split
from bertsmith.tasks.submissions import write_submission
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_file import TaskNote

NEEDS_ONE_VOCABULARY = ("tag", "span")
"""Kinds whose scores belong to tokens, so that an ensemble's members must cut texts alike."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one model, or several together, say of a file."""

    note: TaskNote
    task: Task
    split: str
    examples: Sequence[Example]
    encoded: EncodedSet
    outcome: Outcome
    skipped: int

    def measures(self) -> dict[str, float]:
        """How right it is."""
        return judged(self.note, self.examples, self.encoded, self.outcome)


def task_of(note: TaskNote) -> Task:
    """The task that a model was fine-tuned for."""
    if note.custom:
        return custom_task(CustomSpec(**note.custom))  # type: ignore[arg-type]
    return task_named(note.task)


def ask(
    folders: Sequence[Path], data: Path, *, split: str = "", skip_bad: bool = False, device: str = "auto"
) -> Said:
    """What the models of these folders say of a file, or of a split of a data folder, the members' mean."""
    models = [open_task_model(folder, device=device) for folder in folders]
    note = models[0].note
    task = task_of(note)
    chosen = split or _likeliest_split(task, data)
    read = read_split(task, data, chosen, skip_bad=skip_bad)
    encoded = models[0].encode(read.examples)
    _refuse_strangers(folders, models, read.examples)
    outcomes = [models[0].outcome(read.examples, encoded)]
    for model in models[1:]:
        own = model.encode(read.examples)
        outcomes.append(model.outcome(read.examples, own))
    outcome = _together(note, read.examples, encoded, outcomes)
    return Said(note, task, chosen, read.examples, encoded, outcome, len(read.skipped))


def write_predictions(out: Path, said: Said) -> list[Path]:
    """Write what was said in the form that the kind's tools read; the files written."""
    if said.note.kind == "span":
        return list(write_answers(out, said.outcome.answers))
    guesses = guesses_of(said.note, said.encoded, said.outcome)
    if said.note.kind == "tag":
        sentences = [each for each in said.examples if isinstance(each, TaggedExample)]
        tags = tags_of(said.note, len(sentences), said.encoded, guesses.astype(int))
        write_tags(out, sentences, guesses=tags)
    elif said.note.kind == "choice":
        examples = [each for each in said.examples if isinstance(each, ChoiceExample)]
        write_choices(out, examples, guesses=[int(guess) for guess in guesses])
    else:
        write_text(out, _table(said))
    return [out]


def write_official(folder: Path, said: Said) -> Path:
    """Write the TSV that the GLUE site takes."""
    predictions = {row["id"]: row["prediction"] for row in rows_of(said)}
    return write_submission(folder, said.task, split=said.split, predictions=predictions)


def rows_of(said: Said) -> list[dict[str, Any]]:
    """For each text its id, the prediction, and the probability of each class."""
    note, scores = said.note, said.outcome.scores
    guesses = guesses_of(note, said.encoded, said.outcome)
    rows: list[dict[str, Any]] = []
    for number, example in enumerate(said.examples):
        row: dict[str, Any] = {"id": example.key}
        if note.kind == "regress":
            row["prediction"] = float(scores[number])
        else:
            row["prediction"] = _label(note, guesses[number])
            row |= {label: round(float(scores[number, place]), 6) for place, label in enumerate(note.labels)}
        rows.append(row)
    return rows


def write_measures(out: Path, measures: dict[str, float]) -> None:
    """Write the measures as JSON."""
    write_json(out, measures)


def _label(note: TaskNote, guess: Any) -> str:
    if note.kind == "multilabel":
        return ",".join(label for label, hit in zip(note.labels, guess, strict=True) if hit)
    return note.labels[int(guess)]


def _table(said: Said) -> str:
    rows = rows_of(said)
    header = list(rows[0])
    lines = ["\t".join(header)]
    for row in rows:
        lines.append("\t".join(str(row[name]).replace("\t", " ").replace("\n", " ") for name in header))
    return "\n".join(lines) + "\n"


def _likeliest_split(task: Task, data: Path) -> str:
    """The development set of a folder; a file is one to predict, whose labels are read where it has some."""
    if data.is_dir():
        return next((name for name in ("dev", "test") if has_split(task, data, name)), "dev")
    named = [name for name in ("dev", "test", "train") if name in task.splits and name in data.name]
    return named[0] if named else "test" if "test" in task.splits else "dev"


def _refuse_strangers(
    folders: Sequence[Path], models: Sequence[TaskModel], examples: Sequence[Example]
) -> None:
    """Stop where the members of an ensemble do not answer the same question."""
    first = models[0]
    for folder, model in zip(folders, models, strict=True):
        if (model.note.kind, model.note.labels) != (first.note.kind, first.note.labels):
            what = f"was not fine-tuned for the same task and labels as {folders[0]}"
            raise UserError(what, where=str(folder), remedy="leave it out of the ensemble")
        if first.note.kind in NEEDS_ONE_VOCABULARY and _key(model, examples) != _key(first, examples):
            what = f"cuts texts otherwise than {folders[0]}"
            remedy = "put models with one vocabulary and the same text settings together"
            raise UserError(what, where=str(folder), remedy=remedy)


def _key(model: TaskModel, examples: Sequence[Example]) -> str:
    return encoding_key(model.note.kind, examples[:1], model.note.labels, model.tokenizer, model.note.text)


def _together(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcomes: Sequence[Outcome]
) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]
    scores = average(outcomes)
    return outcome_of(note, examples, encoded, scores) if note.kind == "span" else Outcome(scores)
