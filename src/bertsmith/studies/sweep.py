"""Studies of many fine-tuning runs, each with its own folder; finished runs are not repeated."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import write_json
from bertsmith.core.seeds import stream
from bertsmith.finetuning.assignment import Assignment, check_same_run, finetuning_folder
from bertsmith.finetuning.finetune import FinetuningResult, evaluated_values, finetune
from bertsmith.inference.model_path import SPREAD_FILE
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.studies.median_stopping import MEDIAN_STOPPING_NOTE, MedianStopping
from bertsmith.tasks.custom import custom_task, spec_of
from bertsmith.tasks.stratified_split import DEV
from bertsmith.tasks.task import read_split
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.distributed import refuse_several_processes

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


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a study."""

    name: str
    assignment: Assignment
    may_end_early: bool = False
    """True for a trial of a search; poor trials of a search end early."""


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


class Stopped(Exception):
    """A run of the study was asked to stop; finished runs are kept."""


def check_no_stop(stop: StopRequested, name: str) -> None:
    """Raise if the study was asked to stop, even in the last step of a run, before the next run."""
    if stop.here:
        raise Stopped(name)


def run_trials(trials: Sequence[Trial], callback: ProgressCallback) -> list[FinetuningResult]:
    """Run all unfinished trials one after the other, and return the results of all trials.

    Poor trials of a search end early, compared with the trials before. The spread is written next to the
    folders of the trials.
    """
    refuse_several_processes("the runs of a study have one process each")
    # Check all before the first run, so that another run in a folder is not found after hours of training.
    for trial in trials:
        check_same_run(trial.assignment)
        study = trial.assignment.out.parent
        if finetuning_folder(study).begun:  # opening the folder would open that run, not the best of these
            remedy = "give `out` a new folder"
            raise UserError("contains a single run and cannot hold others", where=str(study), remedy=remedy)
    results: list[FinetuningResult] = []
    if any(trial.may_end_early for trial in trials):
        callback.on_message(MEDIAN_STOPPING_NOTE)
    with StopRequested(callback.on_signal) as stop:
        for number, trial in enumerate(trials, start=1):
            callback.on_message(f"[{number}/{len(trials)}] {trial.name}")
            rule = _stopping_rule(trial, results) if trial.may_end_early else None
            result = finetune(trial.assignment, callback, stopping=rule)
            if not result.finished:
                raise Stopped(trial.name)
            results.append(result)
            if number < len(trials):
                check_no_stop(stop, trial.name)
    for place in dict.fromkeys(result.folder.parent for result in results):
        here = {each.folder.name: each for each in results if each.folder.parent == place}
        facts = {
            "runs": {name: result.metrics for name, result in here.items()},
            "best": best_of(here),
            "spreads": plain_spreads(spreads_of(ran_to_their_end(here.values()))),
            "ended_early": early_ends(here),
        }
        write_json(place / SPREAD_FILE, facts)
    return results


def _stopping_rule(trial: Trial, before: Sequence[FinetuningResult]) -> MedianStopping:
    """Return the rule that may end a trial early, from the earlier trials in its folder."""
    beside = ran_to_their_end([each for each in before if each.folder.parent == trial.assignment.out.parent])
    # For a user's own tagged spans, another metric decides than the task's.
    deciding = beside[0].deciding if beside else None
    metric = trial.assignment.task.deciding_metric if deciding is None else deciding[0]
    return MedianStopping(metric, [evaluated_values(result.folder, metric) for result in beside])


def early_ends(results: Mapping[str, FinetuningResult]) -> dict[str, dict[str, float]]:
    """Return, for JSON, the step and the reason of each early end."""
    return {
        name: {"step": result.steps, **asdict(result.early_end)}
        for name, result in results.items()
        if result.early_end is not None
    }


def ran_to_their_end(results: Iterable[FinetuningResult]) -> list[FinetuningResult]:
    """Return the runs that were not ended early."""
    return [result for result in results if result.early_end is None]


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
    chosen = GRID if grid is None else grid
    trials = []
    for values in product(*chosen.values()):
        changed = dict(zip(chosen, values, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{value:g}" for key, value in changed.items())
        trials.append(_trial(assignment, changed, name))
    return trials


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
        for split, metrics in results[0].metrics.items()
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
    found = {name: result.deciding for name, result in results.items() if result.early_end is None}
    values = {name: each[1] for name, each in found.items() if each is not None}
    metrics = [each[0] for each in found.values() if each is not None]
    if len(values) < len(found):
        return ""
    best = max if metrics[0].larger_is_better else min
    return best(values, key=lambda name: values[name])


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
    return FinetuningRecipe.model_validate(values)
