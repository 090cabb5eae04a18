"""A fine-tuned model, or several together, asked about a file: what they say, and how right they are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bertsmith.finetuning.examining import with_threshold
from bertsmith.finetuning.folder import ASSIGNMENT, TuningFolder
from bertsmith.finetuning.material import (
    names_file,
    on_strange_labels,
    split_named,
    without_strange_labels,
)
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json, write_text
from bertsmith.inference.task_model import TaskModel, open_task_model
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import CustomSpec, custom_task
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding_cache import encoding_key
from bertsmith.tasks.examples import ChoiceExample, Example, TaggedExample
from bertsmith.tasks.judging import judged
from bertsmith.tasks.outcome import Outcome, average, guesses_of, outcome_of, tags_of
from bertsmith.tasks.prediction_files import write_answers, write_choices, write_tags
from bertsmith.tasks.reading import ReadSplit, has_split, read_for_prediction, read_split
from bertsmith.tasks.submissions import submission_file, write_submission
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_file import TaskNote

NEEDS_ONE_VOCABULARY = ("tag", "span")
"""Kinds whose scores belong to tokens, so that an ensemble's members must cut texts alike."""
FURTHER_EXAMS = {"mnli": ("diagnostic",)}
"""Tasks without training data, and what a model must have been trained for to be asked."""
MOST_RUNS = 6
ONLY_HELD_BACK = "the model was trained from this file: only the part that was held back is judged"
TRAINED_ON = "the model was trained on these very examples: this says nothing of new ones"


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
    path: Path
    """The file that was read; the folder where several files make the split."""
    remarks: tuple[str, ...] = ()
    """What the user should know of how it is judged."""

    def measures(self) -> dict[str, float]:
        """How right it is."""
        return judged(self.note, self.examples, self.encoded, self.outcome)


def task_of(note: TaskNote) -> Task:
    """The task that a model was fine-tuned for."""
    if note.custom:
        # The development file of the run is not the one of the data that are asked about.
        return custom_task(CustomSpec(**{**note.custom, "dev": ""}))  # type: ignore[arg-type]
    return task_named(note.task)


def ask(
    folders: Sequence[Path], data: Path, *, split: str = "", skip_bad: bool = False, device: str = "auto"
) -> Said:
    """What the models of these folders say of a file, or of a split of a data folder, the members' mean.

    It is there to be judged by the labels of the file: of the file that the first model was trained from,
    only the part that was held back is taken.
    """
    members = _Members.open(folders, device=device)
    task, chosen = _asked_for(members.note, data, split)
    remarks = []
    if not split and _is_own_file(folders[0], task, data):
        held = chosen != "train" and has_split(task, data, "dev") and bool(task.custom.get("dev_share"))
        chosen = "dev" if held else chosen
        remarks.append(f"{data}: {ONLY_HELD_BACK if held else TRAINED_ON}")
    read = read_split(task, data, chosen, skip_bad=skip_bad)
    if skip_bad:
        read = _without_strange_labels(read, members.note.labels)
    if remark := on_strange_labels(read.examples, members.note.labels):
        remarks.append(remark)
    return replace(members.said(task, chosen, read), remarks=tuple(remarks))


def foretell(
    folders: Sequence[Path], data: Path, *, split: str = "", skip_bad: bool = False, device: str = "auto"
) -> Said:
    """As `ask`, for predictions of all examples, whatever their labels are."""
    members = _Members.open(folders, device=device)
    task, chosen = _asked_for(members.note, data, split)
    return members.said(task, chosen, read_for_prediction(task, data, chosen, skip_bad=skip_bad))


@dataclass(frozen=True, slots=True)
class _Members:
    """Models that are asked together."""

    folders: Sequence[Path]
    models: Sequence[TaskModel]

    @classmethod
    def open(cls, folders: Sequence[Path], *, device: str) -> "_Members":
        for folder in folders:
            _refuse_unfinished(folder)
        return cls(folders, [open_task_model(folder, device=device) for folder in folders])

    @property
    def note(self) -> TaskNote:
        return self.models[0].note

    def said(self, task: Task, split: str, read: ReadSplit) -> Said:
        """What they say of these examples."""
        examples = read.examples
        _refuse_strangers(self.folders, self.models, examples)
        note = _common_note(self.models).model_copy(update={"metrics": task.metrics})
        encoded = self.models[0].encode(examples)
        outcomes = [self.models[0].outcome(examples, encoded)]
        outcomes += [model.outcome(examples, model.encode(examples)) for model in self.models[1:]]
        outcome = _together(note, examples, encoded, outcomes)
        return Said(note, task, split, examples, encoded, outcome, len(read.skipped), read.path)


