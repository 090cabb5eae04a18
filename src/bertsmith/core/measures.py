"""Declarations of an objective's batch fields, counts, sums and metrics, as plain data without torch.

Totals are the sums and counts of a step, a line of metrics or an evaluation, by name and over all ranks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

Totals = Mapping[str, float]
Value = Callable[[Totals], float | None]
Unit = Literal["nats", "bits", "fraction", "number"]
FIXED_PREFIX = "fixed_"
"""Prefix of the names of metrics in the fixed evaluation."""
MAX_EXPONENT = 700.0
"""Maximum mean loss in nats; the exponential of more does not fit into a float."""


class Field(NamedTuple):
    """A tensor of a batch besides its packed tokens."""

    name: str
    """Name; its ending is the unit with a value: _T (token), _S (sequence) or _P (predicted token)."""
    make: Callable[[Any], Any]
    """Function that returns the values for a step's sequences (`data.collate.Collated`)."""
    counted: str = ""
    """Name of the count that is the sum of the field; empty: none."""
    filler: float = 0
    """Value at filler tokens, sequences and predictions."""
    is_row: bool = False
    """True if the values are rows, which are counted from the start of each micro-batch."""

    @property
    def per(self) -> str:
        """Return the letter of the field's length."""
        return self.name[-1]


class LossTerm(NamedTuple):
    """A term of the loss: weight * sum / count."""

    sum: str
    over: str
    """Name of the count."""
    weight: float = 1.0


@dataclass(frozen=True)
class Metric:
    """A number that is reported: its value, its name and its format."""

    name: str
    _: KW_ONLY
    of: Value = field(default=lambda _: None, repr=False)
    """Function that computes the value from totals; None if they do not contain it."""
    title: str = ""
    """Name in tables; by default `name` with spaces."""
    unit: Unit = "fraction"
    larger_is_better: bool = True
    short: str = ""
    """Name in lines of the log; empty: not shown there."""
    panel: str = ""
    """Title of the metric's curves; empty: not drawn."""
    level: str = ""
    """Name of the metric or baseline that the curves are compared with."""
    fixed: bool = False
    """True if the metric is also part of the fixed evaluation."""

    @property
    def label(self) -> str:
        """Return the name in tables."""
        return self.title or self.name.replace("_", " ")

    @property
    def in_percent(self) -> bool:
        """True if the metric is shown in percent."""
        return self.unit == "fraction"

    def is_better(self, value: float, *, than: float) -> bool:
        """True if a value is better than another one, but not if they are equal."""
        return value > than if self.larger_is_better else value < than

    def text(self, value: float, digits: int = 4) -> str:
        """Format a value: in percent, as a plain number, or with this many digits, by its unit."""
        if self.unit == "number":
            return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
        return f"{value:.1%}" if self.in_percent else f"{value:.{digits}f}"


def perplexity(nats: float) -> float:
    """Return the perplexity for a mean loss per token."""
    return math.exp(min(nats, MAX_EXPONENT))


def bits(nats: float) -> float:
    """Return nats as bits."""
    return nats / math.log(2)


def mean(total: str, over: str, *, empty: float | None = None) -> Value:
    """Return a function that divides one total by another; it returns `empty` if that is 0 or missing."""
    return lambda totals: totals[total] / totals[over] if totals.get(over) else empty


def mean_loss(name: str, over: str, **shown: Any) -> Metric:
    """Return the metric of a loss term: the mean of a sum of the same name."""
    return Metric(name, of=mean(name, over), unit="nats", larger_is_better=False, **shown)


def answers(name: str, ones: str, over: str, *, short: str, what: str) -> tuple[Metric, Metric]:
    """Return two metrics: the accuracy of yes-or-no answers, and that of a constant, more frequent answer."""
    accuracy, level = f"{name}_accuracy", f"{name}_majority"

    def majority(totals: Totals) -> float | None:
        count = totals.get(over)
        return max(totals[ones], count - totals[ones]) / count if count and ones in totals else None

    panel, right = f"{what}: guessed right", mean(f"{name}_hits", over)
    return (
        Metric(accuracy, of=right, short=short, panel=panel, level=level),
        Metric(level, of=majority, title=f"{name} accuracy of always giving the more frequent answer"),
    )


