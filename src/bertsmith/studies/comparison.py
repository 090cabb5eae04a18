"""The usual report of a study: means over seeds, and differences from the first trial with intervals.

Shapes: S pre-training seeds, R fine-tuning runs of a seed, M examples.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertsmith.core.measures import Metric
from bertsmith.core.wording import counted
from bertsmith.insight.report import Report, Table, View
from bertsmith.studies.multi_bootstrap import MEAN, Interval, Values, multi_bootstrap
from bertsmith.studies.study import Row, Seeds
from bertsmith.tasks import metrics
from bertsmith.tasks.kinds.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@dataclass(frozen=True, slots=True)
class Measured:
    """The data of intervals: the predictions of each run, or else one value for each."""

    metric: metrics.Metric
    targets_M: Values
    runs: Mapping[tuple[str, Seeds], Values]
    """Predictions by trial and seeds."""
    has_examples: bool
    """True if examples are drawn as well as seeds."""

    @classmethod
    def of(cls, rows: Sequence[Row], metric: str) -> "Measured":
        """Read the predictions of all runs; or their metrics, if one lacks predictions or has other ones."""
        values = {
            (row.trial.name, seeds): value for row in rows for seeds, value in row.values(metric).items()
        }
        files = {
            (row.trial.name, seeds): row.outcomes[seeds].predictions for row in rows for seeds in row.results
        }
        judged = {run: _judged(file, metric) for run, file in files.items() if run in values}
        found = [each for each in judged.values() if each is not None]
        if found and len(found) == len(values) and all(_same_examples(each, found[0]) for each in found):
            predictions = {run: each[1] for run, each in judged.items() if each is not None}
            return cls(found[0][2], found[0][0], predictions, has_examples=True)
        return cls(
            MEAN, np.zeros(1), {run: np.array([each]) for run, each in values.items()}, has_examples=False
        )

    def groups(self, row: Row, first: Row | None = None) -> list[list[Seeds]]:
        """Return the runs for an interval: the same number for each pre-training seed."""
        sides = [each.trial.name for each in (row, first) if each is not None]
        common = [seeds for seeds in row.outcomes if all((name, seeds) in self.runs for name in sides)]
        pretrained = dict.fromkeys(seeds.pretraining for seeds in common)
        groups = [[seeds for seeds in common if seeds.pretraining == each] for each in pretrained]
        runs = max(map(len, groups), default=0)
        return [group for group in groups if len(group) == runs]

    def interval(self, row: Row, first: Row | None = None) -> Interval | None:
        """Return a row's mean, or its difference from the first over the seeds of both, with the interval."""
        sides, whole = [each.trial.name for each in (row, first) if each is not None], self.groups(row, first)
        if len(whole) == 1:  # fine-tuning seeds of one model are drawn as independent runs
            whole = [[seeds] for seeds in whole[0]]
        if not whole:
            return None
        ours, *theirs = (
            np.array([[self.runs[name, seeds] for seeds in group] for group in whole]) for name in sides
        )
        return multi_bootstrap(ours, theirs[0] if theirs else None, self.targets_M, self.metric)


Judged = tuple[Values, Values, metrics.Metric]
"""Targets, predictions, and the metric of both."""


def _judged(file: Path | None, metric: str) -> Judged | None:
    """Return the inputs of a run's metric; None if it does not follow from single examples."""
    if file is None or not file.is_file():
        return None
    with np.load(file, allow_pickle=False) as arrays:
        if metric in arrays:  # a value for each example, for example F1 of an answer
            return np.zeros(len(arrays[metric])), arrays[metric], MEAN
        known = metric_named(metric)
        # Words of a sentence are not drawn separately, and spans do not follow from single words.
        if known.compute is None or "words" in arrays or "predicted" not in arrays:
            return None
        return arrays["targets"], arrays["predicted"], known


def _same_examples(one: Judged, other: Judged) -> bool:
    return np.array_equal(one[0], other[0]) and one[1].shape == other[1].shape


