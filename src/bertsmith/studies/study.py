"""A study: many trials that answer one question, made from cells, and its report.

Everything that a study wants is planned before anything runs. A trial that fails is a row with its reason.
"""

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

import numpy as np

from bertsmith.core.errors import UserError
from bertsmith.core.files import lock_for_this_process, open_lock_file, read_json, write_json, write_text
from bertsmith.core.measures import Metric
from bertsmith.core.wording import counted
from bertsmith.insight.report import Report, Table, View, write_report
from bertsmith.studies.cells import Cells, Failure, Outcome, Result, Stage, distinct
from bertsmith.studies.multi_bootstrap import Interval, multi_bootstrap
from bertsmith.studies.scheduler import Places, Scheduler, State
from bertsmith.tasks import metrics
from bertsmith.training.callbacks import ProgressCallback, SilentCallback

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATUS, LOCK = "study.json", ".lock"
SECONDS_BETWEEN_WRITES = 2.0
AS_MEASURED = metrics.Metric("as_measured", compute=lambda _, values: float(values.mean()))
"""The metric of runs whose value was measured already: only seeds are drawn, not examples."""


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
    """The reason why there is nothing to run."""


@dataclass(frozen=True)
class Row:
    """A trial with what became of it."""

    trial: Trial
    outcomes: Mapping[Seeds, Outcome]

    @cached_property
    def results(self) -> dict[Seeds, Result]:
        """Return the results of the runs that ended well."""
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

    def interval(self, metric: str, first: "Row | None" = None) -> Interval | None:
        """Return the mean with its interval, or the difference from the first row over the seeds of both.

        The examples of the deciding split are not drawn: the interval is that of other seeds.
        """
        sides = [self.values(metric), *([] if first is None else [first.values(metric)])]
        common = [seeds for seeds in sides[0] if all(seeds in side for side in sides)]
        groups = [[seeds for seeds in common if seeds.pretraining == each] for each in _pretraining(common)]
        runs = max(map(len, groups), default=0)
        whole = [group for group in groups if len(group) == runs]
        if len(whole) == 1:  # fine-tuning seeds of one model are drawn as independent runs
            whole = [[seeds] for seeds in whole[0]]
        if not whole:
            return None
        sides_SRM = [np.array([[[side[seeds]] for seeds in group] for group in whole]) for side in sides]
        return multi_bootstrap(sides_SRM[0], sides_SRM[1] if first else None, np.zeros(1), AS_MEASURED)


def _pretraining(seeds: Iterable[Seeds]) -> list[int]:
    return list(dict.fromkeys(each.pretraining for each in seeds))


class Study(Protocol):
    """One question: a file for each study."""

    def trials(self) -> list[Trial]:
        """Return all that the study wants, planned before anything runs."""

    def report(self, rows: Sequence[Row]) -> Report:
        """Return its tables; failed trials are rows, too."""


def run_study(study: Study, out: Path, cells: Cells, places: Places, callback: ProgressCallback) -> Report:
    """Make the missing cells, and write and return the report; a failed cell stops no other."""
    trials = study.trials()
    stages = distinct(stage for trial in trials for stage in trial.stages.values())
    _check(trials, stages.values(), places)
    handle = open_lock_file(out / LOCK)
    try:
        _lock(handle, out)
        status = StatusFile(out, trials)
        scheduler = Scheduler(cells, places, stages, callback, on_change=status.write)
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
    """Return a row for each trial."""
    return [
        Row(trial, {seeds: outcomes[stage.key] for seeds, stage in trial.stages.items()}) for trial in trials
    ]


def _check(trials: Sequence[Trial], stages: Iterable[Stage], places: Places) -> None:
    """Raise if no trial can run, or a budget in minutes would be shared with neighbours."""
    if not any(trial.stages for trial in trials):
        failure = next((trial.impossible for trial in trials if trial.impossible), Failure("it has none"))
        raise UserError(f"no trial can run: {failure.reason}", remedy="change the study")
    if places.together > 1 and any(stage.by_clock for stage in stages):
        what = "a budget in minutes depends on the neighbours of a run"
        remedy = "give budgets in steps, tokens or epochs, or leave --together out"
        raise UserError(what, where="--together", remedy=remedy)


