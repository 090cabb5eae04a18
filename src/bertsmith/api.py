"""Training from Python, as the commands do it: data frames or files in, metrics and tables out.

Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews").metrics
"""

import filecmp
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bertsmith.api_rows import PythonCallback, RowFiles, Rows, python_words, rows_beside
from bertsmith.api_verbs import Shown
from bertsmith.cli.finetune import FinetuneRequest
from bertsmith.cli.finetune import live_line as finetuning_line
from bertsmith.cli.predict import EvaluateRequest, PredictRequest
from bertsmith.cli.pretrain import PretrainRequest
from bertsmith.cli.pretrain import live_line as pretraining_line
from bertsmith.cli.request import function_of, listed
from bertsmith.cli.spelling import as_arguments
from bertsmith.cli.terminal import progress_display
from bertsmith.core.errors import UserError
from bertsmith.core.measures import Metric
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.finetuning.finetune import finetune as run_finetuning
from bertsmith.finetuning.predict import (
    FilePredictions,
    predict_labelled,
    prediction_rows,
    with_texts,
    write_predictions,
)
from bertsmith.finetuning.predict import predict as run_prediction
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.pretrain import pretrain as run_pretraining
from bertsmith.studies.scheduler import Stopped
from bertsmith.studies.sweep import (
    PretrainingTrial,
    best_of,
    ran_to_their_end,
    run_sweep,
    run_trials,
    spread_of,
    spreads_of,
)
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.early_stopping import EarlyStopping

Settings = Mapping[str, object]
"""Recipe keys with their values: {"optim.peak_lr": 3e-5}."""


