"""Training from Python, as the commands do it: data frames or files in, metrics and tables out.

Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews").metrics
"""

import filecmp
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bertsmith.cli.finetune import OwnTable, own_task, published_task
from bertsmith.cli.finetune import live_line as finetuning_line
from bertsmith.cli.pretrain import live_line as pretraining_line
from bertsmith.cli.terminal import progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.files import write_text
from bertsmith.finetuning.assignment import ASSIGNMENT, Assignment
from bertsmith.finetuning.finetune import FinetuningResult
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
from bertsmith.inference.loaded_model import Bert, Precision, load
from bertsmith.inference.model_path import DEFAULT_MODEL
from bertsmith.pretraining.pretrain import pretrain as run_pretraining
from bertsmith.recipe.load import load_recipe
from bertsmith.recipe.toml_text import value_text
from bertsmith.studies.sweep import Stopped, over_folds, run_trials, spreads_of
from bertsmith.tasks.catalogue import OWN
from bertsmith.tasks.table_format import TableFormat
from bertsmith.tasks.task_recipe import finetuning_recipe
from bertsmith.training.callbacks import ProgressCallback

Rows = list[dict[str, Any]]
Settings = Mapping[str, object]
"""Recipe keys with their values: {"optim.peak_lr": 3e-5}."""
SHOWN_ROWS = 20
"""Of a table that a notebook shows."""
_FILE_STEM = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run of fine-tuning or pre-training, as it ended; a notebook shows its table."""

    folder: Path
    finished: bool
    """False where it was stopped: the same call resumes it."""
    metrics: dict[str, dict[str, float]]
    """For each split that the model was evaluated on; of pre-training, of the held-out documents, and before
    the first step ("held-out before") where it began with a model folder."""
    steps: int
    seconds: float
    folds: tuple["TrainingRun", ...] = ()
    """Of several folds the run of each; the metrics are then their means."""

    def table(self) -> Rows:
        """A row for each metric: split, metric, value, and over several folds its standard deviation."""
        rows: Rows = []
        for split, metrics in self.metrics.items():
            for name, value in metrics.items():
                row = {"split": split, "metric": name, "value": value}
                if self.folds:
                    row["deviation"] = statistics.stdev(each.metrics[split][name] for each in self.folds)
                rows.append(row)
        return rows

    def load(self, *, device: str = "auto") -> Bert:
        """The finished model; of several folds the best one."""
        if not self.finished:
            remedy = "give the same call again, and it resumes"
            raise UserError("this run is not finished", where=str(self.folder), remedy=remedy)
        return load(self.folder, device=device)

    def _repr_html_(self) -> str:
        state = "finished" if self.finished else "stopped: the same call resumes it"
        return _html(f"{self.folder} ({state}; {self.steps:,} steps)", self.table())


@dataclass(frozen=True, slots=True)
class PredictionRun:
    """What a model predicts of some data, and how right it is where that was asked; notebooks show it."""

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

    def _repr_html_(self) -> str:
        rows = self.table()
        title = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        more = f" (the first {SHOWN_ROWS})" if len(rows) > SHOWN_ROWS else ""
        return _html(f"{title or 'predictions'}; {len(rows):,} examples{more}", rows[:SHOWN_ROWS])


def _html(title: str, rows: Rows) -> str:
    """A table as notebooks draw it; whatever a text holds is shown and never run."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_shown(row.get(name)) for name in names] for row in rows]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.4f}" if isinstance(cell, float) else str(cell)