def _lock(handle: int, out: Path) -> None:
    try:
        lock_for_this_process(handle)
    except OSError as error:
        remedy = "wait for it, or look at it with: bertsmith study status"
        raise UserError("the study is running already", where=str(out), remedy=remedy) from error


# ---- how far a study is


def status_of(scheduler: Scheduler, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return how far a study is, for JSON."""
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
    """The file that says how far a study is, written not more often than a person would look."""

    out: Path
    trials: Sequence[Trial]
    written: float = 0.0

    def write(self, scheduler: Scheduler, *, now: bool = False) -> None:
        """Write the file and tell the callback."""
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
    """Estimate the seconds for the stages that are left, from those of finished ones; None if unknown."""
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
    """Return what a study wants and what of it is done, as its status before it begins."""
    trials = study.trials()
    stages = distinct(stage for trial in trials for stage in trial.stages.values())
    return status_of(Scheduler(cells, places, stages, SilentCallback(), lambda _: None), trials)


def read_status(out: Path) -> dict[str, Any]:
    """Return how far the study in a folder is, and whether a process works on it now."""
    facts = read_json(out / STATUS, remedy="give the folder of a study (--out of `bertsmith study run`)")
    handle = open_lock_file(out / LOCK)
    try:
        lock_for_this_process(handle)
        running = False
    except OSError:
        running = True
    finally:
        os.close(handle)
    return {**facts, "works": running}


# ---- the report


COLUMNS = (
    "trial",
    "mean",
    "deviation",
    "runs",
    "interval",
    "against the first",
    "steps",
    "seconds",
    "failed",
)


def comparison(name: str, title: str, rows: Sequence[Row]) -> Report:
    """Return a report with one table for each title: means over seeds, and differences from the first row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.trial.table, []).append(row)
    compared = [
        Comparison.of(f"{title}: {table}" if table else title, each) for table, each in groups.items()
    ]
    tables = tuple(each.table() for each in compared)
    values = {"tables": [each.values() for each in compared]}

    def draw(figure: "Figure") -> None:
        for number, each in enumerate(compared, start=1):
            each.draw(figure.add_subplot(len(compared), 1, number))

    size = (9, 1.5 + sum(0.8 + 0.4 * len(each.rows) for each in compared))
    return Report(name, tables, values, draw, size, View("tables_view", {}))


