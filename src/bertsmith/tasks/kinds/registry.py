"""Registry of all kinds of tasks. A new one is a file in this folder and a line in `KINDS`."""

from collections.abc import Mapping

from bertsmith.core.errors import UserError
from bertsmith.tasks.kinds.choice import CHOICE
from bertsmith.tasks.kinds.classify import CLASSIFY
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.kinds.multilabel import MULTILABEL
from bertsmith.tasks.kinds.regress import REGRESS
from bertsmith.tasks.kinds.span import SPAN
from bertsmith.tasks.kinds.tag import TAG
from bertsmith.tasks.kinds.text_kind import TextKind
from bertsmith.tasks.metrics import Metric

KINDS: Mapping[str, AnyKind] = {
    kind.name: kind for kind in (CLASSIFY, MULTILABEL, REGRESS, TAG, SPAN, CHOICE)
}
TEXT_KINDS: Mapping[str, TextKind] = {
    name: kind for name, kind in KINDS.items() if isinstance(kind, TextKind)
}
"""Kinds that a user's own table can have."""


def kind_named(name: str) -> AnyKind:
    """Return the kind named in a task.json; a ValueError lists all kinds."""
    if name not in KINDS:
        raise ValueError(f"unknown kind {name!r}; the kinds are {', '.join(KINDS)}")
    return KINDS[name]


def text_kind_named(name: str) -> TextKind:
    """Return the kind that a user chose for a table."""
    if name not in TEXT_KINDS:
        remedy = f"choose one of {', '.join(TEXT_KINDS)}"
        raise UserError(f"unknown kind {name!r}", key="kind", remedy=remedy)
    return TEXT_KINDS[name]


def kinds_of_head(head: str) -> tuple[AnyKind, ...]:
    """Return the kinds predicted by a head of this name, the usual one first."""
    return tuple(kind for kind in KINDS.values() if kind.head.name == head)


def heads_of_ability(ability: str) -> tuple[str, ...]:
    """Return the heads that this method of `Bert` uses for predictions, the usual one first."""
    return tuple(dict.fromkeys(kind.head.name for kind in KINDS.values() if kind.ability == ability))


def metric_named(name: str) -> Metric:
    """Return the metric of any kind by name; metrics of single span types all look alike."""
    known = {metric.name: metric for kind in KINDS.values() for metric in kind.metrics}
    return known.get(name, Metric(name))