def finetune(
    data: Any,
    *,
    out: Path | str,
    task: str = OWN,
    model: Path | str = DEFAULT_MODEL,
    text: str = "",
    label: str = "",
    text2: str = "",
    kind: str = "",
    separator: str = "",
    id: str = "",
    dev: Any = None,
    dev_share: float | None = None,
    test_share: float | None = None,
    folds: int | None = None,
    delimiter: str = "",
    encoding: str = "",
    columns: Sequence[str] = (),
    epochs: float | None = None,
    lr: float | None = None,
    patience: int | None = None,
    seed: int | None = None,
    settings: Settings | None = None,
    skip_bad: bool = False,
) -> TrainingRun:
    """Fine-tune a model, as `bertsmith finetune` does: a run found in `out` resumes.

    Data are a path, a data frame (pandas, polars, Arrow), a list of dicts or a dict of columns, or a dict of
    these by split: {"train": ..., "dev": ...}. What is no path is kept as JSON lines beside `out`, for the
    run to resume. The task is one of the papers ("sst2", "squad2", "ner") or "custom", whose columns are
    named: text, label, and text2 for pairs; its kind is "classify", "multilabel" or "regress". A file says
    its delimiter and columns itself, unless you do.

    Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews", epochs=3)
    """
    folder = Path(out).expanduser()
    short = (
        ("--epochs", "run.epochs", epochs),
        ("--lr", "optim.peak_lr", lr),
        ("--seed", "run.seed", seed),
        ("--patience", "run.patience", patience),
        ("--patience", "run.keep", None if patience is None else "best"),
    )
    options = [(name, f"{key}={value_text(value)}") for name, key, value in short if value is not None]
    with _rows_beside(folder) as rows:
        path = rows.path(data, folder.with_name(f"{folder.name}-data"), "data")
        held = None if dev is None else rows.path(dev, folder.with_name(f"{folder.name}-dev"), "dev")
        parts, form = (held, dev_share, test_share, folds), (delimiter, encoding, ",".join(columns))
        own = OwnTable(text, text2, label, kind, separator, id, *parts, *form)
        chosen = own_task(own, path) if task == OWN else published_task(task, own)
        recipe = finetuning_recipe(chosen, _overrides(settings), options=options)
        assignment = Assignment(chosen, recipe, Path(model).expanduser(), path, folder, skip_bad)
        with progress_display(finetuning_line, as_json=False) as display:
            callback = _PythonCallback(display, rows)
            if not folds:
                return _training_run(run_finetuning(assignment, callback))
            try:
                results = run_trials(over_folds(assignment, folds), callback)
            except Stopped:
                return TrainingRun(folder, False, {}, 0, 0.0)
    means = {
        split: {name: spread.mean for name, spread in spreads.items()}
        for split, spreads in spreads_of(results).items()
    }
    steps, seconds = sum(each.steps for each in results), sum(each.seconds for each in results)
    return TrainingRun(folder, True, means, steps, seconds, tuple(map(_training_run, results)))


def _training_run(result: FinetuningResult) -> TrainingRun:
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
    budgets = [(name, value) for name, value in (("steps", steps), ("minutes", minutes)) if value is not None]
    short = [
        (f"--{name}", line)
        for name, value in budgets
        for line in (f"run.{name}={value_text(value)}", f"run.budget={name}")
    ]
    store, out = Path(store).expanduser(), Path(out).expanduser()
    rows = _Rows()
    with _python_words(rows), progress_display(pretraining_line, as_json=False) as display:
        chosen = load_recipe(recipe, _overrides(settings), options=short)
        result = run_pretraining(chosen, store=store, out=out, callback=_PythonCallback(display, rows))
    finished, metrics = result.state == "finished", {"held-out": result.held_out}
    if result.held_out_before:
        metrics["held-out before"] = result.held_out_before
    return TrainingRun(result.folder, finished, metrics, result.steps, result.seconds)


def evaluate(
    model: Path | str | Sequence[Path | str],
    data: Any,
    *,
    split: str = "",
    delimiter: str = "",
    encoding: str = "",
    columns: Sequence[str] = (),
    skip_bad: bool = False,
    device: str = "auto",
    precision: Precision = "auto",
) -> PredictionRun:
    """How right a fine-tuned model is on labelled data, or several together, as `bertsmith evaluate` says.

    Example: bertsmith.evaluate("runs/reviews", frame).metrics["accuracy"]
    """
    folders, rows = _folders(model), _Rows()
    with TemporaryDirectory() as place, _python_words(rows):
        form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=",".join(columns))
        path, reading = rows.path(data, Path(place) / "data", "data"), Reading(form, skip_bad, split)
        kept = folders[0].with_name(f"{folders[0].name}-data.jsonl")
        if rows.names and path.is_file() and kept.is_file() and filecmp.cmp(path, kept, shallow=False):
            # The rows of the training: by the file that the run knows, only those held back are taken.
            path = kept
            rows.names[kept] = "data"
        file = predict_labelled(folders, path, reading=reading, device=device, precision=precision)
        warnings = tuple(map(rows.in_python_words, file.warnings))
    return PredictionRun(file.metrics(), file.skipped, warnings, file)


