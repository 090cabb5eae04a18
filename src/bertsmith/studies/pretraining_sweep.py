"""Run a grid of settings over one pre-training recipe, end poor runs early, and rank the results.

Runs are compared by the fixed evaluation, which is the same for all recipes. Each run has its own folder. A
run that is finished or was ended early is not repeated.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path, write_json
from bertsmith.core.measures import Metric
from bertsmith.corpus.token_store import TokenStore
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.initial_model import with_true_model
from bertsmith.pretraining.pretrain import check_same_run, pretrain
from bertsmith.pretraining.run_setup import run_folder
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.toml_text import value_text
from bertsmith.studies.median_stopping import MEDIAN_STOPPING_NOTE, MedianStopping
from bertsmith.studies.sweep import Stopped, check_no_stop
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.distributed import refuse_several_processes
from bertsmith.training.early_stopping import EarlyStopping
from bertsmith.training.journal import read_metrics

SWEEP_FILE, PICTURE_FILE = "sweep.json", "sweep.png"
log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class PretrainingTrial:
    """One run of a sweep."""

    name: str
    recipe: Recipe
    out: Path


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of one run of a sweep, from its journal."""

    name: str
    folder: Path
    steps: int
    tokens: int
    seconds: float
    held_out: dict[str, float]
    """Metrics of the last held-out evaluation."""
    evaluated_steps: list[int]
    losses: list[float]
    """Value of the deciding metric at each evaluated step."""
    early_end: str
    """Reason for an early end, or empty."""


def points_of(sweep: Mapping[str, Sequence[object]] | Sequence[str]) -> list[dict[str, str]]:
    """Return the points of a grid: keys with lists of values, or texts such as optim.peak_lr=1e-3,2e-3."""
    if not isinstance(sweep, Mapping):
        return grid_points(_read_grid(sweep))
    texts: dict[str, list[str]] = {}
    for key, values in sweep.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            remedy = f'give a list: sweep={{"{key}": [...]}}'
            raise UserError(f"{key} lacks a list of values", key="sweep", remedy=remedy)
        # A string is written without quotes, as on the command line.
        texts[key] = [each if isinstance(each, str) else value_text(each) for each in values]
        if len(set(texts[key])) < len(texts[key]):
            raise UserError(f"{key} has a value twice", key="sweep", remedy="give each value once")
    if not texts:
        raise UserError(
            "it is empty", key="sweep", remedy='for example sweep={"optim.peak_lr": [1e-3, 2e-3]}'
        )
    return grid_points(texts)


def _read_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        found = [each.strip() for each in listed.split(",")]
        if not equals or not key.strip() or not all(found):
            remedy = "write a key and its values: `sweep=optim.peak_lr=1e-3,2e-3,4e-3`"
            raise UserError(f"{text!r} does not name values of a key", key="sweep", remedy=remedy)
        if key.strip() in values or len(set(found)) < len(found):
            raise UserError(f"{key.strip()} has a value twice", key="sweep", remedy="give each value once")
        values[key.strip()] = found
    return values


def grid_points(values: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return every combination of one value per key."""
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def trials_of(
    points: Sequence[Mapping[str, str]], recipe_with: Callable[[Sequence[str]], Recipe], *, out: Path
) -> list[PretrainingTrial]:
    """Return a trial for each point of a grid; `recipe_with` applies `key=value` settings to the recipe."""
    return [
        PretrainingTrial(name, recipe_with([f"{key}={value}" for key, value in point.items()]), out / name)
        for point in points
        for name in [trial_name(point)]
    ]


def trial_name(point: Mapping[str, str]) -> str:
    """Return the folder name of a grid point: the last part of each key with its value."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in point.items()]
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts)).strip("-")


