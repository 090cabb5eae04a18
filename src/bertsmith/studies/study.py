"""A study: many trials that answer one question, made from cells, and its report.

All work of a study is planned before anything runs. A failed trial is a row with its reason.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

from bertsmith.core.errors import UserError
from bertsmith.core.files import lock_for_this_process, open_lock_file, read_json, write_json, write_text
from bertsmith.insight.report import Report, write_report
from bertsmith.studies.cells import Cells, Failure, Outcome, Result, Stage, distinct
from bertsmith.studies.scheduler import Places, Scheduler, State
from bertsmith.training.callbacks import ProgressCallback, SilentCallback

STATUS, LOCK = "study.json", ".lock"
SECONDS_BETWEEN_WRITES = 2.0


class Seeds(NamedTuple):
    """The two seeds of a run."""

    pretraining: int
    finetuning: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to train, over all its seeds."""

    name: str
    stages: Mapping[Seeds, Stage]
    """Last stage by seeds; empty if the recipe is impossible."""
    table: str = ""
    """Title of the table that the trial belongs to; trials of a table are compared with its first."""
    impossible: Failure | None = None
    """The reason why the trial cannot run."""


@dataclass(frozen=True)
class Row:
    """A trial with its outcomes."""

    trial: Trial
    outcomes: Mapping[Seeds, Outcome]

    @cached_property
    def results(self) -> dict[Seeds, Result]:
        """Return the results of the successful runs."""
        return {seeds: each.result for seeds, each in self.outcomes.items() if each.result is not None}

    @cached_property
    def failures(self) -> list[str]:
        """Return the reason of each failed run."""
        if self.trial.impossible is not None:
            return [self.trial.impossible.reason]
        return [each.failure.reason for each in self.outcomes.values() if each.failure is not None]

    def values(self, metric: str) -> dict[Seeds, float]:
        """Return a metric on the deciding split by seeds."""
        measured = {
            seeds: each.metrics[each.split][metric]
            for seeds, each in self.results.items()
            if metric in each.metrics.get(each.split, {})
        }
        return {seeds: value for seeds, value in measured.items() if isfinite(value)}


class Study(Protocol):
    """One question: a file for each study."""

    def trials(self) -> list[Trial]:
        """Return all trials, planned before anything runs."""

    def report(self, rows: Sequence[Row]) -> Report:
        """Return its tables; failed trials are rows, too."""


def run_study(  # noqa: PLR0913 - a study, and all that it needs of the machine
    study: Study,
    out: Path,
    cells: Cells,
    places: Places,
    callback: ProgressCallback,
    *,
    keeps_models: bool = False,
) -> Report:
    """Make the missing cells, and write and return the report; a failed cell does not stop others.

    Models are removed when runs of the study do not need them any more, unless it keeps them.
    """
    trials = study.trials()
    stages = distinct(stage for trial in trials for stage in trial.stages.values())
    _check(trials, stages.values(), places)
    handle = open_lock_file(out / LOCK)
    try:
        _lock(handle, out)
        status = StatusFile(out, trials)
        scheduler = Scheduler(cells, places, stages, callback, status.write, keeps_models)
        status.write(scheduler, now=True)
        try:
            scheduler.run()
        finally:
            status.write(scheduler, now=True)
        rows = rows_of(trials, scheduler.outcomes)
        report = study.report(rows)
        write_report(report, out)
        write_text(out / f"{report.name}.md", report.markdown())
        return report
    finally:
        os.close(handle)


