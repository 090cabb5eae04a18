"""Training from Python, as the commands do it: data frames or files in, metrics and tables out.

Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews").metrics
"""

import filecmp
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bertsmith.cli.finetune import live_line as finetuning_line
from bertsmith.cli.pretrain import live_line as pretraining_line
from bertsmith.cli.terminal import progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.files import write_text
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import finetune as run_finetuning
from bertsmith.finetuning.predict import (
    FilePredictions,
    Reading,
    predict_labelled,
    prediction_rows,
    with_texts,
    write_predictions,
)
from bertsmith.finetuning.predict import predict as run_prediction
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.model_path import DEFAULT_MODEL
from bertsmith.pretraining.pretrain import pretrain as run_pretraining
from bertsmith.recipe.load import load_recipe
from bertsmith.recipe.toml_text import value_text
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.custom import CustomSpec, custom_task, has_own_dev
from bertsmith.tasks.kinds.registry import TEXT_KINDS
from bertsmith.tasks.task_recipe import finetuning_recipe

Rows = list[dict[str, Any]]
Settings = Mapping[str, object]
"""Recipe keys with their values: {"optim.peak_lr": 3e-5}."""
CUSTOM = "custom"
_FILE_STEM = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run of fine-tuning or pre-training, as it ended."""

    folder: Path
    finished: bool
    """False where it was stopped: the same call resumes it."""
    metrics: dict[str, dict[str, float]]
    """For each split that the model was evaluated on; of pre-training, of the held-out documents."""
    steps: int
    seconds: float

    def table(self) -> Rows:
        """A row for each metric: split, metric, value."""
        return [
            {"split": split, "metric": name, "value": value}
            for split, metrics in self.metrics.items()
            for name, value in metrics.items()
        ]

    def load(self, *, device: str = "auto") -> Bert:
        """The finished model."""
        if not self.finished:
            remedy = "give the same call again, and it resumes"
            raise UserError("this run is not finished", where=str(self.folder), remedy=remedy)
        return load(self.folder, device=device)


@dataclass(frozen=True, slots=True)
class PredictionRun:
    """What a model predicts of some data, and how right it is where that was asked."""

    metrics: dict[str, float]
    """Of `evaluate`; empty of `predict`."""
    skipped: int
    """Bad lines that were left out."""
    warnings: tuple[str, ...]
    _file: FilePredictions = field(repr=False)

    def table(self) -> Rows:
        """A row for each example: its id, its text, the prediction, and the probability of each class."""
        return with_texts(prediction_rows(self._file), self._file)

    def save(self, out: Path | str) -> list[Path]:
        """Write the predictions as the name says (.csv, .tsv, .jsonl, .parquet ...); the files written."""
        return write_predictions(Path(out).expanduser(), self._file)


def finetune(
    data: Any,
    *,
    out: Path | str,
    task: str = CUSTOM,
    model: Path | str = DEFAULT_MODEL,
    text: str = "",
    label: str = "",
    text2: str = "",
    kind: str = "classify",
    id: str = "",
    dev: Any = None,
    dev_share: float = 0.1,
    epochs: float | None = None,
    lr: float | None = None,
    seed: int | None = None,
    settings: Settings | None = None,
    skip_bad: bool = False,
) -> TrainingRun:
    """Fine-tune a model, as `bertsmith finetune` does: a run found in `out` resumes.

    Data are a path, a data frame (pandas, polars, Arrow) or a list of dicts, or a dict of these by split:
    {"train": ..., "dev": ...}. What is no path is kept as JSON lines beside `out`, for the run to resume.
    The task is one of the papers ("sst2", "squad2", "ner") or "custom", whose columns are named: text,
    label, and text2 for pairs.

    Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews", epochs=3)
    """
    folder = Path(out).expanduser()
    place = folder.with_name(f"{folder.name}-data")
    if task == CUSTOM:
        spec = CustomSpec(text, label, second=text2, kind=kind, key=id, dev_fraction=dev_share)
        _check_spec(spec)
        path = _as_path(data, place)
        if dev is not None:
            held = _as_path(dev, folder.with_name(f"{folder.name}-dev"))
            spec = replace(spec, dev_fraction=0.0, dev=str(held.resolve()))
        elif has_own_dev(path):
            spec = replace(spec, dev_fraction=0.0)
        chosen = custom_task(spec)
    else:
        chosen = task_named(task)
        if text or label or text2 or id or dev is not None:
            remedy = "leave out text, label, text2, id and dev, or fine-tune the task custom"
            raise UserError(f"{chosen.name} knows its own columns and parts", remedy=remedy)
        path = _as_path(data, place)
    short = {"run.epochs": epochs, "optim.peak_lr": lr, "run.seed": seed}
    recipe = finetuning_recipe(chosen, _overrides(short, settings))
    assignment = Assignment(chosen, recipe, Path(model).expanduser(), path, folder, skip_bad)
    with progress_display(finetuning_line, as_json=False) as callback:
        result = run_finetuning(assignment, callback)
    return TrainingRun(result.folder, result.finished, result.metrics, result.steps, result.seconds)


def pretrain(
    recipe: Path | str,
    *,
    store: Path | str,
    out: Path | str,
    steps: int | None = None,
    minutes: float | None = None,
    settings: Settings | None = None,
) -> TrainingRun:
    """Pre-train an encoder, as `bertsmith pretrain` does: a run found in `out` resumes.

    Example: bertsmith.pretrain("bert-tiny", store="store", out="runs/tiny", minutes=5)
    """
    if steps is not None and minutes is not None:
        raise UserError("a run has one budget", where="steps and minutes", remedy="give one of them")
    budget = "steps" if steps is not None else "minutes" if minutes is not None else None
    short = {"run.steps": steps, "run.minutes": minutes, "run.budget": budget}
    chosen = load_recipe(recipe, _overrides(short, settings))
    store, out = Path(store).expanduser(), Path(out).expanduser()
    with progress_display(pretraining_line, as_json=False) as callback:
        result = run_pretraining(chosen, store=store, out=out, callback=callback)
    finished, metrics = result.state == "finished", {"held-out": result.held_out}
    return TrainingRun(result.folder, finished, metrics, result.steps, result.seconds)


def evaluate(
    model: Path | str, data: Any, *, split: str = "", skip_bad: bool = False, device: str = "auto"
) -> PredictionRun:
    """How right a fine-tuned model is on labelled data, as `bertsmith evaluate` tells it.

    Example: bertsmith.evaluate("runs/reviews", frame).metrics["accuracy"]
    """
    with TemporaryDirectory() as place:
        path, reading = _as_path(data, Path(place) / "data"), Reading(skip_bad=skip_bad)
        folder = Path(model).expanduser()
        kept = folder.with_name(f"{folder.name}-data.jsonl")
        if not isinstance(data, str | Path) and path.is_file() and kept.is_file():
            # The rows of the training: by the file that the run knows, only those held back are taken.
            path = kept if filecmp.cmp(path, kept, shallow=False) else path
        file = predict_labelled([folder], path, split=split, reading=reading, device=device)
    return PredictionRun(file.metrics(), file.skipped, file.warnings, file)


def predict(
    model: Path | str | Sequence[Path | str],
    data: Any,
    *,
    split: str = "",
    skip_bad: bool = False,
    device: str = "auto",
) -> PredictionRun:
    """What a fine-tuned model predicts of data, or several together, as `bertsmith predict` does.

    Example: pandas.DataFrame(bertsmith.predict("runs/reviews", frame).table())
    """
    given = [model] if isinstance(model, str | Path) else list(model)
    folders = [Path(folder).expanduser() for folder in given]
    with TemporaryDirectory() as place:
        path, reading = _as_path(data, Path(place) / "data"), Reading(skip_bad=skip_bad)
        file = run_prediction(folders, path, split=split, reading=reading, device=device)
    return PredictionRun({}, file.skipped, file.warnings, file)


def _check_spec(spec: CustomSpec) -> None:
    """Raise where a table of one's own is not told enough of, before anything is written."""
    if not (spec.text and spec.label):
        remedy = 'pass text="..." and label="..."'
        raise UserError("a task of your own needs the names of its columns", remedy=remedy)
    if spec.kind not in TEXT_KINDS:
        raise UserError(f"unknown kind {spec.kind!r}", remedy=f"choose one of {', '.join(TEXT_KINDS)}")


