"""Predict and evaluate a file with a fine-tuned model, or with an ensemble."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict, Unpack

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.finetuning.assignment import ASSIGNMENT, finetuning_folder
from bertsmith.finetuning.evaluation import with_threshold
from bertsmith.finetuning.splits import split_named, warn_of_unknown_labels, without_unknown_labels
from bertsmith.inference.finetuned_folder import read_finetuned
from bertsmith.inference.loaded_model import Precision, load_task_model
from bertsmith.inference.model_path import SPREAD_FILE, is_model, model_folder
from bertsmith.inference.task_model import TaskModel
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import custom_task, spec_of
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding_cache import encoding_key
from bertsmith.tasks.example_types import BadLine, Example, TaggedExample
from bertsmith.tasks.glue_leaderboard import submission_file, write_submission
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.kinds.registry import TEXT_KINDS
from bertsmith.tasks.kinds.text_kind import USUAL_THRESHOLD
from bertsmith.tasks.metrics import ClassScores
from bertsmith.tasks.predictions import PredictedSplit, Predictions, average_scores
from bertsmith.tasks.table_files import TABLE_WRITERS, write_table
from bertsmith.tasks.table_format import TableFormat
from bertsmith.tasks.task import ReadSplit, Task, has_split, names_file, read_for_prediction, read_split
from bertsmith.tasks.task_config import TaskConfig

FURTHER_TASKS = {"mnli": ("diagnostic",)}
"""Tasks without training data, listed under the task that their models are trained for."""
MAX_RUNS = 6
ONLY_HELD_BACK = "the model was trained from this file: only the held-back part is evaluated"
TRAINED_ON = "the model was trained on these very examples: the figures do not generalise to new ones"


@dataclass(frozen=True, slots=True)
class FilePredictions:
    """Predictions of one model, or of an ensemble, for a file."""

    config: TaskConfig
    task: Task
    split: str
    examples: Sequence[Example]
    encoded: EncodedSet
    predictions: Predictions
    skipped: int
    path: Path
    """The file that was read, or the folder if several files make the split."""
    warnings: tuple[str, ...] = ()
    """Messages to the user about the evaluation."""

    @property
    def predicted(self) -> PredictedSplit[Example]:
        """Return the examples with their predictions."""
        return PredictedSplit(self.examples, self.encoded, self.predictions)

    def baseline(self) -> dict[str, float]:
        """Return the metrics of the constant answer."""
        return self.config.kind.baseline(self.config.metrics, self.config.labels, self.examples, self.encoded)

    def class_scores(self) -> dict[str, ClassScores]:
        """Return precision, recall and F1 of each class; empty for tasks without classes."""
        return self.config.kind.class_scores(self.config.labels, self.predicted)

    def metrics(self) -> dict[str, float]:
        """Return the task's metrics of the predictions."""
        return self.config.kind.evaluate(self.config.metrics, self.config.labels, self.predicted)


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings for reading a file."""

    form: TableFormat = TableFormat()
    """Format of the user's own table; given for each file, since two tables may differ."""
    skip_bad: bool = False
    split: str = ""
    """Name of the split to read from a folder, or of the split that a file is; empty: by the file's name."""


USUAL = Reading()


class Opening(TypedDict, total=False):
    """Keyword arguments of `load_task_model`."""

    device: str
    precision: Precision
    base: Path | None
    """Base model of adapters, if it is not the one that they name."""


def task_of(config: TaskConfig, form: TableFormat) -> Task:
    """Return the task that a model was fine-tuned for, with tables in this format."""
    if config.custom:
        # The run's development file has nothing to do with the data to predict.
        return custom_task(replace(spec_of(config.custom), dev=""), form)
    task = task_named(config.task)
    if form != TableFormat():
        where, remedy = "`delimiter`, `encoding`, `columns`", "remove them: they are for your own tables"
        raise UserError(f"{task.title} has files of a known format", where=where, remedy=remedy)
    return task