def rows_of(trials: Sequence[Trial], outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Return a row for each trial; several seeds of one stage, which does not depend on them, are one run."""
    rows = []
    for trial in trials:
        first: dict[str, Seeds] = {}
        for seeds, stage in trial.stages.items():
            first.setdefault(stage.key, seeds)
        rows.append(Row(trial, {seeds: outcomes[key] for key, seeds in first.items()}))
    return rows


def _check(trials: Sequence[Trial], stages: Iterable[Stage], places: Places) -> None:
    """Raise if all trials are impossible, or a budget in minutes would be shared with neighbours."""
    if not any(trial.stages for trial in trials):
        failure = next((trial.impossible for trial in trials if trial.impossible), Failure("it is empty"))
        raise UserError(f"none of the trials can run: {failure.reason}", remedy="change the study")
    if places.together > 1 and any(stage.by_clock for stage in stages):
        what = "a budget in minutes depends on the neighbours of a run"
        remedy = "give budgets in steps, tokens or epochs, or remove `together`"
        raise UserError(what, key="together", remedy=remedy)


def _lock(handle: int, out: Path) -> None:
    try:
        lock_for_this_process(handle)
    except OSError as error:
        remedy = "wait for it, or see its progress with: bertsmith study status"
        raise UserError("the study is already running", where=str(out), remedy=remedy) from error


# ---- the progress of a study


def status_of(scheduler: Scheduler, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the progress of a study, for JSON."""
    fractions = {key: round(each.fraction, 3) for key, each in scheduler.running.items()}
    left = [stage for key, stage in scheduler.stages.items() if key not in scheduler.outcomes]
    done = [outcome for outcome in scheduler.outcomes.values() if outcome.result is not None]
    failures = {key: each.failure.reason for key, each in scheduler.outcomes.items() if each.failure}
    cells = [
        {
            "cell": stage.name,
            "state": scheduler.state_of(stage),
            "fraction": fractions.get(key, 0.0),
            "reason": failures.get(key, ""),
        }
        for key, stage in scheduler.stages.items()
    ]
    wanted = [stage for trial in trials for stage in trial.stages.values()]
    states = [each["state"] for each in cells]
    return {
        "wanted": sum(len(distinct([stage])) for stage in wanted),
        "counts": {state: states.count(state) for state in get_args(State)},
        "cells": cells,
        "impossible": {trial.name: trial.impossible.reason for trial in trials if trial.impossible},
        "seconds_left": seconds_left(left, fractions, done, at_once=scheduler.places.most),
    }


@dataclass
class StatusFile:
    """The file with the progress of a study, written at a rate for people."""

    out: Path
    trials: Sequence[Trial]
    written: float = 0.0

    def write(self, scheduler: Scheduler, *, now: bool = False) -> None:
        """Write the file and call the callback."""
        if not now and time.monotonic() - self.written < SECONDS_BETWEEN_WRITES:
            return
        self.written = time.monotonic()
        status = status_of(scheduler, self.trials)
        write_json(self.out / STATUS, status)
        running = sum(each.fraction for each in scheduler.running.values())
        shown = {**status["counts"], "seconds_left": status["seconds_left"]}
        scheduler.callback.on_step((len(scheduler.outcomes) + running) / len(scheduler.stages), shown)


def seconds_left(
    left: Sequence[Stage], fractions: Mapping[str, float], done: Sequence[Outcome], *, at_once: int
) -> float | None:
    """Estimate the seconds for the remaining stages from the finished ones; None if unknown."""
    rates: dict[str, float] = {}
    for name in {stage.kind.name for stage in left}:
        alike = [(each.stage, each.result) for each in done if each.stage.kind.name == name and each.result]
        work = sum(stage.kind.work(stage) for stage, _ in alike)
        if not work:
            return None
        rates[name] = sum(result.seconds for _, result in alike) / work
    seconds = [
        (1 - fractions.get(stage.key, 0.0)) * rates[stage.kind.name] * stage.kind.work(stage)
        for stage in left
    ]
    return round(max(sum(seconds) / at_once, *seconds), 1) if seconds else 0.0


def plan_of(study: Study, cells: Cells, places: Places) -> dict[str, Any]:
    """Return the work of a study and its finished part, as its status before it begins."""
    trials = study.trials()
    stages = distinct(stage for trial in trials for stage in trial.stages.values())
    return status_of(Scheduler(cells, places, stages, SilentCallback(), lambda _: None), trials)


def read_status(out: Path) -> dict[str, Any]:
    """Return the progress of the study in a folder, and if a process is running it now."""
    facts = read_json(out / STATUS, remedy="give the folder of a study (`out` of `bertsmith study run`)")
    handle = open_lock_file(out / LOCK)
    try:
        lock_for_this_process(handle)
        running = False
    except OSError:
        running = True
    finally:
        os.close(handle)
    return {**facts, "works": running}
