"""Training from Python, as the commands do it: data frames or files in, metrics and tables out.

Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews").metrics
"""

import filecmp
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bertsmith.api_rows import PythonCallback, RowFiles, Rows, python_words, rows_beside
from bertsmith.cli.finetune import OwnTable, own_task, published_task
from bertsmith.cli.finetune import finetune as finetune_verb
from bertsmith.cli.finetune import live_line as finetuning_line
from bertsmith.cli.options import settings_of
from bertsmith.cli.predict import evaluate as evaluate_verb
from bertsmith.cli.predict import predict as predict_verb
from bertsmith.cli.pretrain import check_auto
from bertsmith.cli.pretrain import live_line as pretraining_line
from bertsmith.cli.pretrain import pretrain as pretrain_verb
from bertsmith.cli.spelling import as_arguments
from bertsmith.cli.terminal import progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.measures import Metric
from bertsmith.finetuning.assignment import Assignment
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.finetuning.finetune import finetune as run_finetuning
from bertsmith.finetuning.predict import (
    FilePredictions,
    Opening,
    Reading,
    predict_labelled,
    prediction_rows,
    with_texts,
    write_predictions,
)
from bertsmith.finetuning.predict import predict as run_prediction
from bertsmith.finetuning.suited_settings import suited_recipe
from bertsmith.inference.embedded_models import default_model
from bertsmith.inference.loaded_model import Bert, Precision, load
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.auto_recipe import AutoRequest, auto_recipe
from bertsmith.pretraining.pretrain import pretrain as run_pretraining
from bertsmith.recipe.load import load_recipe
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.toml_text import value_text
from bertsmith.studies.scheduler import Stopped
from bertsmith.studies.sweep import (
    PretrainingTrial,
    grid_points,
    over_folds,
    ran_to_their_end,
    run_sweep,
    run_trials,
    spreads_of,
    trials_of,
)
from bertsmith.tasks.catalogue import OWN
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.tasks.table_format import TableFormat
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.early_stopping import EarlyStopping

Settings = Mapping[str, object]
"""Recipe keys with their values: {"optim.peak_lr": 3e-5}."""
SHOWN_ROWS = 20
"""Maximum rows of a table in a notebook."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A finished or stopped run of fine-tuning or pre-training; a notebook shows its table."""

    folder: Path
    finished: bool
    """False if it was stopped: the same call resumes it."""
    metrics: dict[str, dict[str, float]]
    """Metrics of each evaluated split. In pre-training: of the held-out documents, and also before the first
    step ("held-out before") if the run began with a model folder."""
    steps: int
    seconds: float
    folds: tuple["TrainingRun", ...] = ()
    """Runs of the folds; `metrics` are then their means."""
    trials: tuple["TrainingRun", ...] = ()
    """All runs of a sweep, the best first; the other fields are those of the best run."""
    early_end: str = ""
    """Reason for an early end, or ""."""

    def table(self) -> Rows:
        """Return a row per metric: split, metric, value; with folds also its standard deviation.

        For a sweep, return a row per run and metric.
        """
        rows: Rows = []
        for trial in self.trials:
            rows += [{"run": trial.folder.name, **row} for row in trial.table()]
        if rows:
            return rows
        for split, metrics in self.metrics.items():
            for name, value in metrics.items():
                row = {"split": split, "metric": name, "value": value}
                if self.folds:
                    row["deviation"] = statistics.stdev(each.metrics[split][name] for each in self.folds)
                rows.append(row)
        return rows

    def load(self, *, device: str = "auto") -> Bert:
        """Load the finished model; with folds, the best one."""
        if not self.finished:
            remedy = "give the same call again, and it resumes"
            raise UserError("this run is not finished", where=str(self.folder), remedy=remedy)
        return load(self.folder, device=device)

    def _repr_html_(self) -> str:
        state = "finished" if self.finished else self.early_end or "stopped: the same call resumes it"
        return _html(f"{self.folder} ({state}; {self.steps:,} steps)", self.table())


@dataclass(frozen=True, slots=True)
class PredictionRun:
    """Predictions of a model for some data, and their metrics if requested; a notebook shows them."""

    metrics: dict[str, float]
    """Metrics of `evaluate`; empty for `predict`."""
    skipped: int
    """Number of bad lines that were left out."""
    warnings: tuple[str, ...]
    _file: FilePredictions = field(repr=False)

    def table(self) -> Rows:
        """Return a row per example: its id, its text, the prediction and the probability of each class."""
        return with_texts(prediction_rows(self._file), self._file)

    def save(self, out: Path | str) -> list[Path]:
        """Write the predictions as .csv, .tsv, .jsonl, .parquet ..., by the name; return the files."""
        return write_predictions(Path(out).expanduser(), self._file)

    def _repr_html_(self) -> str:
        rows = self.table()
        title = ", ".join(f"{name} {metric_named(name).text(value)}" for name, value in self.metrics.items())
        more = f" (the first {SHOWN_ROWS})" if len(rows) > SHOWN_ROWS else ""
        return _html(f"{title or 'predictions'}; {len(rows):,} examples{more}", rows[:SHOWN_ROWS])


