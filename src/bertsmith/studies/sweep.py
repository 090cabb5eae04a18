"""Runs of one recipe with different settings, each in a folder of its own: seeds, folds, grids and searches.

In this order: what a trial is, the trials of both jobs, how all are run, and what they come to. Finished runs
are not repeated. A run that fails is a result with its reason, and ends no other. Poor trials of a search end
early by the median stopping rule of Google Vizier.
"""

import logging
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from bertsmith.core.errors import UserError, in_file
from bertsmith.core.files import atomic_path, write_json
from bertsmith.core.measures import Metric
from bertsmith.core.seeds import stream
from bertsmith.corpus.token_store import TokenStore
from bertsmith.finetuning.assignment import Assignment, check_same_run, finetuning_folder
from bertsmith.finetuning.finetune import FinetuningResult, finetune
from bertsmith.inference.model_path import SPREAD_FILE
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining import pretrain as pretraining
from bertsmith.pretraining.initial_model import with_true_model
from bertsmith.pretraining.pretrain import PretrainingResult
from bertsmith.pretraining.run_setup import run_folder
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.toml_text import value_text
from bertsmith.recipe.validation_errors import user_error
from bertsmith.studies.scheduler import Stopped
from bertsmith.studies.stages import reporting_lack_of_memory
from bertsmith.tasks.custom import custom_task, spec_of
from bertsmith.tasks.stratified_split import DEV
from bertsmith.tasks.task import read_split
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.distributed import refuse_several_processes
from bertsmith.training.early_stopping import EarlyEnd, EarlyStopping, StoppingRule, evaluated_values
from bertsmith.training.run_folder import RunFolder

SWEEP_FILE, PICTURE_FILE = "sweep.json", "sweep.png"
log = logging.getLogger("bertsmith")
GRID: dict[str, tuple[Any, ...]] = {
    "run.examples": (16, 32),
    "optim.peak_lr": (5e-5, 3e-5, 2e-5),
    "run.epochs": (2.0, 3.0, 4.0),
}
"""Settings of the full grid (Devlin et al. 2018, A.3)."""


RATES: dict[str, tuple[Any, ...]] = {"optim.peak_lr": (5e-5, 4e-5, 3e-5, 2e-5)}
"""Learning rates for GLUE; the best on the development set counts (Devlin et al. 2018, 4.1)."""
SEARCHED = ("optim.peak_lr", "run.examples", "run.epochs")
MIN_RATE, MAX_RATE = 1e-5, 1e-4
"""Range of a random search's learning rates, drawn uniformly on a logarithmic scale."""
OWN_RATES, OWN_PASSES = 3.0, (0.5, 1.0, 2.0)
"""Range of learning rates and choices of epochs on a user's own data, as factors of the recipe's values."""


MIN_TRIALS = 3
"""Minimum number of completed trials for a meaningful median; Vizier's paper leaves it open."""
MEDIAN_STOPPING_NOTE = (
    f"after {MIN_TRIALS} complete trials, one ends early if its best is worse than the median of their "
    "means up to the same evaluation (median stopping rule, Golovin et al. 2017)"
)


# ---- trials


@dataclass(frozen=True, slots=True)
class Trial:
    """One fine-tuning run of several."""

    name: str
    assignment: Assignment
    may_end_early: bool = False
    """True for a trial of a search; poor trials of a search end early."""

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""
        return finetuning_folder(self.assignment.out)

    def check_same_run(self) -> None:
        """Raise if the folder contains another run."""
        check_same_run(self.assignment)

    def run(self, callback: ProgressCallback, rule: StoppingRule | None) -> FinetuningResult:
        """Fine-tune, or resume."""
        return finetune(self.assignment, callback, stopping=rule)

    def failed(self, reason: str) -> FinetuningResult:
        """Return a result without metrics."""
        return FinetuningResult(self.assignment.out, True, {}, 0.0, 0, 0, failure=reason)

    def metric(self, results: Sequence[FinetuningResult]) -> Metric:
        """Return the deciding metric: for a user's own tagged spans, it is not the task's."""
        deciding = results[0].deciding if results else None
        return self.assignment.task.deciding_metric if deciding is None else deciding[0]