def run_sweep(
    trials: Sequence[PretrainingTrial], *, store: Path, callback: ProgressCallback
) -> list[TrialOutcome]:
    """Run all unfinished trials one after the other; return the outcomes, the best first."""
    refuse_several_processes("the runs of a sweep have one process each")
    _check(trials, store)
    outcomes: list[TrialOutcome] = []
    callback.on_message(f"a run at the unigram line ends early; {MEDIAN_STOPPING_NOTE}")
    with StopRequested(callback.on_signal) as stop:
        for number, trial in enumerate(trials, start=1):
            callback.on_message(f"[{number}/{len(trials)}] {trial.name}")
            if run_folder(trial.out).begun and outcome_of(trial).early_end:
                callback.on_message(f"{trial.out} was already ended early: there is nothing to do")
            else:
                rule = stopping_rule(declaration(trial.recipe).deciding, outcomes)
                stopping = EarlyStopping(if_flat=True, rule=rule)
                result = pretrain(
                    trial.recipe, store=store, out=trial.out, callback=callback, early_stopping=stopping
                )
                if result.state == "stopped" and not result.early_end:
                    raise Stopped(trial.name)
            outcomes.append(outcome_of(trial))
            if number < len(trials):
                check_no_stop(stop, trial.name)
    metric = declaration(trials[0].recipe).deciding
    ranked = ranking(outcomes, metric)
    place = trials[0].out.parent
    rows = [{**asdict(each), "folder": each.folder.name} for each in ranked]
    write_json(place / SWEEP_FILE, {"metric": metric.name, "runs": rows})
    draw_sweep(place / PICTURE_FILE, outcomes, metric)
    return ranked


def _check(trials: Sequence[PretrainingTrial], store: Path) -> None:
    """Raise before the first run, not after hours of training, if a folder contains something else."""
    place, opened = trials[0].out.parent, TokenStore.open(store)
    if run_folder(place).begun:
        remedy = "give `out` a new folder"
        raise UserError("contains a single run and cannot hold others", where=str(place), remedy=remedy)
    if len({trial.out for trial in trials}) < len(trials):
        remedy = "sweep over other keys"
        raise UserError("two runs of the sweep have the same name", key="sweep", remedy=remedy)
    for trial in trials:
        check_same_run(run_folder(trial.out), with_true_model(trial.recipe), opened)


def stopping_rule(metric: Metric, before: Sequence[TrialOutcome]) -> Callable[[Sequence[float]], str]:
    """Return a rule that gives the reason to end a run early by its losses so far, or "".

    The rule compares with the earlier runs that were not ended early.
    """
    median = MedianStopping(metric, [each.losses for each in before if not each.early_end])

    def rule(losses: Sequence[float]) -> str:
        end = median(losses)
        if end is None:
            return ""
        return (
            f"at evaluation {end.evaluation} the best held-out loss is {end.best:.3f}, worse than the median "
            f"of the runs before, {end.median:.3f} (median stopping rule)"
        )

    return rule


def outcome_of(trial: PretrainingTrial) -> TrialOutcome:
    """Read the outcome of a trial from its journal."""
    entries = read_metrics(trial.out)
    last: dict[str, dict[str, Any]] = {line["kind"]: line for line in entries}
    ends = [line for line in entries if line["kind"] == "event" and "state" in line]
    metric = declaration(trial.recipe).deciding.name
    held_out, trained = last.get("held-out", {}), last.get("train", {})
    evaluated = [line for line in entries if line["kind"] == "held-out" and line["step"] and metric in line]
    return TrialOutcome(
        name=trial.name,
        folder=trial.out,
        steps=trained.get("step", 0),
        tokens=trained.get("tokens", 0),
        seconds=trained.get("seconds", 0.0),
        held_out={name: value for name, value in held_out.items() if isinstance(value, float)},
        evaluated_steps=[line["step"] for line in evaluated],
        losses=[line[metric] for line in evaluated],
        early_end=ends[-1].get("early_end", "") if ends else "",
    )


def ranking(outcomes: Sequence[TrialOutcome], metric: Metric) -> list[TrialOutcome]:
    """Sort runs: completed ones first, then early-ended ones, each with the best by the metric first."""
    sign = -1 if metric.larger_is_better else 1
    return sorted(
        outcomes,
        key=lambda each: (bool(each.early_end), sign * each.losses[-1] if each.losses else float("inf")),
    )


def draw_sweep(path: Path, outcomes: Sequence[TrialOutcome], metric: Metric) -> None:
    """Draw the losses of all runs by step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("the picture is not drawn: pip install bertsmith[plots]")
        return
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for outcome in outcomes:
        ended = ", ended early" if outcome.early_end else ""
        now = f" ({outcome.losses[-1]:.3f}{ended})" if outcome.losses else ended
        style = "--" if outcome.early_end else "-"
        axes.plot(
            outcome.evaluated_steps, outcome.losses, style, marker="o", ms=3.5, label=f"{outcome.name}{now}"
        )
    axes.set_title(metric.label, loc="left", fontsize=11, weight="bold")
    axes.set_xlabel("step")
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