def task_config_in(folder: Path) -> TaskConfig | None:
    """Read the task config of a model folder without its weights; None if the model is not fine-tuned."""
    finetuned = read_finetuned(model_folder(folder))
    return None if finetuned is None else finetuned.config


def predict_labelled(
    folders: Sequence[Path],
    data: Path,
    *,
    reading: Reading = USUAL,
    **opening: Unpack[Opening],
) -> FilePredictions:
    """Predict a file, or a split of a data folder, for evaluation by its labels; several models are averaged.

    If the first model was trained from this file, only the part that was held back from training is used.
    """
    members = _Members.open(folders, **opening)
    task, chosen = asked_for(members.config, data, reading)
    warnings = []
    if not reading.split and _is_own_file(folders[0], task, data):
        held = (
            chosen != "train"
            and has_split(task, data, "dev")
            and bool(task.custom and spec_of(task.custom).is_parted)
        )
        chosen = "dev" if held else chosen
        warnings.append(f"{data}: {ONLY_HELD_BACK if held else TRAINED_ON}")
    read = read_split(task, data, chosen, skip_bad=reading.skip_bad)
    read = _labelled(task, read, skip_bad=reading.skip_bad)
    if reading.skip_bad:
        kept, strange = without_unknown_labels(read.examples, members.config.labels)
        if not kept:
            remedy = "remove `skip_bad`, so that they count as wrong"
            raise UserError("does not have a label of this model", where=str(read.path), remedy=remedy)
        read = replace(read, examples=tuple(kept), skipped=(*read.skipped, *strange))
    if warning := warn_of_unknown_labels(members.config.kind, read.examples, members.config.labels):
        warnings.append(warning)
    return replace(members.predict(task, chosen, read), warnings=tuple(warnings))


def predict(
    folders: Sequence[Path],
    data: Path,
    *,
    reading: Reading = USUAL,
    **opening: Unpack[Opening],
) -> FilePredictions:
    """Predict all examples of a file or of a split of a data folder, labelled or not."""
    members = _Members.open(folders, **opening)
    task, chosen = asked_for(members.config, data, reading)
    read = read_for_prediction(task, data, chosen, skip_bad=reading.skip_bad)
    _check_words_in_columns(read.examples, members.config.labels)
    return members.predict(task, chosen, read)


@dataclass(frozen=True, slots=True)
class _Members:
    """Models that predict together."""

    folders: Sequence[Path]
    models: Sequence[TaskModel]

    @classmethod
    def open(cls, folders: Sequence[Path], **opening: Unpack[Opening]) -> "_Members":
        # The folder of several runs with a spread file means the best of them.
        folders = [model_folder(each) if (each / SPREAD_FILE).is_file() else each for each in folders]
        for folder in folders:
            _check_finished(folder)
        models = [load_task_model(folder, **opening) for folder in folders]
        return cls(folders, models)

    @property
    def config(self) -> TaskConfig:
        return self.models[0].config

    def predict(self, task: Task, split: str, read: ReadSplit) -> FilePredictions:
        """Predict these examples from the mean of the members' scores."""
        examples = read.examples
        _check_same_question(self.folders, self.models, examples)
        config = self.config.model_copy(update={"metrics": task.metrics_for(self.config.labels)})
        # Each member has its own tuned null threshold; the mean score uses their mean.
        thresholds = [model.config.answers.null_threshold for model in self.models]
        if numbers := [threshold for threshold in thresholds if isinstance(threshold, float)]:
            config = with_threshold(config, fmean(numbers))
        label_thresholds = [model.config.answers.label_thresholds for model in self.models]
        if any(isinstance(each, tuple) for each in label_thresholds):
            # A member without thresholds uses one half.
            usual = (USUAL_THRESHOLD,) * config.kind.threshold_count(config.labels)
            numbers_of = [each if isinstance(each, tuple) else usual for each in label_thresholds]
            mean_thresholds = tuple(map(fmean, zip(*numbers_of, strict=True)))
            answers = config.answers.model_copy(update={"label_thresholds": mean_thresholds})
            config = config.model_copy(update={"answers": answers})
        encoded = self.models[0].encode(examples)
        predictions = self.models[0].predict(examples, encoded)
        if len(self.models) > 1:
            others = [model.predict(examples, model.encode(examples)) for model in self.models[1:]]
            mean = average_scores([predictions, *others])
            predictions = config.kind.predict_together(mean, encoded, examples, config.answers)
        skipped = len(read.skipped)
        return FilePredictions(config, task, split, examples, encoded, predictions, skipped, read.path)