@dataclass(frozen=True, slots=True)
class PretrainingTrial:
    """One pre-training run of several."""

    name: str
    recipe: Recipe
    out: Path
    store: Path
    may_end_early: bool = True

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""
        return run_folder(self.out)

    def check_same_run(self) -> None:
        """Raise if the folder contains another run."""
        pretraining.check_same_run(self.folder, with_true_model(self.recipe), TokenStore.open(self.store))

    def run(self, callback: ProgressCallback, rule: StoppingRule | None) -> PretrainingResult:
        """Pre-train, or resume; a run at the unigram line ends early."""
        stopping = EarlyStopping(if_flat=True, rule=rule)
        return pretraining.pretrain(
            self.recipe, store=self.store, out=self.out, callback=callback, early_stopping=stopping
        )

    def failed(self, reason: str) -> PretrainingResult:
        """Return a result without metrics."""
        return PretrainingResult(self.out, "finished", declared=declaration(self.recipe), failure=reason)

    def metric(self, _results: Sequence[PretrainingResult] = ()) -> Metric:
        """Return the deciding metric, of the fixed evaluation: it is the same for all recipes."""
        return declaration(self.recipe).deciding


AnyResult = FinetuningResult | PretrainingResult
Value = TypeVar("Value")
Found = TypeVar("Found", FinetuningResult, PretrainingResult)


