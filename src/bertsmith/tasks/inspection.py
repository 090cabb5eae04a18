"""What a data set is like before training: balance, lengths, copies, overlap, baseline, shift.

Two texts are the same here if they differ in case and spaces only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from bertsmith.core.errors import UserError
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.kinds.registry import TEXT_KINDS
from bertsmith.tasks.label_checks import check_classes, odd_labels
from bertsmith.tasks.predictions import PredictedSplit
from bertsmith.tasks.tables import Label
from bertsmith.tasks.task import ReadSplit, Task, has_split, read_split

_SHOWN_PAIRS = 3


@dataclass(frozen=True, slots=True)
class LabelShare:
    """How often a label is given; in multi-label data the shares may sum to more than 1."""

    label: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How numbers are spread."""

    smallest: float
    mean: float
    largest: float
    deviation: float
    """Standard deviation."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Quantiles of the words of an example, both texts of a pair together."""

    smallest: int
    median: int
    of_95_percent: int
    of_99_percent: int
    largest: int


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """What one split is like."""

    name: str
    file: str
    examples: int
    unlabelled: int
    skipped: int
    """Lines that could not be taken."""
    first_skipped: str
    """The first of them, with what is wrong."""
    labels: tuple[LabelShare, ...]
    """Most frequent first; empty for numbers."""
    numbers: Spread | None
    words: Lengths
    copies: int
    """Examples whose texts stood before in the split."""
    contradictions: int
    """Examples whose texts stand elsewhere in the split with another label."""


@dataclass(frozen=True, slots=True)
class SharedText:
    """A training example and a development example with the same text."""

    text: str
    train_where: str
    train_label: str
    dev_where: str
    dev_label: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """Development examples whose text is in the training set too."""

    text: Literal["whole", "first"]
    """Whether the whole example is the same, or the first text of a pair."""
    dev_examples: int
    dev_share: float
    pairs_same_label: int
    pairs_other_label: int
    only_other_label: int
    """Development examples that meet their text with other labels only."""
    copying_accuracy: float
    """How often copying the label of a training example with the same text is right."""
    shown: tuple[SharedText, ...]
    """Some of the pairs with different labels, development examples that never meet their own label first."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the constant answer gets: the most frequent label of the training set, or its mean."""

    says: str
    train: dict[str, float]
    """By the metrics of the task."""
    dev: dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Shift:
    """How the development set differs from the training set."""

    labels: float
    """Share of examples that would have to change their label (total variation distance); for numbers the
    difference of the means in standard deviations of the training set."""
    unknown_words: float
    """Share of the development set's words that the training set has not."""
    median_words: int
    """Median length in development, less the one in training."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that was found."""

    task: str
    kind: str
    splits: tuple[SplitSummary, ...]
    baseline: Baseline | None
    overlaps: tuple[Overlap, ...]
    shift: Shift | None
    warnings: tuple[str, ...]
    """What `finetune` would stop at, or point out in the labels."""


def inspect_files(task: Task, places: Mapping[str, Path]) -> Inspection:
    """What the splits train and dev are like, each in its file or folder; bad lines are counted."""
    if not task.kind.from_tables:
        what = f"{task.title} has no labelled texts to look at"
        raise UserError(what, remedy="inspect takes tasks of texts with a label or a number")
    # A split may be missing in a folder, but not a place; if all are, reading says what was looked for.
    found = [split for split, place in places.items() if not place.exists() or has_split(task, place, split)]
    read = {split: read_split(task, places[split], split, skip_bad=True) for split in found or places}
    return inspect_splits(task, read)


def inspect_splits(task: Task, splits: Mapping[str, ReadSplit]) -> Inspection:
    """What the splits are like; train and dev are set against each other."""
    summaries = tuple(_summary(name, split, task.kind) for name, split in splits.items())
    train, dev = (_texts(splits[name]) if name in splits else [] for name in ("train", "dev"))
    labels = [_label(example) for example in train if example.label is not None]
    baseline = _baseline(task, train, dev) if labels else None
    overlaps = _overlaps(train, dev, _agreement(labels)) if train and dev else ()
    shift = _shift(train, dev, task.kind) if train and dev else None
    warnings = tuple(odd_labels(task, train))
    try:
        check_classes(task, train)
    except UserError as error:
        warnings = (error.line(), *warnings)
    return Inspection(task.name, task.kind.name, summaries, baseline, overlaps, shift, warnings)


