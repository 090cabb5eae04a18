"""Early stopping: judges that end a run when further steps are not worth their time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from bertsmith.core.measures import Metric
from bertsmith.training.best_weights import BestWeights
from bertsmith.training.journal import RunJournal, read_metrics
from bertsmith.training.trainer import Progress

EndKind = Literal["finished", "ended early", "stopped"]
"""End of a run. Ended early: not comparable with results after all steps. Stopped: saved only."""


class Judge:
    """Judges if a run is worth more steps; this one lets every run continue."""

    ending: EndKind = "finished"
    """End of a run that the judge ends with a reason."""

    def after_line(self, at: Progress, values: Mapping[str, Any], journal: RunJournal) -> str | None:
        """Return a reason to end the run after a line of metrics, or None; equal in all processes."""

    def after_evaluation(self) -> str | None:
        """Return a reason to end the run after an evaluation, or None; equal in all processes."""


NEVER = Judge()


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Early end of a trial that did worse than the median of others."""

    evaluation: int
    """Number of the last evaluation, counted from 1."""
    best: float
    """Best value of the deciding metric until then."""
    median: float
    """Median of other trials, which is better."""

    def reason(self, metric: Metric) -> str:
        """Return the reason in words."""
        return (
            f"its best {metric.name.replace('_', ' ')} until evaluation {self.evaluation} is "
            f"{metric.text(self.best)}, worse than the median of others, {metric.text(self.median)} (median "
            "stopping rule)"
        )


def evaluated_values(folder: Path, metric: Metric) -> dict[int, float]:
    """Return a metric by step at each evaluation of a run after a step; NaN counts as the worst value."""
    worst = -inf if metric.larger_is_better else inf
    lines = [line for line in read_metrics(folder) if line["kind"] == "held-out" and line["step"]]
    found = {line["step"]: line[metric.name] for line in lines if metric.name in line}
    return {step: worst if value is None else value for step, value in found.items()}


StoppingRule = Callable[[Sequence[float]], EarlyEnd | None]
"""Maps the values of the deciding metric so far to the early end of the run, or None if it continues."""


@dataclass
class Patience(Judge):
    """Ends a run after evaluations that were not better, or by the rule of a study."""

    best: BestWeights | None
    patience: int | Literal["off"]
    """Number of evaluations that may be no better than the best one."""
    metric: Metric
    folder: Path
    """Folder of the run, whose journal has the values of the metric so far."""
    rule: StoppingRule | None = None
    """Rule for a run of one process."""
    early_end: EarlyEnd | None = None
    """Early end by the rule, or None."""

    def after_evaluation(self) -> str | None:
        """Return a reason to end the run, or None."""
        if self.best is not None and self.best.has_run_out(self.patience):
            return "run.patience evaluations did not improve"
        values = () if self.rule is None else list(evaluated_values(self.folder, self.metric).values())
        self.early_end = None if self.rule is None else self.rule(values)
        if self.early_end is None:
            return None
        self.ending = "ended early"
        return self.early_end.reason(self.metric)


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Conditions that end a run before its budget is spent; without a rule, the run can be resumed."""

    if_flat: bool = False
    """True to end a run that has its loss at the unigram line."""
    rule: StoppingRule | None = None
    """Rule for a run of one process.

    The losses are taken from the fixed evaluation after step 0, or from the run's own evaluation without a
    fixed one.
    """


NEVER_EARLY = EarlyStopping()
