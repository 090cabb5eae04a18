"""Checks for suspicious labels in a user's own table, before hours are spent on training."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from bertsmith.core.errors import CONTROL, UserError
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.label_rules import number
from bertsmith.tasks.task import Task

MAX_SINGLE_CLASSES = 10
MAX_FRACTION_OF_CLASSES = 0.9
"""Maximum classes per row. Seventy intents in a hundred rows are classes; a column of texts is not."""
MAX_NUMBERS = 20
MIN_PER_NUMBER = 10
"""Minimum examples per number, if there are more than MAX_NUMBERS; otherwise labels are measured values."""
MAX_LISTED = 4
MAX_CHARACTERS = 1000
MAX_SHOWN = 60
EMPTY_SPELLINGS = frozenset({"nan", "null", "none", "n/a", "na", "#n/a", "<na>", "nil", "-", "?"})
"""Spellings that programs write for missing values, in lower case."""


def check_spelling(task: Task, examples: Sequence[Example]) -> None:
    """Raise if a user's own label is not a name: too long to read, or with control characters."""
    if not task.custom or not task.kind.min_labels:
        return
    known: set[str] = set()
    for example in examples:
        for label in example.label_names:
            if label not in known and (len(label) > MAX_CHARACTERS or CONTROL.search(label)):
                length = f"has {len(label):,} characters"
                fault = length if len(label) > MAX_CHARACTERS else "contains control characters"
                what = f"the label {label[:MAX_SHOWN]!r} {fault}, so it is not the name of a class"
                raise UserError(what, where=example.where, remedy="clean the column of the labels")
            known.add(label)


def check_classes(task: Task, examples: Sequence[Example]) -> None:
    """Raise if a user's own classes are numbers, or if nearly every example has its own class."""
    if not task.custom or task.kind.many_labels or not task.kind.min_labels:
        return
    counts = Counter(label for example in examples for label in example.label_names)
    column, rows = repr(str(task.custom["label"])), sum(counts.values())
    found = f"{column} has {len(counts):,} different labels in {rows:,} training rows"
    numbers = [_number_in(label) for label in counts]
    many_numbers = len(counts) > MAX_NUMBERS and rows < MIN_PER_NUMBER * len(counts)
    if many_numbers and None not in numbers:
        remedy = "add `kind=regress` to learn numbers; if they are names of classes, write them as words"
        raise UserError(f"{found}, all of them numbers", where=examples[0].where, remedy=remedy)
    if len(counts) > max(MAX_SINGLE_CLASSES, MAX_FRACTION_OF_CLASSES * rows):
        remedy = "name the column of the classes with `label`, or use `kind=multilabel` with a `separator`"
        raise UserError(
            f"{found}: nearly every class has only one row", where=examples[0].where, remedy=remedy
        )


def odd_labels(task: Task, examples: Sequence[Example]) -> Iterator[str]:
    """Warn about a user's own classes that are empty, or that differ in spelling only."""
    if not task.custom or not task.kind.min_labels:
        return
    counts = Counter(label for example in examples for label in example.label_names)
    for label in sorted(counts):
        if label.strip().lower() in EMPTY_SPELLINGS:
            yield (
                f"{counts[label]:,} training examples have the label {label!r}, which is read as a class; "
                "remove their rows if it means that the label is missing"
            )
    alike: defaultdict[str | float, list[str]] = defaultdict(list)
    for label in sorted(counts):
        value = _number_in(label)
        alike[" ".join(label.casefold().split()) if value is None else value].append(label)
    for spellings in [each for each in alike.values() if len(each) > 1][:MAX_LISTED]:
        listed = " and ".join(f"{label!r} ({counts[label]:,})" for label in spellings)
        yield f"the labels {listed} differ in spelling only, and are {len(spellings)} classes"


def _number_in(label: str) -> float | None:
    try:
        return number(label)
    except ValueError:
        return None