@dataclass(frozen=True, slots=True)
class TrainingRun(Shown):
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
    """Runs of the folds or seeds; `metrics` are then their means."""
    trials: tuple["TrainingRun", ...] = ()
    """All runs of a sweep, the best first; the other fields are the best run's."""
    early_end: str = ""
    """Reason for an early end, or ""."""

    def table(self) -> Rows:
        """Return a row per metric: split, metric, value; with folds also its standard deviation.

        For a sweep, return a row per run and metric. A failed fold or seed does not count.
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
                    values = [run.metrics[split][name] for run in self.folds if split in run.metrics]
                    row["deviation"] = spread_of(values).deviation
                rows.append(row)
        return rows

    def load(self, *, device: str = "auto") -> Bert:
        """Load the finished model; with folds, the best one."""
        if not self.finished:
            remedy = "make the same call again to resume it"
            raise UserError("this run is not finished", where=str(self.folder), remedy=remedy)
        return load(self.folder, device=device)

    def title(self) -> str:
        """Return the folder and the state of the run."""
        state = "finished" if self.finished else self.early_end or "stopped: the same call resumes it"
        return f"{self.folder} ({state}; {self.steps:,} steps)"


@dataclass(frozen=True, slots=True)
class PredictionRun(Shown):
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

    def title(self) -> str:
        """Return the metrics and the number of examples."""
        metrics = ", ".join(
            f"{name} {metric_named(name).text(value)}" for name, value in self.metrics.items()
        )
        return f"{metrics or 'predictions'}; {len(self._file.examples):,} examples"


@function_of(FinetuneRequest)
def finetune(request: FinetuneRequest) -> TrainingRun:
    """Fine-tune a model, as `bertsmith finetune` does; a run found in `out` resumes.

    Data are a path, a data frame (pandas, polars, Arrow), a list of dicts or a dict of columns. A dict of
    these by split is possible, too: {"train": ..., "dev": ...}. Data that are not a path are stored as JSON
    lines next to `out`, for the run to resume. The task is one of the papers ("sst2", "squad2", "ner") or
    "custom". For "custom", name the columns: text, label, and text2 for pairs; the kind is "classify",
    "multilabel" or "regress". The delimiter and columns of a file are detected unless you give them.

    Several seeds, a grid, a random search or folds are several runs (`trials`, `folds`).

    Example: bertsmith.finetune(frame, text="review", label="stars", out="runs/reviews", epochs=3)
    """
    folder = Path(request.out)
    with rows_beside(folder, as_arguments(FinetuneRequest)) as rows:
        data = rows.path(request.data, folder.with_name(f"{folder.name}-data"), "data")
        beside = folder.with_name(f"{folder.name}-dev")
        held = None if request.dev is None else rows.path(request.dev, beside, "dev")
        asked = replace(request, data=data, dev=held)
        assignment, trials = asked.runs()
        with progress_display(finetuning_line, as_json=False) as display:
            callback = PythonCallback(display, rows)
            if not trials:
                return _training_run(run_finetuning(assignment, callback))
            try:
                results = run_trials(trials, callback)
            except Stopped:
                return TrainingRun(folder, False, {}, 0, 0.0)
    return _study_run(folder, {each.name: one for each, one in zip(trials, results, strict=True)}, asked)


def _study_run(folder: Path, results: dict[str, FinetuningResult], request: FinetuneRequest) -> TrainingRun:
    """Return the best run of a grid or a random search, or the means over seeds or folds."""
    runs = {name: _training_run(result) for name, result in results.items()}
    best = best_of(results)
    if (request.grid or request.lr_grid or request.random) and best:
        others = [run for name, run in runs.items() if name != best]
        return replace(runs[best], trials=(runs[best], *others))
    means = {
        split: {name: spread.mean for name, spread in spreads.items()}
        for split, spreads in spreads_of(ran_to_their_end(results.values())).items()
    }
    steps, seconds = sum(each.steps for each in runs.values()), sum(each.seconds for each in runs.values())
    return TrainingRun(folder, True, means, steps, seconds, tuple(runs.values()))


def _training_run(result: FinetuningResult) -> TrainingRun:
    early_end, deciding = result.failure, result.deciding
    if result.early_end and deciding:
        early_end = result.early_end.reason(deciding[0])
    finished = result.finished and not early_end
    return TrainingRun(
        result.folder, finished, result.metrics, result.steps, result.seconds, early_end=early_end
    )


@function_of(PretrainRequest)
def pretrain(request: PretrainRequest) -> TrainingRun:
    """Pre-train an encoder, as `bertsmith pretrain` does; a run found in `out` resumes.

    The recipe "auto" is chosen for the budget, the text and this machine. A size (tiny, mini, small or base)
    sets its shape, and an objective (masked or replaced) sets its task.

    A sweep is one run per value of a recipe key; several keys form a grid: {"optim.peak_lr": [1e-3, 2e-3]}.
    Its hopeless runs end early. With `stop_if_flat`, so does a single run that learns only word frequencies.

    Example: bertsmith.pretrain("auto", store="store", out="runs/mine", minutes=30)
    """
    store, out, started = Path(request.store), Path(request.out), time.monotonic()
    rows, shown = RowFiles(as_arguments(PretrainRequest)), dict[str, Metric]()
    with python_words(rows), progress_display(partial(pretraining_line, shown), as_json=False) as display:
        callback = PythonCallback(display, rows)
        if trials := request.trials():
            for each in trials:
                shown |= declaration(each.recipe).own
            return _sweep_run(out, trials, callback)
        stopping = EarlyStopping(if_flat=request.stop_if_flat)
        recipe = request.recipe_for(callback.on_message)
        shown |= declaration(recipe).own
        result = run_pretraining(
            recipe, store=store, out=out, callback=callback, early_stopping=stopping, started=started
        )
    finished, metrics = result.state == "finished", {"held-out": result.held_out}
    if result.held_out_before:
        metrics["held-out before"] = result.held_out_before
    return TrainingRun(
        result.folder, finished, metrics, result.steps, result.seconds, early_end=result.early_end
    )


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


@function_of(EvaluateRequest)
def evaluate(request: EvaluateRequest) -> PredictionRun:
    """Evaluate a fine-tuned model, or an ensemble, on labelled data, as `bertsmith evaluate` does.

    Example: bertsmith.evaluate("runs/reviews", frame).metrics["accuracy"]
    """
    folders, rows = listed(request.model), RowFiles(as_arguments(EvaluateRequest))
    with TemporaryDirectory() as place, python_words(rows):
        path = rows.path(request.data, Path(place) / "data", "data")
        kept = folders[0].with_name(f"{folders[0].name}-data.jsonl")
        if rows.names and path.is_file() and kept.is_file() and filecmp.cmp(path, kept, shallow=False):
            # These are the training data: with the run's own file, only the held-out rows are evaluated.
            path = kept
            rows.names[kept] = "data"
        file = predict_labelled(folders, path, reading=request.reading, **request.opening)
        warnings = tuple(map(rows.in_python_words, file.warnings))
    return PredictionRun(file.metrics(), file.skipped, warnings, file)


@function_of(PredictRequest)
def predict(request: PredictRequest) -> PredictionRun:
    """Predict for data with a fine-tuned model, or an ensemble, as `bertsmith predict` does.

    Example: pandas.DataFrame(bertsmith.predict("runs/reviews", frame).table())
    """
    rows = RowFiles(as_arguments(PredictRequest))
    with TemporaryDirectory() as place, python_words(rows):
        path = rows.path(request.data, Path(place) / "data", "data")
        file = run_prediction(listed(request.model), path, reading=request.reading, **request.opening)
        warnings = tuple(map(rows.in_python_words, file.warnings))
    return PredictionRun({}, file.skipped, warnings, file)