def _whole(total: str) -> Value:
    return lambda totals: int(totals[total]) if total in totals else None


LOSS = Metric("loss", unit="nats", larger_is_better=False, short="loss")
SEQUENCES = Metric("sequences", of=_whole("sequences"), unit="number", fixed=True)
CANDIDATES = Metric("candidates", of=_whole("candidates"), unit="number", short="candidates")
"""Rows that a held-out evaluation compares with each other; values for other numbers are not comparable."""


@dataclass(frozen=True)
class Declaration:
    """The batch fields, counts, sums and metrics of an objective, or of a part of one."""

    terms: tuple[LossTerm, ...]
    counted: tuple[str, ...]
    """Names of sums that are not part of the loss."""
    metrics: tuple[Metric, ...]
    watched: str = ""
    """Name of the metric that decides between runs and shows if they learn."""
    baseline: Literal["unigram"] | None = None
    """Baseline at which the watched loss stays if nothing is learned."""
    fields: tuple[Field, ...] = ()
    """Fields of the batches; without one of predicted tokens, nothing is masked."""
    over_the_step: bool = False
    """True if the loss compares the rows of a whole step (`training.step_losses`)."""

    def __add__(self, part: "Declaration") -> "Declaration":
        """Combine this declaration with another part's."""
        own = (self.terms + part.terms, self.counted + part.counted, self.metrics + part.metrics)
        fields = tuple(dict.fromkeys(self.fields + part.fields))
        over = self.over_the_step or part.over_the_step
        return Declaration(*own, self.watched, self.baseline, fields, over)

    @property
    def counts(self) -> tuple[str, ...]:
        """Return the names of the loss's divisors, in the order that a step passes them."""
        return tuple(dict.fromkeys(each.over for each in self.terms))

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums over a micro-batch, in the order that a step returns them."""
        return (*(each.sum for each in self.terms), *self.counted)

    @property
    def own(self) -> dict[str, Metric]:
        """Return the metrics of a step or of held-out documents, by name."""
        return {each.name: each for each in (LOSS, *self._found)}

    @property
    def _found(self) -> tuple[Metric, ...]:
        return (*self.metrics, SEQUENCES, *((CANDIDATES,) if self.over_the_step else ()))

    @property
    def fixed(self) -> dict[str, Metric]:
        """Return the metrics of the fixed evaluation, by name; empty if it lacks the watched metric."""
        found = {name: each for name, each in self.own.items() if each.fixed}
        return {
            (fixed := FIXED_PREFIX + name): replace(
                each,
                name=fixed,
                title=f"fixed evaluation: {each.label}",
                short="loss" if name == self.watched else each.short,
            )
            for name, each in found.items()
            if self.watched in found
        }

    @property
    def deciding(self) -> Metric:
        """Return the metric that decides between runs: the watched one, from a fixed evaluation if there."""
        return self.fixed.get(FIXED_PREFIX + self.watched, self.own[self.watched])

    @property
    def reported(self) -> dict[str, Metric]:
        """Return all metrics, by their names in the journal."""
        return self.own | self.fixed

    def means(self, totals: Totals) -> dict[str, float]:
        """Return the loss, and the metrics that the totals contain."""
        losses = [
            each.weight * (totals[each.sum] / totals[each.over]) for each in self.terms if totals[each.over]
        ]
        if not losses:
            return {"loss": math.nan}
        values = ((each.name, each.of(totals)) for each in self._found)
        return {"loss": sum(losses)} | {name: value for name, value in values if value is not None}


def brief(metrics: Mapping[str, Metric], values: Totals) -> list[str]:
    """Format the values of metrics with a short name, each after that name."""
    shown = (each for name, each in metrics.items() if each.short and name in values)
    return [f"{each.short} {each.text(values[each.name], 3)}" for each in shown]