@dataclass(frozen=True, slots=True)
class MedianStopping:
    """The median stopping rule, with the completed trials that it compares to.

    Golovin et al. 2017, 3.2.2: a trial is stopped at a step if its best value until then is strictly worse
    than the median, over the completed trials, of the mean of their values up to the same step.
    """

    metric: Metric
    curves: Sequence[Sequence[float]]
    """Values of each trial at its evaluations; compared by evaluation number, because steps differ."""

    def __call__(self, values: Sequence[float]) -> EarlyEnd | None:
        """Return the early end of a trial with these values so far, or None if it continues."""
        number = len(values)
        means = [statistics.fmean(curve[:number]) for curve in self.curves if len(curve) >= number]
        if len(means) < MIN_TRIALS:
            return None
        best = max(values) if self.metric.larger_is_better else min(values)
        median = statistics.median(means)
        return EarlyEnd(number, best, median) if self.metric.is_better(median, than=best) else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over several runs."""

    mean: float
    median: float
    deviation: float | None
    """Standard deviation of the sample; None for a single run."""
    least: float
    most: float
    runs: int


def in_turn(trials: Sequence[Trial | PretrainingTrial], callback: ProgressCallback) -> list[AnyResult]:
    """Run all unfinished trials one after the other, and return the results of all; raise if all failed."""
    refuse_several_processes("the runs of a study have one process each")
    # Check all before the first run, so that another run in a folder is not found after hours of training.
    for trial in trials:
        trial.check_same_run()
        study = replace(trial.folder, path=trial.folder.path.parent)
        if study.begun:  # opening the folder would open that run, not the best of these
            what, remedy = "contains a single run and cannot hold others", "give `out` a new folder"
            raise UserError(what, where=str(study.path), remedy=remedy)
    results: list[Any] = []
    errors: list[UserError] = []
    if any(trial.may_end_early for trial in trials):
        callback.on_message(MEDIAN_STOPPING_NOTE)
    if any(isinstance(trial, PretrainingTrial) for trial in trials):
        callback.on_message("a run at the unigram line ends early")
    with StopRequested(callback.on_signal) as stop:
        for number, trial in enumerate(trials, start=1):
            callback.on_message(f"[{number}/{len(trials)}] {trial.name}")
            place = trial.folder.path.parent
            before = ran_to_their_end([each for each in results if each.folder.parent == place])
            metric = trial.metric(before)
            curves = [list(evaluated_values(each.folder, metric).values()) for each in before]
            rule = MedianStopping(metric, curves) if trial.may_end_early else None
            try:
                with reporting_lack_of_memory():
                    result: AnyResult = trial.run(callback, rule)
            except UserError as error:
                callback.on_message(f"{trial.name} failed: {error.line()}")
                errors.append(error)
                result = trial.failed(error.spelled(in_file).line())
            results.append(result)
            # Asked even in the last step of a run: the next one is not begun.
            if not result.finished or (stop.here and number < len(trials)):
                raise Stopped(trial.name)
    if len(errors) == len(trials):
        raise UserError("all runs failed", remedy="see the reasons above") from errors[0]
    return results


def run_trials(trials: Sequence[Trial], callback: ProgressCallback) -> list[FinetuningResult]:
    """Run all unfinished trials, write their spread next to their folders, and return all results."""
    results = cast(list[FinetuningResult], in_turn(trials, callback))
    for place in dict.fromkeys(result.folder.parent for result in results):
        here = {each.folder.name: each for each in results if each.folder.parent == place}
        facts = {
            "runs": {name: result.metrics for name, result in here.items()},
            "best": best_of(here),
            "spreads": plain_spreads(spreads_of(ran_to_their_end(here.values()))),
            "ended_early": early_ends(here),
            "failed": failures(here),
        }
        write_json(place / SPREAD_FILE, facts)
    return results


def early_ends(results: Mapping[str, FinetuningResult]) -> dict[str, dict[str, float]]:
    """Return, for JSON, the step and the reason of each early end."""
    return {
        name: {"step": result.steps, **asdict(result.early_end)}
        for name, result in results.items()
        if result.early_end is not None
    }


def failures(results: Mapping[str, AnyResult]) -> dict[str, str]:
    """Return, for JSON, the reason of each run that failed."""
    return {name: result.failure for name, result in results.items() if result.failure}


def ran_to_their_end(results: Iterable[Found]) -> list[Found]:
    """Return the runs that neither failed nor were ended early."""
    return [result for result in results if not result.early_end and not result.failure]


def over_seeds(assignment: Assignment, seeds: int) -> list[Trial]:
    """Return the run with `seeds` consecutive seeds, from its own seed on."""
    first = assignment.recipe.run.seed
    return [_trial(assignment, {"run.seed": seed}, f"seed-{seed}") for seed in range(first, first + seeds)]


def over_folds(assignment: Assignment, folds: int) -> list[Trial]:
    """Return the run with each fold of a user's own table as the development set."""
    spec = spec_of(assignment.task.custom)
    trials = []
    for fold in range(folds):
        task = custom_task(replace(spec, folds=folds, fold=fold), assignment.task.form)
        trials.append(_trial(replace(assignment, task=task), {}, f"fold-{fold}"))
    # Read once before any message: a table may have too few rows.
    read_split(trials[0].assignment.task, assignment.data, DEV, skip_bad=assignment.skip_bad)
    return trials


def over_grid(assignment: Assignment, grid: Mapping[str, Sequence[Any]] | None = None) -> list[Trial]:
    """Return the run with every combination of the grid's settings, by default the paper's."""
    points = grid_points(GRID if grid is None else grid)
    return [
        _trial(assignment, point, name_of({key: f"{value:g}" for key, value in point.items()}))
        for point in points
    ]


def over_search(assignment: Assignment, trials: int) -> list[Trial]:
    """Return the run with this many random settings, which depend only on the recipe.

    For a user's own data they are drawn around the recipe's learning rate and epochs.
    """
    found, recipe = [], assignment.recipe
    least, most, choices = MIN_RATE, MAX_RATE, GRID
    if assignment.task.own:
        least, most = recipe.optim.peak_lr / OWN_RATES, recipe.optim.peak_lr * OWN_RATES
        choices = {**GRID, "run.epochs": tuple(recipe.run.epochs * factor for factor in OWN_PASSES)}
    for number in range(trials):
        draw = stream(recipe.run.seed, "search", number)
        rate = least * (most / least) ** float(draw.random())
        values: dict[str, Any] = {"optim.peak_lr": float(f"{rate:.2e}")}
        for key in ("run.examples", "run.epochs"):
            values[key] = choices[key][int(draw.integers(len(choices[key])))]
        found.append(replace(_trial(assignment, values, f"trial-{number}"), may_end_early=True))
    return found