@dataclass(frozen=True)
class Comparison:
    """Rows that are compared by one metric with the first."""

    title: str
    rows: Sequence[Row]
    metric: Metric
    intervals: Sequence[Interval | None] = field(default_factory=tuple)
    differences: Sequence[Interval | None] = field(default_factory=tuple)

    @classmethod
    def of(cls, title: str, rows: Sequence[Row]) -> "Comparison":
        """Compute the intervals of all rows."""
        metric = next((each.metric for row in rows for each in row.results.values()), Metric("metric"))
        first, *others = rows
        differences = [row.interval(metric.name, first) for row in others]
        intervals = [row.interval(metric.name) for row in rows]
        return cls(title, rows, metric, intervals, [None, *differences])

    def table(self) -> Table:
        """Return the table for people."""
        lines = [
            (row.trial.name, *self._cells(row, interval, difference))
            for row, interval, difference in zip(self.rows, self.intervals, self.differences, strict=True)
        ]
        return Table(f"{self.title}: {self.metric.label}", COLUMNS, lines, tuple(self._notes()))

    def _cells(
        self, row: Row, interval: Interval | None, difference: Interval | None
    ) -> tuple[str | int | float | None, ...]:
        values, results = list(row.values(self.metric.name).values()), list(row.results.values())
        return (
            self._text(statistics.fmean(values)) if values else None,
            self._text(statistics.stdev(values)) if len(values) > 1 else None,
            f"{len(results)} of {len(row.outcomes)}",
            self._span(interval) if interval is not None and interval.seeds > 1 else None,
            None
            if difference is None
            else f"{self._text(difference.value, sign='+')} {self._span(difference)}",
            round(statistics.fmean(each.steps for each in results)) if results else None,
            f"{statistics.fmean(each.seconds for each in results):.1f}" if results else None,
            len(row.failures),
        )

    def _text(self, value: float, *, sign: str = "") -> str:
        return f"{100 * value:{sign}.2f}" if self.metric.in_percent else f"{value:{sign}.4f}"

    def _span(self, interval: Interval) -> str:
        if interval.seeds == 1:
            return ""
        return f"[{self._text(interval.low)}, {self._text(interval.high)}]"

    def _notes(self) -> Iterable[str]:
        """Yield what a reader has to know: direction, cautions, failures and mixtures."""
        better = "larger" if self.metric.larger_is_better else "smaller"
        unit = ", in percent" if self.metric.in_percent else ""
        yield f"{better} is better{unit}; intervals are of 95 %, over seeds"
        found = [each for each in (*self.intervals, *self.differences) if each is not None]
        yield from dict.fromkeys(each.caution() for each in found if each.seeds > 1 and each.caution())
        if any(each.seeds == 1 for each in found):
            yield "one seed has no interval: another seed may turn a difference round (--seeds)"
        for row in self.rows:
            for reason in dict.fromkeys(row.failures):
                how_many = (
                    "impossible" if row.trial.impossible else counted(row.failures.count(reason), "run")
                )
                yield f"{row.trial.name} ({how_many}): {reason}"
            if row.results and not row.values(self.metric.name):
                yield f"{row.trial.name} does not measure {self.metric.label}"
        made: dict[str, set[str | int]] = {}
        for result in (each for row in self.rows for each in row.results.values()):
            for key, value in result.made_with.items():
                made.setdefault(key, set()).add(value)
        mixed = (
            f"{key} ({', '.join(map(str, sorted(made[key], key=str)))})" for key in made if len(made[key]) > 1
        )
        if listed := ", ".join(mixed):
            yield f"cells were made with different {listed}"

    def values(self) -> dict[str, Any]:
        """Return all numbers, for JSON."""
        rows = [
            {
                "trial": row.trial.name,
                "runs": [
                    {
                        **seeds._asdict(),
                        "cell": outcome.stage.name,
                        "metrics": {} if outcome.result is None else outcome.result.metrics,
                        "failure": outcome.failure.reason if outcome.failure else "",
                    }
                    for seeds, outcome in row.outcomes.items()
                ],
                "mean": _plain(interval),
                "against_first": _plain(difference),
                "failures": row.failures,
            }
            for row, interval, difference in zip(self.rows, self.intervals, self.differences, strict=True)
        ]
        return {"title": self.title, "metric": self.metric.name, "rows": rows}

    def draw(self, axes: Any) -> None:
        """Draw each run as a point and each mean with its interval."""
        for place, (row, interval) in enumerate(zip(self.rows, self.intervals, strict=True)):
            points = list(row.values(self.metric.name).values())
            axes.plot(points, [place] * len(points), "o", color="#9db4c8", ms=5)
            if interval is not None:
                axes.plot([interval.low, interval.high], [place, place], color="#1f4e79", lw=2)
                axes.plot([interval.value], [place], "D", color="#1f4e79", ms=6)
        axes.set_yticks(range(len(self.rows)), [row.trial.name for row in self.rows])
        axes.invert_yaxis()
        axes.set_title(f"{self.title}: {self.metric.label}", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)


def _plain(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"value": interval.value, "low": interval.low, "high": interval.high, "seeds": interval.seeds}