def _html(title: str, rows: Rows) -> str:
    """Return a table in HTML for notebooks; texts are escaped, so that nothing in them runs."""
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
    model: Path | str | None = None,
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
    """Fine-tune a model, as `bertsmith finetune` does; a run found in `out` resumes.

    Data are a path, a data frame (pandas, polars, Arrow), a list of dicts or a dict of columns. A dict of
    these by split is possible, too: {"train": ..., "dev": ...}. Data that are not a path are stored as JSON
    lines next to `out`, for the run to resume. The task is one of the papers ("sst2", "squad2", "ner") or
    "custom". For "custom", name the columns: text, label, and text2 for pairs; the kind is "classify",
    "multilabel" or "regress". The delimiter and columns of a file are detected unless you give them.

    Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews", epochs=3)
    """
    folder = Path(out).expanduser()
    short = (
        ("epochs", "run.epochs", epochs),
        ("lr", "optim.peak_lr", lr),
        ("seed", "run.seed", seed),
        ("patience", "run.patience", patience),
        ("patience", "run.keep", None if patience is None else "best"),
    )
    options = settings_of(short)
    with rows_beside(folder, as_arguments(finetune, finetune_verb)) as rows:
        path = rows.path(data, folder.with_name(f"{folder.name}-data"), "data")
        held = None if dev is None else rows.path(dev, folder.with_name(f"{folder.name}-dev"), "dev")
        parts, form = (held, dev_share, test_share, folds), (delimiter, encoding, ",".join(columns))
        own = OwnTable(text, text2, label, kind, separator, id, *parts, *form)
        chosen = own_task(own, path) if task == OWN else published_task(task, own)
        start = default_model() if model is None else Path(model).expanduser()
        recipe, reason = suited_recipe(
            chosen, path, start, _overrides(settings), options=options, skip_bad=skip_bad
        )
        assignment = Assignment(chosen, recipe, start, path, folder, skip_bad, reason)
        with progress_display(finetuning_line, as_json=False) as display:
            callback = PythonCallback(display, rows)
            if not folds:
                return _training_run(run_finetuning(assignment, callback))
            try:
                results = ran_to_their_end(run_trials(over_folds(assignment, folds), callback))
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
    tokens: int | None = None,
    size: str = "",
    objective: str = "",
    settings: Settings | None = None,
    sweep: Mapping[str, Sequence[object]] | None = None,
    stop_if_flat: bool = False,
) -> TrainingRun:
    """Pre-train an encoder, as `bertsmith pretrain` does; a run found in `out` resumes.

    The recipe "auto" is chosen for the budget, the text and this machine. A size (tiny, mini, small or base)
    sets its shape, and an objective (masked or replaced) sets its task.

    A sweep is one run per value of a recipe key; several keys form a grid: {"optim.peak_lr": [1e-3, 2e-3]}.
    Its hopeless runs end early. With `stop_if_flat`, so does a single run that learns only word frequencies.

    Example: bertsmith.pretrain("auto", store="store", out="runs/mine", minutes=30)
    """
    given = {"steps": steps, "minutes": minutes, "tokens": tokens}
    budgets = [(name, value) for name, value in given.items() if value is not None]
    if len(budgets) > 1:
        where = " and ".join(name for name, _ in budgets)
        raise UserError("a run has one budget", where=where, remedy="give one of them")
    short = [
        (f"`{name}`", line)
        for name, value in budgets
        for line in (f"run.{name}={value_text(value)}", f"run.budget={name}")
    ]
    store, out = Path(store).expanduser(), Path(out).expanduser()
    rows = RowFiles(as_arguments(pretrain, pretrain_verb))
    shown, started = dict[str, Metric](), time.monotonic()
    with python_words(rows), progress_display(partial(pretraining_line, shown), as_json=False) as display:
        chooses = check_auto(str(recipe), size=size, objective=objective, sweeps=sweep is not None)
        recipe_with = partial(_swept_recipe, recipe, _overrides(settings), short)
        callback = PythonCallback(display, rows)
        if sweep is not None:
            trials = trials_of(_points(sweep), recipe_with, store=store, out=out)
            for each in trials:
                shown |= declaration(each.recipe).own
            return _sweep_run(out, trials, callback)
        stopping = EarlyStopping(if_flat=stop_if_flat)
        if chooses:
            load = partial(_auto_base, _overrides(settings), short)
            chosen = auto_recipe(AutoRequest(load, store, out, size, objective), callback.on_message)
        else:
            chosen = recipe_with(())
        shown |= declaration(chosen).own
        result = run_pretraining(
            chosen, store=store, out=out, callback=callback, early_stopping=stopping, started=started
        )
    finished, metrics = result.state == "finished", {"held-out": result.held_out}
    if result.held_out_before:
        metrics["held-out before"] = result.held_out_before
    return TrainingRun(
        result.folder, finished, metrics, result.steps, result.seconds, early_end=result.early_end
    )