def predict(
    model: Path | str | Sequence[Path | str],
    data: Any,
    *,
    split: str = "",
    delimiter: str = "",
    encoding: str = "",
    columns: Sequence[str] = (),
    skip_bad: bool = False,
    device: str = "auto",
    precision: Precision = "auto",
) -> PredictionRun:
    """What a fine-tuned model predicts of data, or several together, as `bertsmith predict` does.

    Example: pandas.DataFrame(bertsmith.predict("runs/reviews", frame).table())
    """
    rows = _Rows()
    with TemporaryDirectory() as place, _python_words(rows):
        form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=",".join(columns))
        path, reading = rows.path(data, Path(place) / "data", "data"), Reading(form, skip_bad, split)
        file = run_prediction(_folders(model), path, reading=reading, device=device, precision=precision)
        warnings = tuple(map(rows.in_python_words, file.warnings))
    return PredictionRun({}, file.skipped, warnings, file)


def _folders(model: Path | str | Sequence[Path | str]) -> list[Path]:
    given = [model] if isinstance(model, str | Path) else list(model)
    return [Path(folder).expanduser() for folder in given]


def _overrides(settings: Settings | None) -> list[str]:
    return [f"{key}={value_text(value)}" for key, value in (settings or {}).items()]


# ---- data as files, and errors about them in the words of Python

_NO_VALUE = r"(?!and\b|or\b|to\b|with\b|a\b|the\b)"
_SPELLINGS = (
    (r"--set ([\w.]+)=([^\s;,)]+)", r'settings={"\1": \2}'),
    (r"--set\b", "settings"),
    (r"--from (\S+)", r'settings={"start.model": "\1"}'),
    (r"--(text|text2|label|id) COLUMN", r'\1="..."'),
    (rf"--(kind|encoding|delimiter) {_NO_VALUE}([\w-]+)", r'\1="\2"'),
    (r"--columns (\w+(?:,\w+)+)", lambda found: f"columns={found[1].split(',')}".replace("'", '"')),
    (r"--(skip-bad)\b", lambda found: f"{found[1].replace('-', '_')}=True"),
    (r"--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_")),
)
"""Options of the command line, and how the same thing is said here; the first that fits is taken."""


class _Rows:
    """Files of rows, and what the call named them."""

    def __init__(self) -> None:
        self.names: dict[Path, str] = {}
        """The files of rows that were given as such, by the expression that gives them again."""
        self.written: list[Path] = []
        """Files, and behind them the folders that were made for them."""

    def path(self, data: Any, place: Path, name: str) -> Path:
        """The path that was given, or that of a file with these rows, or of a folder of splits."""
        if isinstance(data, str | Path):
            return Path(data).expanduser()
        if not (isinstance(data, Mapping) and data and _columns_in(data) is None):
            return self._write(place.with_name(f"{place.name}.jsonl"), _rows_of(data), name)
        for split in data:
            if not _FILE_STEM.fullmatch(str(split)):
                raise UserError(f"{split!r} is no split", remedy='name them "train", "dev" and "test"')
        files = {place / f"{split}.jsonl": split for split in data}
        if stale := [each for each in sorted(place.glob("*")) if each not in files]:
            what = f"lies there of an earlier call, and would be read beside {', '.join(map(str, data))}"
            raise UserError(what, where=str(stale[0]), remedy="pass another out, or remove it first")
        for file, split in files.items():
            self._write(file, _rows_of(data[split]), f'{name}["{split}"]')
        return place

    def _write(self, file: Path, rows: Rows, name: str) -> Path:
        self.names[file] = name
        lines = (json.dumps(row, ensure_ascii=False, default=_plain) for row in rows)
        text = "".join(f"{line}\n" for line in lines)
        if file.exists():
            # The rows of a run that is to resume, or a file of the user's own, which nothing brings back.
            if not file.is_file() or file.read_bytes() != text.encode():
                del self.names[file]  # the error is about the file itself
                remedy = "pass another out, or remove it first"
                raise UserError("is there already and holds other rows", where=str(file), remedy=remedy)
            return file
        made = [] if file.parent.exists() else [file.parent]
        write_text(file, text)
        self.written = [file, *self.written, *made]
        return file

    def remove(self) -> None:
        """Remove what was written by this call."""
        for path in self.written:
            if path.is_file():
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def in_python_words(self, text: str) -> str:
        """A message with arguments in place of options, and rows in place of lines of a file."""
        for file, name in self.names.items():
            for path in dict.fromkeys((str(file), str(file.resolve()))):
                text = re.sub(re.escape(path) + r":(\d+)", rf"row \1 of {name}", text)
                text = text.replace(path, name)
        for pattern, spelling in _SPELLINGS:
            text = re.sub(pattern, spelling, text)
        return text