def _refuse_unfinished(folder: Path) -> None:
    """Stop where there is no model yet, or where the folder holds several runs."""
    if (folder / "config.json").exists() or (TuningFolder(folder).model / "config.json").exists():
        return
    if (folder / ASSIGNMENT).is_file():
        remedy = "give its `bertsmith finetune` command again, and it goes on"
        raise UserError("this run is not finished: it has no model yet", where=str(folder), remedy=remedy)
    found = [file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{ASSIGNMENT}")]
    if runs := sorted(str(file.parent.relative_to(folder)) for file in found):
        more = ", ..." if len(runs) > MOST_RUNS else ""
        remedy = f"name one of {', '.join(runs[:MOST_RUNS])}{more}"
        raise UserError("holds several runs", where=str(folder), remedy=remedy)


def _is_own_file(folder: Path, task: Task, data: Path) -> bool:
    """Whether a model was trained from this file."""
    places = [place / ASSIGNMENT for place in (folder, folder.resolve().parent)]
    known = next((place for place in places if place.is_file()), None)
    if known is None or not data.is_file():
        return False
    trained = Path(str(read_json(known, remedy="mend or remove it").get("data", "")))
    file = data.resolve()
    return file == trained or (file.parent == trained and names_file(task, "train", file))


def _without_strange_labels(read: ReadSplit, labels: tuple[str, ...]) -> ReadSplit:
    kept, strange = without_strange_labels(read.examples, labels)
    if not kept:
        remedy = "leave --skip-bad out, then they count as wrong"
        raise UserError("has no label that the model knows", where=str(read.path), remedy=remedy)
    return replace(read, examples=tuple(kept), skipped=(*read.skipped, *strange))


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
        shares = [each.tolist() for each in np.split(said.outcome.scores, said.encoded.items_M1[1:-1])]
        write_choices(out, examples, guesses=[int(guess) for guess in guesses], shares=shares)
    else:
        write_text(out, _table(said))
    return [out]


def write_official(folder: Path, said: Said) -> Path:
    """Write the TSV that the GLUE site takes."""
    submission_file(said.task, said.split)  # it takes no other tasks, and they have other predictions
    keys = [example.key for example in said.examples]
    predictions = dict(zip(keys, predictions_of(said), strict=True))
    return write_submission(folder, said.task, split=said.split, predictions=predictions)


def predictions_of(said: Said) -> list[str | float]:
    """The label, the labels or the number of each text."""
    if said.note.kind == "regress":
        return [float(score) for score in said.outcome.scores]
    return [_label(said.note, guess) for guess in guesses_of(said.note, said.encoded, said.outcome)]


def _label(note: TaskNote, guess: Any) -> str:
    if note.kind == "multilabel":
        separator = str(note.custom.get("separator", ","))
        return separator.join(label for label, hit in zip(note.labels, guess, strict=True) if hit)
    return note.labels[int(guess)]


def _table(said: Said) -> str:
    """A line for each text: its id, the prediction, and the probability of each class."""
    rows: list[list[Any]] = [["id", "prediction", *said.note.labels]]
    for number, prediction in enumerate(predictions_of(said)):
        shares = said.outcome.scores[number] if said.note.labels else ()
        rows.append([said.examples[number].key, prediction, *(f"{share:.6f}" for share in shares)])
    return "".join("\t".join(_cell(cell) for cell in row) + "\n" for row in rows)


def _cell(content: object) -> str:
    return " ".join(re.split(r"[\t\r\n]", str(content)))


def _asked_for(note: TaskNote, data: Path, split: str) -> tuple[Task, str]:
    """The task whose file this is, and the split: the development set of a folder, or what a name says.

    Any other file is one to predict, whose labels are read where it has some.
    """
    own = task_of(note)
    tasks = [own, *(task_named(name) for name in FURTHER_EXAMS.get(note.task, ()))]
    for task in tasks:
        if data.is_dir():
            for name in (split,) if split else ("dev", "test"):
                if has_split(task, data, name):
                    return task, name
        elif not split and (named := split_named(task, data)):
            return task, named
    return own, split or ("test" if "test" in own.splits else "dev")


def _refuse_strangers(
    folders: Sequence[Path], models: Sequence[TaskModel], examples: Sequence[Example]
) -> None:
    """Stop where the members of an ensemble do not answer the same question."""
    first = models[0]
    for folder, model in zip(folders, models, strict=True):
        if _question(model.note) != _question(first.note):
            what = f"was not fine-tuned for the same task and labels as {folders[0]}"
            raise UserError(what, where=str(folder), remedy="leave it out of the ensemble")
        if first.note.kind in NEEDS_ONE_VOCABULARY and _key(model, examples) != _key(first, examples):
            what = f"cuts texts otherwise than {folders[0]}"
            remedy = "put models with one vocabulary and the same text settings together"
            raise UserError(what, where=str(folder), remedy=remedy)


def _question(note: TaskNote) -> tuple[object, ...]:
    answers = note.answers
    span = (answers.best, answers.longest, answers.null_threshold == "off") if note.kind == "span" else ()
    return note.kind, note.labels, note.pairs, span


def _common_note(models: Sequence[TaskModel]) -> TaskNote:
    """The note of members who answer the same question, with the mean of their null thresholds."""
    note = models[0].note
    thresholds = [model.note.answers.null_threshold for model in models]
    numbers = [threshold for threshold in thresholds if isinstance(threshold, float)]
    return with_threshold(note, fmean(numbers)) if note.kind == "span" and numbers else note


def _key(model: TaskModel, examples: Sequence[Example]) -> str:
    return encoding_key(model.note.kind, examples[:1], model.note.labels, model.tokenizer, model.note.text)


def _together(
    note: TaskNote, examples: Sequence[Example], encoded: EncodedSet, outcomes: Sequence[Outcome]
) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]
    scores = average(outcomes)
    return outcome_of(note, examples, encoded, scores) if note.kind == "span" else Outcome(scores)