def comparison(name: str, title: str, rows: Sequence[Row]) -> Report:
    """Return a report with one table for each title: means over seeds, and differences from the first row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.trial.table, []).append(row)
    compared = [Comparison(f"{title}: {table}" if table else title, each) for table, each in groups.items()]
    tables = tuple(each.table() for each in compared)
    values = {"tables": [each.values() for each in compared]}

    def draw(figure: "Figure") -> None:
        for number, each in enumerate(compared, start=1):
            each.draw(figure.add_subplot(len(compared), 1, number))

    size = (9, 1.5 + sum(0.8 + 0.4 * len(each.rows) for each in compared))
    return Report(name, tables, values, draw, size, View("tables_view", {}))


@dataclass(frozen=True)
class Comparison:
    """Rows to compare with the first by one metric."""

    title: str
    rows: Sequence[Row]

    @cached_property
    def metric(self) -> Metric:
        """Return the deciding metric, of the first row that has one."""
        return next((each.metric for row in self.rows for each in row.results.values()), Metric("metric"))

    @cached_property
    def measured(self) -> Measured:
        """Return the data of the intervals."""
        return Measured.of(self.rows, self.metric.name)

    @cached_property
    def intervals(self) -> list[Interval | None]:
        """Return the mean of each row with its interval."""
        return [self.measured.interval(row) for row in self.rows]

    @cached_property
    def differences(self) -> list[Interval | None]:
        """Return the difference of each row except the first from the first."""
        first, *others = self.rows
        return [None, *(self.measured.interval(row, first) for row in others)]

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
        by_seeds, results = row.values(self.metric.name), list(row.results.values())
        values = [by_seeds[seeds] for group in self.measured.groups(row) for seeds in group]
        return (
            self._text(statistics.fmean(values)) if values else None,
            self._text(statistics.stdev(values)) if len(values) > 1 else None,
            f"{len(results)} of {len(row.outcomes)}",
            (self._span(interval) or None) if interval else None,
            f"{self._text(difference.value, sign='+')} {self._span(difference)}" if difference else None,
            round(statistics.fmean(each.steps for each in results)) if results else None,
            f"{statistics.fmean(each.seconds for each in results):.1f}" if results else None,
            len(row.failures),
        )

    def _text(self, value: float, *, sign: str = "") -> str:
        return f"{100 * value:{sign}.2f}" if self.metric.in_percent else f"{value:{sign}.4f}"

    def _span(self, interval: Interval) -> str:
        if interval.seeds == 1 and not self.measured.has_examples:
            return ""
        return f"[{self._text(interval.low)}, {self._text(interval.high)}]"

    def _notes(self) -> Iterable[str]:
        """Yield notes for the reader: direction, cautions, failures and mixtures."""
        better = "larger" if self.metric.larger_is_better else "smaller"
        unit = ", in percent" if self.metric.in_percent else ""
        drawn = "seeds and examples" if self.measured.has_examples else "seeds, not over examples"
        yield f"{better} is better{unit}; intervals are of 95 %, over {drawn}"
        found = [each for each in (*self.intervals, *self.differences) if each is not None]
        has_one = any(each.seeds == 1 for each in found) and not self.measured.has_examples
        yield from dict.fromkeys(each.caution() for each in found if each.caution() and not has_one)
        if has_one:
            yield "there is no interval for one seed: another seed may reverse a difference (`seeds`)"
        groups = {row.trial.name: self.measured.groups(row) for row in self.rows}
        if one := [name for name, each in groups.items() if len(each) == 1 and len(each[0]) > 1]:
            yield f"one model: intervals are over fine-tuning seeds only ({', '.join(one)})"
        for row in self.rows:
            if left_out := len(row.values(self.metric.name)) - sum(map(len, groups[row.trial.name])):
                runs = counted(left_out, "run")
                yield f"{row.trial.name}: {runs} left out, because their pre-training seeds lack other runs"
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