def _overrides(short: Settings, settings: Settings | None) -> list[str]:
    given = {key: value for key, value in short.items() if value is not None} | dict(settings or {})
    return [f"{key}={value_text(value)}" for key, value in given.items()]


def _as_path(data: Any, place: Path) -> Path:
    """The path that was given, or that of a file with these rows, or of a folder of splits."""
    if isinstance(data, str | Path):
        return Path(data).expanduser()
    if isinstance(data, Mapping):
        for split, rows in data.items():
            if not _FILE_STEM.fullmatch(str(split)):
                raise UserError(f"{split!r} is no split", remedy='name them "train", "dev" and "test"')
            _write_rows(place / f"{split}.jsonl", rows)
        return place
    return _write_rows(place.with_name(f"{place.name}.jsonl"), data)


def _write_rows(file: Path, data: Any) -> Path:
    lines = (json.dumps(row, ensure_ascii=False, default=_plain) for row in _rows_of(data))
    text = "".join(f"{line}\n" for line in lines)
    if file.exists():
        # The rows of a run that is to resume, or a file of the user's own, which nothing brings back.
        if not file.is_file() or file.read_bytes() != text.encode():
            remedy = "pass another out, or remove it first"
            raise UserError("is there already and holds other rows", where=str(file), remedy=remedy)
        return file
    write_text(file, text)
    return file


def _rows_of(data: Any) -> Rows:
    """Rows as dicts; a frame is known by its methods, so that none of its libraries is needed."""
    for method in ("to_dicts", "to_pylist", "to_list"):  # polars; Arrow; datasets
        if hasattr(data, method):
            data = getattr(data, method)()
            break
    else:
        if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
            data = data.to_dict(orient="records")
    if not isinstance(data, list | tuple) or not all(isinstance(row, Mapping) for row in data):
        what = f"data are {type(data).__name__}, no rows with named columns"
        raise UserError(what, remedy="pass a path, a data frame or a list of dicts")
    if not data:
        raise UserError("data have no rows", remedy="pass some")
    return [{str(name): cell for name, cell in row.items()} for row in data]


def _plain(cell: Any) -> Any:
    """A cell of numpy, or anything else, as JSON knows it."""
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)