def spread_of(values: Sequence[float]) -> Spread:
    """Compute mean, median and spread of a metric over runs."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    mean, median = statistics.mean(values), statistics.median(values)
    return Spread(mean, median, deviation, min(values), max(values), len(values))


def spreads_of(results: Sequence[FinetuningResult]) -> dict[str, dict[str, Spread]]:
    """Return the spread over the runs for each split and metric."""

    def spread(split: str, metric: str) -> Spread:
        return spread_of([result.metrics[split][metric] for result in results])

    return {
        split: {metric: spread(split, metric) for metric in metrics}
        for split, metrics in (results[0].metrics if results else {}).items()
    }


def mean_baselines(results: Sequence[FinetuningResult]) -> dict[str, dict[str, float]]:
    """Return the constant answer's scores by split, as means over the runs, which differ for folds."""
    found = {split: [result.baselines.get(split, {}) for result in results] for split in results[0].metrics}
    return {
        split: {
            name: statistics.fmean(each[name] for each in of_split)
            for name in of_split[0]
            if all(name in each for each in of_split)
        }
        for split, of_split in found.items()
    }


def plain_spreads(spreads: Mapping[str, Mapping[str, Spread]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return spreads in a form for JSON."""
    return {
        split: {metric: asdict(spread) for metric, spread in metrics.items()}
        for split, metrics in spreads.items()
    }


def best_of(results: Mapping[str, FinetuningResult]) -> str:
    """Return the best run's name by the deciding metric of the first split; empty if a run lacks it."""
    found = {name: each.deciding for name, each in results.items() if ran_to_their_end([each])}
    values = {name: each[1] for name, each in found.items() if each is not None}
    metrics = [each[0] for each in found.values() if each is not None]
    if not values or len(values) < len(found):
        return ""
    best = max if metrics[0].larger_is_better else min
    return best(values, key=lambda name: values[name])


def name_of(point: Mapping[str, str]) -> str:
    """Return the folder name of a point of a grid: the last part of each key with its value."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in point.items()]
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts)).strip("-")


def _trial(assignment: Assignment, changed: Mapping[str, Any], name: str) -> Trial:
    # The final states of many runs would fill a disk; only a single run keeps its state, to be extended.
    recipe = with_values(assignment.recipe, {**changed, "run.keep_state": False})
    reason = "" if {"optim.peak_lr", "run.epochs", "run.examples"} & changed.keys() else assignment.reason
    return Trial(name, replace(assignment, recipe=recipe, out=assignment.out / name, reason=reason))


def with_values(recipe: FinetuningRecipe, changed: Mapping[str, Any]) -> FinetuningRecipe:
    """Return the recipe with other values for some dotted keys."""
    values = recipe.model_dump()
    for key, value in changed.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    try:
        return FinetuningRecipe.model_validate(values)
    except ValidationError as error:
        raise user_error(error, values, {}, FinetuningRecipe) from error


# ---- a grid of pre-training runs


def points_of(sweep: Mapping[str, Sequence[object]] | Sequence[str]) -> list[dict[str, str]]:
    """Return the points of a grid: keys with lists of values, or texts such as optim.peak_lr=1e-3,2e-3."""
    listed: list[tuple[str, list[str]]] = []
    if isinstance(sweep, Mapping):
        for key, values in sweep.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                remedy = f'give a list: sweep={{"{key}": [...]}}'
                raise UserError(f"{key} lacks a list of values", key="sweep", remedy=remedy)
            # A string is written without quotes, as on the command line.
            listed.append((key, [each if isinstance(each, str) else value_text(each) for each in values]))
    else:
        for text in [sweep] if isinstance(sweep, str) else sweep:
            key, _, values = text.partition("=")
            listed.append((key.strip(), [each.strip() for each in values.split(",")]))
            if not key.strip() or not all(listed[-1][1]):
                remedy = "write a key and its values: `sweep=optim.peak_lr=1e-3,2e-3,4e-3`"
                raise UserError(f"{text!r} does not name values of a key", key="sweep", remedy=remedy)
    if not listed:
        remedy = 'for example sweep={"optim.peak_lr": [1e-3, 2e-3]}'
        raise UserError("it is empty", key="sweep", remedy=remedy)
    keys = [key for key, _ in listed]
    for key, found in listed:
        if keys.count(key) > 1 or len(set(found)) < len(found):
            raise UserError(f"{key} has a value twice", key="sweep", remedy="give each value once")
    return grid_points(dict(listed))


def grid_points(values: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Return every combination of one value per key."""
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def trials_of(
    points: Sequence[Mapping[str, str]],
    recipe_with: Callable[[Sequence[str]], Recipe],
    *,
    store: Path,
    out: Path,
) -> list[PretrainingTrial]:
    """Return a trial for each point of a grid; `recipe_with` applies `key=value` settings to the recipe."""
    trials = []
    for point in points:
        name, recipe = name_of(point), recipe_with([f"{key}={value}" for key, value in point.items()])
        trials.append(PretrainingTrial(name, recipe, out / name, store))
    if len({trial.out for trial in trials}) < len(trials):
        what, remedy = "two runs of the sweep have the same name", "sweep over other keys"
        raise UserError(what, key="sweep", remedy=remedy)
    return trials


def run_sweep(trials: Sequence[PretrainingTrial], callback: ProgressCallback) -> list[PretrainingResult]:
    """Run all unfinished trials, write their table and picture, and return the results, the best first."""
    results = cast(list[PretrainingResult], in_turn(trials, callback))
    metric, place = trials[0].metric(), trials[0].out.parent
    curves = {each.folder.name: evaluated_values(each.folder, metric) for each in results}
    ranked = ranking(results, metric)
    rows = [{**row_of(each), "losses": curves[each.folder.name]} for each in ranked]
    write_json(place / SWEEP_FILE, {"metric": metric.name, "runs": rows})
    ended = {each.folder.name for each in results if each.early_end}
    draw_sweep(place / PICTURE_FILE, curves, metric, ended)
    return ranked


def row_of(result: PretrainingResult) -> dict[str, Any]:
    """Return the result of a trial for JSON."""
    names = ("steps", "tokens", "seconds", "held_out", "early_end", "failure")
    return {"name": result.folder.name, **{name: getattr(result, name) for name in names}}


def ranking(results: Sequence[PretrainingResult], metric: Metric) -> list[PretrainingResult]:
    """Sort runs: completed ones first, then those ended early, then failures, each with the best first."""
    sign = -1 if metric.larger_is_better else 1

    def key(each: PretrainingResult) -> tuple[bool, bool, float]:
        return bool(each.failure), bool(each.early_end), sign * each.held_out.get(metric.name, sign * inf)

    return sorted(results, key=key)


def draw_sweep(
    path: Path, curves: Mapping[str, Mapping[int, float]], metric: Metric, ended: Collection[str]
) -> None:
    """Draw the losses of all runs by step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("the picture is not drawn: pip install bertsmith[plots]")
        return
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for name, losses in curves.items():
        early, style = (", ended early", "--") if name in ended else ("", "-")
        label = f"{name} ({[*losses.values()][-1]:.3f}{early})" if losses else f"{name}{early}"
        axes.plot([*losses], [*losses.values()], style, marker="o", ms=3.5, label=label)
    axes.set_title(metric.label, loc="left", fontsize=11, weight="bold")
    axes.set_xlabel("step")
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