def _check_finished(folder: Path) -> None:
    """Raise if a folder lacks a model, or contains several runs."""
    if is_model(folder) or is_model(finetuning_folder(folder).model):
        return
    if (folder / ASSIGNMENT).is_file():
        remedy = "run its `bertsmith finetune` command again to resume it"
        raise UserError(
            "this run is not finished: it does not have a model yet", where=str(folder), remedy=remedy
        )
    found = [file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{ASSIGNMENT}")]
    if runs := sorted(str(file.parent.relative_to(folder)) for file in found):
        more = ", ..." if len(runs) > MAX_RUNS else ""
        remedy = f"name one of {', '.join(runs[:MAX_RUNS])}{more}"
        raise UserError("contains several runs", where=str(folder), remedy=remedy)


def _is_own_file(folder: Path, task: Task, data: Path) -> bool:
    """True if a model was trained from this file."""
    # The folder may be a run folder, the model folder inside it, or the folder of several runs.
    known = model_folder(folder).resolve().parent / ASSIGNMENT
    if not known.is_file() or not data.is_file():
        return False
    trained = Path(str(read_json(known, remedy="correct or remove it").get("data", "")))
    file = data.resolve()
    return file == trained or (file.parent == trained and names_file(task, "train", file))


def _labelled(task: Task, read: ReadSplit, *, skip_bad: bool) -> ReadSplit:
    """Return the labelled examples; raise if any label is missing, unless `skip_bad` leaves some."""
    bare = [example for example in read.examples if not example.is_labelled]
    if bare and not (skip_bad and len(bare) < len(read.examples)):
        what = f"{len(bare):,} of {len(read.examples):,} examples lack a label to compare with; the first"
        column = task.custom.get("label")
        remedy = "add the labels" if column is None else f"add the labels, in the column {str(column)!r}"
        if len(bare) < len(read.examples):
            remedy = "add them, or skip such lines with `skip_bad=True`"
        raise UserError(f"{what} is here", where=bare[0].where, remedy=remedy)
    skipped = [BadLine("lacks a label", example.where, "add it") for example in bare]
    labelled = tuple(example for example in read.examples if example.is_labelled)
    return replace(read, examples=labelled, skipped=(*read.skipped, *skipped))


def _check_words_in_columns(examples: Sequence[Example], labels: tuple[str, ...]) -> None:
    """Raise if the last column contains no tag of the model: the file may contain plain sentences."""
    sentences = [each for each in examples if isinstance(each, TaggedExample) and each.tags is not None]
    tags = {tag for each in sentences for tag in each.tags or ()}
    # Part-of-speech taggers have a tag for the full stop, and plain sentences end with one.
    if not tags or any(tag in labels and any(map(str.isalnum, tag)) for tag in tags):
        return
    what = f"the last column has {min(tags)!r} instead of a tag of this model"
    remedy = (
        "write one word per line, alone or with its tag, and an empty line between sentences; "
        "for plain sentences use `bertsmith tag --input`"
    )
    raise UserError(what, where=sentences[0].where, remedy=remedy)


def prediction_rows(file: FilePredictions) -> list[dict[str, Any]]:
    """Return the predictions as rows of a table, one for each example."""
    separator = str(file.config.custom.get("separator", ","))
    return file.config.kind.prediction_rows(file.config.labels, file.predicted, separator=separator)


def with_texts(rows: Sequence[dict[str, Any]], file: FilePredictions) -> list[dict[str, Any]]:
    """Return the rows with the text of each example after its id."""
    pairs = zip(rows, file.examples, strict=True)
    return [{"id": row["id"], **example.text_cells, **row} for row, example in pairs]


def check_ending(kind: AnyKind, out: Path) -> None:
    """Raise if predictions of this kind cannot be written in a format with this ending."""
    # A folder may be called squad-1.1; only letters after the dot are a file's ending.
    names_folder = out.is_dir() or not out.suffix[1:].isalpha()
    if _is_table(out) or kind.own_form == "file" or (kind.own_form == "folder" and names_folder):
        return
    what = f"the ending {out.suffix!r} is not a format's" if out.suffix else "needs an ending for its format"
    remedy = f"name it {', '.join(TABLE_WRITERS)}"
    if kind.own_form == "folder":
        remedy += ", or without an ending for a folder of several files"
    raise UserError(what, where=str(out), remedy=remedy)


def _is_table(out: Path) -> bool:
    return out.suffix.lower() in TABLE_WRITERS


def write_predictions(out: Path, file: FilePredictions, *, with_text: bool = False) -> list[Path]:
    """Write the predictions as a table if the name says so, else in the kind's own form; return the files."""
    kind = file.config.kind
    check_ending(kind, out)
    if not _is_table(out):
        if with_text:
            what, remedy = "this form cannot contain the texts", f"name a {', '.join(TABLE_WRITERS)} file"
            raise UserError(what, where=str(out), remedy=remedy)
        return kind.write_predictions(out, file.config.labels, file.predicted)
    rows = prediction_rows(file)
    write_table(out, with_texts(rows, file) if with_text else rows)
    return [out]


def write_official(folder: Path, file: FilePredictions) -> Path:
    """Write the TSV file that the GLUE site requires."""
    submission_file(file.task, file.split)  # raises for tasks that GLUE does not have
    kind = TEXT_KINDS[file.config.kind.name]
    keys = [example.key for example in file.examples]
    predictions = dict(zip(keys, kind.predicted_labels(file.config.labels, file.predicted), strict=True))
    return write_submission(folder, file.task, split=file.split, predictions=predictions)


def asked_for(config: TaskConfig, data: Path, reading: Reading) -> tuple[Task, str]:
    """Return the task and split of a data folder or file: by default its development set, or by its name.

    A file with another name counts as one to predict; labels in it are read as well.
    """
    own, split = task_of(config, reading.form), reading.split
    tasks = [own, *(task_named(name) for name in FURTHER_TASKS.get(config.task, ()))]
    for task in tasks:
        if data.is_dir():
            for name in (split,) if split else ("dev", "test"):
                if has_split(task, data, name):
                    return task, name
        elif not split and (named := split_named(task, data)):
            return task, named
    return own, split or ("test" if data.is_file() and "test" in own.splits else "dev")


def _check_same_question(
    folders: Sequence[Path], models: Sequence[TaskModel], examples: Sequence[Example]
) -> None:
    """Raise if the members of an ensemble differ in task, labels, settings or, for token tasks, encoding."""

    def question(config: TaskConfig) -> tuple[object, ...]:
        return config.kind, config.labels, config.pairs, config.kind.ensemble_settings(config.answers)

    def encoding(model: TaskModel) -> str:
        config = model.config
        return encoding_key(config.kind, examples[:1], config.labels, model.tokenizer, config.text)

    first = models[0]
    for folder, model in zip(folders, models, strict=True):
        if question(model.config) != question(first.config):
            what = f"was not fine-tuned for the same task and labels as {folders[0]}"
            raise UserError(what, where=str(folder), remedy="remove it from the ensemble")
        # Scores of tokens can only be averaged if all members have the same tokens.
        if first.config.kind.head.reads == "tokens" and encoding(model) != encoding(first):
            what = f"cuts texts differently from {folders[0]}"
            remedy = "combine models with one vocabulary and the same text settings"
            raise UserError(what, where=str(folder), remedy=remedy)
