"""Early stopping: judges that end a run when further steps are not worth their time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bertsmith.core.measures import Metric
from bertsmith.training.best_weights import BestWeights
from bertsmith.training.journal import RunJournal
from bertsmith.training.trainer import Progress

EndKind = Literal["finished", "ended early", "stopped"]
"""End of a run.

Ended early: its results are not comparable with those after all steps. Stopped: saved only.
"""


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

    def reason(self, metric: Metric, evaluations: int) -> str:
        """Return the reason in words, for a run with this many evaluations."""
        return (
            f"its best {metric.name.replace('_', ' ')} in {self.evaluation} of {evaluations} evaluations is "
            f"{metric.text(self.best)}, while the median of others is {metric.text(self.median)}"
        )


StoppingRule = Callable[[Sequence[float]], EarlyEnd | None]
"""Maps the values of the deciding metric so far to the early end of the run, or None if it continues."""


@dataclass
class Patience(Judge):
    """Ends a run after evaluations that were not better, or by the rule of a study."""

    best: BestWeights | None
    patience: int | Literal["off"]
    """Number of evaluations that may be no better than the best one."""
    metric: Metric
    evaluations: int
    """Number of evaluations of the whole run."""
    rule: StoppingRule | None = None
    """Rule for a run of one process."""
    values: Callable[[], Sequence[float]] = tuple
    """Returns the values of the metric so far."""
    early_end: EarlyEnd | None = None
    """Early end by the rule, or None."""

    def after_evaluation(self) -> str | None:
        """Return a reason to end the run, or None."""
        if self.best is not None and self.best.has_run_out(self.patience):
            return "run.patience evaluations did not improve"
        self.early_end = None if self.rule is None else self.rule(self.values())
        if self.early_end is None:
            return None
        self.ending = "ended early"
        return self.early_end.reason(self.metric, self.evaluations)


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Conditions that end a run before its budget is spent; the run is saved and can be resumed."""

    if_flat: bool = False
    """True to end a run that has its loss at the unigram line."""
    rule: Callable[[Sequence[float]], str] | None = None
    """Function, for a run of one process, from the losses so far to the reason to end it, or "".

    The losses are taken from the fixed evaluation after step 0, or from the run's own evaluation without a
    fixed one.
    """


NEVER_EARLY = EarlyStopping()