def _texts(split: ReadSplit) -> list[TextExample]:
    return [example for example in split.examples if isinstance(example, TextExample)]


def _label(example: TextExample) -> Label:
    if example.label is None:
        raise ValueError("an example without a label was asked for it")
    return tuple(sorted(example.label)) if isinstance(example.label, tuple) else example.label


def spelled(label: Label) -> str:
    """A label for people."""
    if isinstance(label, tuple):
        return " + ".join(label) or "(none)"
    return label if isinstance(label, str) else f"{label:g}"


def _whole(example: TextExample) -> tuple[str, ...]:
    return tuple(" ".join(text.lower().split()) for text in example.parts)


def _first(example: TextExample) -> tuple[str, ...]:
    return _whole(example)[:1]


def _words(example: TextExample) -> list[str]:
    return [word for text in _whole(example) for word in text.split()]


def _summary(name: str, split: ReadSplit, kind: AnyKind) -> SplitSummary:
    examples = _texts(split)
    labels = [_label(example) for example in examples if example.label is not None]
    copies, contradictions = _copies(examples)
    bad = split.skipped[0] if split.skipped else None
    return SplitSummary(
        name=name,
        file=str(split.path),
        examples=len(examples),
        unlabelled=len(examples) - len(labels),
        skipped=len(split.skipped),
        first_skipped=f"{bad.where}: {bad.what}" if bad else "",
        labels=() if kind.numeric else _balance(labels),
        numbers=_spread(labels) if kind.numeric and labels else None,
        words=_lengths(examples),
        copies=copies,
        contradictions=contradictions,
    )


def _balance(labels: Sequence[Label]) -> tuple[LabelShare, ...]:
    parts = (label if isinstance(label, tuple) else (str(label),) for label in labels)
    counts = Counter(chain.from_iterable(parts))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(LabelShare(label, count, count / len(labels)) for label, count in ranked)


def _spread(labels: Sequence[Label]) -> Spread:
    numbers = np.array(labels, np.float64)
    return Spread(float(numbers.min()), float(numbers.mean()), float(numbers.max()), float(numbers.std()))


def _lengths(examples: Sequence[TextExample]) -> Lengths:
    counts = [len(_words(example)) for example in examples]
    ranks = np.quantile(counts, (0, 0.5, 0.95, 0.99, 1), method="inverted_cdf")
    return Lengths(*(int(rank) for rank in ranks))


def _copies(examples: Sequence[TextExample]) -> tuple[int, int]:
    labels: defaultdict[tuple[str, ...], list[Label | None]] = defaultdict(list)
    for example in examples:
        labels[_whole(example)].append(None if example.label is None else _label(example))
    copies = sum(len(group) - 1 for group in labels.values())
    contradictions = sum(len(group) for group in labels.values() if len(set(group)) > 1)
    return copies, contradictions


def _baseline(task: Task, train: Sequence[TextExample], dev: Sequence[TextExample]) -> Baseline:
    kind = TEXT_KINDS[task.kind.name]
    train, dev = ([example for example in each if example.label is not None] for each in (train, dev))
    labels = task.labels or tuple(sorted({label for example in train for label in example.label_names}))
    known = kind.targets(train, labels)
    found: list[PredictedSplit[TextExample]] = []
    for examples in filter(None, (train, dev)):
        encoded = EncodedSet.without_tokens(kind.unit, kind.targets(examples, labels))
        found.append(PredictedSplit(examples, encoded, kind.constant_predictions(labels, known, encoded)))
    says = kind.predicted_labels(labels, found[0], separator=" + ")[0]
    scores = [kind.evaluate(task.metrics, labels, split) for split in found]
    return Baseline(spelled(says), scores[0], scores[1] if dev else None)