def _swept_recipe(
    recipe: Path | str, overrides: Sequence[str], options: Sequence[tuple[str, str]], swept: Sequence[str]
) -> Recipe:
    return load_recipe(recipe, overrides, options=options, swept=swept)


def _auto_base(
    overrides: Sequence[str],
    options: Sequence[tuple[str, str]],
    base: Path | str,
    below: Sequence[tuple[str, str]],
) -> Recipe:
    return load_recipe(base, overrides, options=[*below, *options])


def _points(sweep: Mapping[str, Sequence[object]]) -> list[dict[str, str]]:
    """Return the points of a grid given as lists of values."""
    texts: dict[str, list[str]] = {}
    for key, values in sweep.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            remedy = f'give a list: sweep={{"{key}": [...]}}'
            raise UserError(f"{key} has no list of values", key="sweep", remedy=remedy)
        # A string is written without quotes, as on the command line.
        texts[key] = [each if isinstance(each, str) else value_text(each) for each in values]
        if len(set(texts[key])) < len(texts[key]):
            raise UserError(f"{key} has a value twice", key="sweep", remedy="give each value once")
    if not texts:
        raise UserError("it names no key", key="sweep", remedy='as in sweep={"optim.peak_lr": [1e-3, 2e-3]}')
    return grid_points(texts)


def _sweep_run(out: Path, trials: Sequence[PretrainingTrial], callback: ProgressCallback) -> TrainingRun:
    """Return the best run of a sweep, with all the others."""
    try:
        outcomes = run_sweep(trials, callback)
    except Stopped:
        return TrainingRun(out, False, {}, 0, 0.0)
    runs = tuple(
        TrainingRun(
            each.folder,
            not (each.early_end or each.failure),
            {"held-out": each.held_out},
            each.steps,
            each.seconds,
            early_end=each.early_end or each.failure,
        )
        for each in outcomes
    )
    return replace(runs[0], trials=runs)


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
    base: Path | str | None = None,
) -> PredictionRun:
    """Evaluate a fine-tuned model, or an ensemble, on labelled data, as `bertsmith evaluate` does.

    Example: bertsmith.evaluate("runs/reviews", frame).metrics["accuracy"]
    """
    folders, rows = _folders(model), RowFiles(as_arguments(evaluate, evaluate_verb))
    with TemporaryDirectory() as place, python_words(rows):
        form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=",".join(columns))
        path, reading = rows.path(data, Path(place) / "data", "data"), Reading(form, skip_bad, split)
        kept = folders[0].with_name(f"{folders[0].name}-data.jsonl")
        if rows.names and path.is_file() and kept.is_file() and filecmp.cmp(path, kept, shallow=False):
            # These are the training data: with the run's own file, only the held-out rows are evaluated.
            path = kept
            rows.names[kept] = "data"
        opening = _opening(device, precision, base)
        file = predict_labelled(folders, path, reading=reading, **opening)
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
    base: Path | str | None = None,
) -> PredictionRun:
    """Predict for data with a fine-tuned model, or an ensemble, as `bertsmith predict` does.

    Example: pandas.DataFrame(bertsmith.predict("runs/reviews", frame).table())
    """
    rows = RowFiles(as_arguments(predict, predict_verb))
    with TemporaryDirectory() as place, python_words(rows):
        form = TableFormat.parse(delimiter=delimiter, encoding=encoding, columns=",".join(columns))
        path, reading = rows.path(data, Path(place) / "data", "data"), Reading(form, skip_bad, split)
        opening = _opening(device, precision, base)
        file = run_prediction(_folders(model), path, reading=reading, **opening)
        warnings = tuple(map(rows.in_python_words, file.warnings))
    return PredictionRun({}, file.skipped, warnings, file)


def _opening(device: str, precision: Precision, base: Path | str | None) -> Opening:
    return Opening(device=device, precision=precision, base=None if base is None else Path(base))


def _folders(model: Path | str | Sequence[Path | str]) -> list[Path]:
    given = [model] if isinstance(model, str | Path) else list(model)
    return [Path(folder).expanduser() for folder in given]


def _overrides(settings: Settings | None) -> list[str]:
    return [f"{key}={value_text(value)}" for key, value in (settings or {}).items()]