@dataclass(frozen=True, slots=True)
class _PythonCallback:
    """Shows how a run goes, its warnings in the words of Python."""

    display: ProgressCallback
    rows: _Rows

    def on_message(self, text: str) -> None:
        """A message, warnings included."""
        self.display.on_message(self.rows.in_python_words(text))

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """A line of metrics."""
        self.display.on_step(progress, values)

    def on_progress(self, progress: float) -> None:
        """A step is done."""
        self.display.on_progress(progress)

    def on_deadline(self, seconds: float, total: float) -> None:
        """The run goes by the clock."""
        self.display.on_deadline(seconds, total)

    def on_signal(self, text: str) -> None:
        """A message from a signal handler."""
        self.display.on_signal(text)


@contextmanager
def _python_words(rows: _Rows) -> Iterator[None]:
    """While it is open, errors speak of arguments and rows, not of options and files that nobody named."""
    try:
        yield
    except UserError as error:
        what, where, remedy = map(rows.in_python_words, (error.what, error.where, error.remedy))
        raise replace(error, what=what, where=where, remedy=remedy) from error


@contextmanager
def _rows_beside(folder: Path) -> Iterator[_Rows]:
    """Rows that are kept beside a run, unless it does not even begin."""
    rows = _Rows()
    try:
        with _python_words(rows):
            yield rows
    except BaseException:
        if not any(folder.glob(ASSIGNMENT)) and not any(folder.glob(f"*/{ASSIGNMENT}")):
            rows.remove()
        raise


def _columns_in(data: Mapping[Any, Any]) -> Rows | None:
    """The rows of a dict of columns; nothing where it is one of splits."""
    columns: dict[str, list[Any]] = {}
    for name, column in data.items():
        if (cells := _cells_of(column)) is None:
            return None
        columns[str(name)] = cells
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UserError(f"the columns of data differ in length: {listed}", remedy="give each row a cell")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cells_of(column: Any) -> list[Any] | None:
    """The cells of a column; nothing where it is no column, but rows, a frame or a path."""
    if (
        isinstance(column, str | Path | Mapping)
        or hasattr(column, "columns")
        or hasattr(column, "column_names")
    ):
        return None
    for method in ("tolist", "to_list", "to_pylist"):  # numpy, pandas; polars; Arrow
        if hasattr(column, method):
            column = getattr(column, method)()
            break
    if not isinstance(column, list | tuple) or any(isinstance(cell, Mapping) for cell in column):
        return None
    return list(column)


def _rows_of(data: Any) -> Rows:
    """Rows as dicts; a frame is known by its methods, so that none of its libraries is needed."""
    for method in ("to_dicts", "to_pylist", "to_list"):  # polars; Arrow; datasets
        if hasattr(data, method):
            data = getattr(data, method)()
            break
    else:
        if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
            data = data.to_dict(orient="records")
    if isinstance(data, Mapping) and (columns := _columns_in(data)) is not None:
        data = columns
    if not isinstance(data, list | tuple) or not all(isinstance(row, Mapping) for row in data):
        what = f"data are {type(data).__name__}, no rows with named columns"
        raise UserError(what, remedy="pass a path, a data frame, a list of dicts or a dict of columns")
    if not data:
        raise UserError("data have no rows", remedy="pass some")
    return [{str(name): cell for name, cell in row.items()} for row in data]


def _plain(cell: Any) -> Any:
    """A cell of numpy, or anything else, as JSON knows it."""
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)