def _agreement(labels: Sequence[Label]) -> Callable[[Label, Label], bool]:
    """When two labels say the same: if they are equal, or as numbers within a standard deviation."""
    if not labels or not isinstance(labels[0], float):
        return lambda one, other: one == other
    near = _spread(labels).deviation
    return lambda one, other: abs(float(str(one)) - float(str(other))) <= near


def _overlaps(
    train: Sequence[TextExample], dev: Sequence[TextExample], agree: Callable[[Label, Label], bool]
) -> tuple[Overlap, ...]:
    pairs = len(train[0].parts) > 1
    whole = _overlap("whole", _meetings(train, dev, _whole), len(dev), agree)
    return (whole, _overlap("first", _meetings(train, dev, _first), len(dev), agree)) if pairs else (whole,)


Meetings = list[tuple[TextExample, list[TextExample]]]
"""A development example with the training examples that have the same text, for those that have some."""


def _meetings(
    train: Sequence[TextExample], dev: Sequence[TextExample], text: Callable[[TextExample], tuple[str, ...]]
) -> Meetings:
    known: defaultdict[tuple[str, ...], list[TextExample]] = defaultdict(list)
    for example in train:
        if example.label is not None:
            known[text(example)].append(example)
    labelled = (example for example in dev if example.label is not None)
    return [(example, known[text(example)]) for example in labelled if text(example) in known]


def _overlap(
    text: Literal["whole", "first"], meetings: Meetings, dev: int, agree: Callable[[Label, Label], bool]
) -> Overlap:
    same = [[agree(_label(other), _label(example)) for other in others] for example, others in meetings]
    agreeing = sum(map(sum, same))
    return Overlap(
        text=text,
        dev_examples=len(meetings),
        dev_share=len(meetings) / dev,
        pairs_same_label=agreeing,
        pairs_other_label=sum(map(len, same)) - agreeing,
        only_other_label=sum(not any(each) for each in same),
        copying_accuracy=float(np.mean([np.mean(each) for each in same])) if same else 0.0,
        shown=_shown(meetings, same, text),
    )


def _shown(
    meetings: Meetings, same: Sequence[Sequence[bool]], text: Literal["whole", "first"]
) -> tuple[SharedText, ...]:
    differing = [index for index, agreements in enumerate(same) if not all(agreements)]
    shown = []
    for index in sorted(differing, key=lambda index: any(same[index]))[:_SHOWN_PAIRS]:
        example, others = meetings[index]
        other = others[same[index].index(False)]
        words = " | ".join(example.parts if text == "whole" else example.parts[:1])
        labels = spelled(_label(other)), spelled(_label(example))
        shown.append(SharedText(words, other.where, labels[0], example.where, labels[1]))
    return tuple(shown)


def _shift(train: Sequence[TextExample], dev: Sequence[TextExample], kind: AnyKind) -> Shift:
    known = {word for example in train for word in _words(example)}
    words = [word for example in dev for word in _words(example)]
    unknown = sum(word not in known for word in words) / max(len(words), 1)
    longer = _lengths(dev).median - _lengths(train).median
    labels, dev_labels = (
        [_label(example) for example in examples if example.label is not None] for examples in (train, dev)
    )
    shift = _label_shift(labels, dev_labels, kind) if labels and dev_labels else 0.0
    return Shift(shift, unknown, longer)


def _label_shift(labels: Sequence[Label], dev_labels: Sequence[Label], kind: AnyKind) -> float:
    if kind.numeric:
        spread = _spread(labels)
        return (_spread(dev_labels).mean - spread.mean) / spread.deviation if spread.deviation else 0.0
    counts, dev_counts = Counter(labels), Counter(dev_labels)
    shares = (
        counts[label] / len(labels) - dev_counts[label] / len(dev_labels) for label in counts | dev_counts
    )
    return sum(map(abs, shares)) / 2
