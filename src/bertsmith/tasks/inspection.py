"""Inspect a data set before training: balance, lengths, copies, overlap, baseline, shift.

Two texts are equal here if they differ only in case and spaces.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import sqrt
from pathlib import Path

import numpy as np

from bertsmith.core.errors import UserError
from bertsmith.tasks.example_types import Example, Label
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.label_checks import check_classes, check_spelling, odd_labels
from bertsmith.tasks.task import ReadSplit, Task, has_split, read_split

_SHOWN_PAIRS = 3
_PARTS = {"text": "first", "text2": "second", "passage": "passage"}
"""Text columns that are also compared separately if an example has several texts, with their names."""
_MIN_SHIFT, _MIN_SIGMAS = 0.05, 3.0
"""Minimum difference of a class's fraction, absolute and in standard errors, that causes a warning."""
_MIN_ADVERSARIAL = 0.05
_GLUE = "(Wang et al. 2018, GLUE)"
_PUBLISHED_SHIFTS = {
    "qqp": f"QQP's test set has other class fractions than its training set {_GLUE}: a decision threshold "
    "that is tuned on the development set may not fit the test set",
    "wnli": f"65 % of WNLI's test set are not_entailment {_GLUE}: the constant answer is hard to beat",
}


@dataclass(frozen=True, slots=True)
class LabelShare:
    """Frequency of a label; in multi-label data the fractions may sum to more than 1.

    Tags are counted per word, questions by whether they have an answer, choices by the right option.
    """

    label: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of numeric labels."""

    smallest: float
    mean: float
    largest: float
    deviation: float
    """Standard deviation."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Quantiles of the words per example: both texts of a pair together; for choices, the longest option."""

    smallest: int
    median: int
    of_95_percent: int
    of_99_percent: int
    largest: int


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """Statistics of one split."""

    name: str
    file: str
    examples: int
    unlabelled: int
    skipped: int
    """Number of lines that could not be read."""
    first_skipped: str
    """The first skipped line and its fault."""
    labels: tuple[LabelShare, ...]
    """Most frequent first; empty for numbers."""
    numbers: Spread | None
    words: Lengths
    copies: int
    """Number of examples that repeat an earlier text of the split."""
    contradictions: int
    """Number of examples with a text that also occurs in the split with another label."""


@dataclass(frozen=True, slots=True)
class SharedText:
    """A training example and an example of another split with the same text."""

    text: str
    train_where: str
    train_label: str
    where: str
    label: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """Examples of a split with texts that also occur in the training set."""

    split: str
    text: str
    """Compared text: whole, or one of several: first, second, passage."""
    examples: int
    share: float
    labelled: bool
    """True if equal texts have labels to compare; otherwise the following fields are unused."""
    pairs_same_label: int
    pairs_other_label: int
    only_other_label: int
    """Number of examples with texts that occur in training with other labels only."""
    copying_accuracy: float
    """Accuracy of copying the label of a training example with the same text."""
    shown: tuple[SharedText, ...]
    """Some pairs with different labels; examples with a label that never occurs come first."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Results of the constant answer: the most frequent label of the training set, or its mean."""

    says: str
    train: dict[str, float]
    """Results on the training set, by metric of the task."""
    dev: dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Shift:
    """Differences between a split and the training set."""

    split: str
    labels: float | None
    """Fraction of examples that would have to change their label (total variation distance); for numbers the
    difference of the means in standard deviations of the training set. None without labels."""
    unknown_words: float
    """Fraction of the split's words that do not occur in the training set."""
    median_words: int
    """Median length in the split minus the median length in training."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """All results of an inspection."""

    task: str
    kind: str
    splits: tuple[SplitSummary, ...]
    baseline: Baseline | None
    overlaps: tuple[Overlap, ...]
    shifts: tuple[Shift, ...]
    warnings: tuple[str, ...]
    """Reasons that would stop `finetune`, odd labels, and differences between splits."""


def inspect_files(task: Task, places: Mapping[str, Path]) -> Inspection:
    """Inspect splits, each in its file or folder; bad lines are counted."""
    # A split may be missing in a folder, but a named path must exist; if all are missing, reading raises.
    found = [split for split, place in places.items() if not place.exists() or has_split(task, place, split)]
    read = {split: read_split(task, places[split], split, skip_bad=True) for split in found or places}
    return inspect_splits(task, read)


def inspect_splits(task: Task, splits: Mapping[str, ReadSplit]) -> Inspection:
    """Inspect the splits; the others are compared with train."""
    summaries = tuple(_summary(name, split, task.kind) for name, split in splits.items())
    train = splits["train"].examples if "train" in splits else ()
    others = {name: split.examples for name, split in splits.items() if name != "train"} if train else {}
    overlaps = tuple(
        chain.from_iterable(_overlaps(task.kind, train, name, each) for name, each in others.items())
    )
    shifts = tuple(_shift(task.kind, train, name, examples) for name, examples in others.items())
    warnings = list(odd_labels(task, train))
    try:
        check_spelling(task, train)
        check_classes(task, train)
    except UserError as error:
        warnings.insert(0, error.line())
    warnings += chain(_shifted_classes(summaries, task.kind), _adversarial(overlaps))
    if task.name in _PUBLISHED_SHIFTS:
        warnings.append(_PUBLISHED_SHIFTS[task.name])
    baseline = _baseline(task, train, others.get("dev", ()))
    return Inspection(
        task.name, task.kind.name, summaries, baseline, overlaps, shifts, tuple(dict.fromkeys(warnings))
    )


def spelled(label: Label) -> str:
    """Return a label as text for people."""
    if isinstance(label, tuple):
        return " + ".join(label) or "(none)"
    return label if isinstance(label, str) else f"{label:g}"


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _whole(example: Example) -> tuple[str, ...]:
    return tuple(map(_plain, example.text_cells.values()))


def _part(cell: str, example: Example) -> tuple[str, ...]:
    return (_plain(example.text_cells[cell]),)


def _words(example: Example) -> list[str]:
    return [word for text in _whole(example) for word in text.split()]


def _known(examples: Sequence[Example]) -> list[Label]:
    """Return the right results of the examples that have one."""
    return [example.right for example in examples if example.right is not None]


def _summary(name: str, split: ReadSplit, kind: AnyKind) -> SplitSummary:
    examples, labels = split.examples, _known(split.examples)
    copies, contradictions = _copies(examples)
    bad = split.skipped[0] if split.skipped else None
    return SplitSummary(
        name=name,
        file=str(split.path),
        examples=len(examples),
        unlabelled=len(examples) - len(labels),
        skipped=len(split.skipped),
        first_skipped=f"{bad.where}: {bad.what}" if bad else "",
        labels=_balance(examples, kind),
        numbers=_spread(labels) if kind.numeric and labels else None,
        words=_lengths(examples),
        copies=copies,
        contradictions=contradictions,
    )


def _balance(examples: Sequence[Example], kind: AnyKind) -> tuple[LabelShare, ...]:
    counts = Counter(chain.from_iterable(example.counted_as for example in examples))
    whole = len(_known(examples)) if kind.many_labels else counts.total()
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(LabelShare(label, count, count / whole) for label, count in ranked)


def _spread(labels: Sequence[Label]) -> Spread:
    numbers = np.array(labels, np.float64)
    return Spread(float(numbers.min()), float(numbers.mean()), float(numbers.max()), float(numbers.std()))


def _lengths(examples: Sequence[Example]) -> Lengths:
    counts = [
        max((sum(len(text.split()) for text in texts) for texts in example.sequences), default=0)
        or len(_words(example))
        for example in examples
    ]
    ranks = np.quantile(counts, (0, 0.5, 0.95, 0.99, 1), method="inverted_cdf")
    return Lengths(*(int(rank) for rank in ranks))


def _copies(examples: Sequence[Example]) -> tuple[int, int]:
    labels: defaultdict[tuple[str, ...], list[Label | None]] = defaultdict(list)
    for example in examples:
        labels[_whole(example)].append(example.right)
    copies = sum(len(group) - 1 for group in labels.values())
    contradictions = sum(len(group) for group in labels.values() if len(set(group)) > 1)
    return copies, contradictions


def _baseline(task: Task, train: Sequence[Example], dev: Sequence[Example]) -> Baseline | None:
    kind = task.kind
    train, dev = ([example for example in each if example.is_labelled] for each in (train, dev))
    if not train:
        return None
    labels = task.labels or tuple(sorted({label for example in train for label in example.label_names}))
    known = kind.without_tokens(train, labels).targets
    of_train, of_dev = (
        kind.baseline(task.metrics_for(labels), labels, each, kind.without_tokens(each, labels), known=known)
        if each
        else None
        for each in (train, dev)
    )
    says = kind.constant_answer(labels, known) or spelled(())
    return Baseline(says, of_train, of_dev) if of_train else None


# ---- equal texts in training and in another split


def _agreement(labels: Sequence[Label]) -> Callable[[Label, Label], bool]:
    """Return a comparison of labels: equality, or for numbers a difference within a standard deviation."""
    if not labels or not isinstance(labels[0], float):
        return lambda one, other: one == other
    near = _spread(labels).deviation
    return lambda one, other: abs(float(str(one)) - float(str(other))) <= near


def _overlaps(
    kind: AnyKind, train: Sequence[Example], split: str, examples: Sequence[Example]
) -> Iterator[Overlap]:
    cells = train[0].text_cells
    agree = _agreement(_known(train))
    yield _overlap(split, "whole", _meetings(train, examples, _whole), len(examples), agree)
    for cell in (name for name in _PARTS if name in cells and len(cells) > 1):
        meetings = _meetings(train, examples, partial(_part, cell))
        # A passage has many questions, and a context many options: their answers need not agree.
        comparing = agree if kind.from_tables else None
        yield _overlap(split, _PARTS[cell], meetings, len(examples), comparing)


Meetings = list[tuple[Example, list[Example]]]
"""Examples with a text that occurs in training, each with the training examples of that text."""


def _meetings(
    train: Sequence[Example], examples: Sequence[Example], text: Callable[[Example], tuple[str, ...]]
) -> Meetings:
    known: defaultdict[tuple[str, ...], list[Example]] = defaultdict(list)
    for example in train:
        if example.is_labelled:
            known[text(example)].append(example)
    return [(example, known[text(example)]) for example in examples if text(example) in known]


def _overlap(
    split: str, text: str, meetings: Meetings, size: int, agree: Callable[[Label, Label], bool] | None
) -> Overlap:
    compared = [each for each in meetings if each[0].is_labelled] if agree else []
    same = [
        [bool(agree and agree(_right(other), _right(example))) for other in others]
        for example, others in compared
    ]
    agreeing = sum(map(sum, same))
    return Overlap(
        split=split,
        text=text,
        examples=len(meetings),
        share=len(meetings) / size,
        labelled=bool(compared),
        pairs_same_label=agreeing,
        pairs_other_label=sum(map(len, same)) - agreeing,
        only_other_label=sum(not any(each) for each in same),
        copying_accuracy=float(np.mean([np.mean(each) for each in same])) if same else 0.0,
        shown=_shown(compared, same, text),
    )


def _right(example: Example) -> Label:
    assert example.right is not None, "only labelled examples are compared"
    return example.right


def _shown(meetings: Meetings, same: Sequence[Sequence[bool]], text: str) -> tuple[SharedText, ...]:
    differing = [index for index, agreements in enumerate(same) if not all(agreements)]
    shown = []
    for index in sorted(differing, key=lambda index: any(same[index]))[:_SHOWN_PAIRS]:
        example, others = meetings[index]
        other = others[same[index].index(False)]
        cells = {_PARTS.get(name, name): cell for name, cell in example.text_cells.items()}
        words = cells[text] if text in cells else " | ".join(cells.values())
        labels = spelled(_right(other)), spelled(_right(example))
        shown.append(SharedText(words, other.where, labels[0], example.where, labels[1]))
    return tuple(shown)


def _adversarial(overlaps: Sequence[Overlap]) -> Iterator[str]:
    """Warn about each split with texts that also occur in training, mostly with another label."""
    told: set[str] = set()
    for each in sorted(overlaps, key=lambda each: each.only_other_label, reverse=True):
        mostly_other = each.split not in told and each.only_other_label > each.examples / 2
        if mostly_other and each.only_other_label >= _MIN_ADVERSARIAL * each.examples / each.share:
            told.add(each.split)
            yield (
                f"{each.split} is adversarial: of {each.examples:,} examples ({each.share:.0%}) the "
                f"{each.text} text also occurs in train, {each.only_other_label:,} of them with "
                "other labels only; a model that remembers its training set gets these wrong"
            )


# ---- differences between a split and training


def _shift(kind: AnyKind, train: Sequence[Example], split: str, examples: Sequence[Example]) -> Shift:
    known = {word for example in train for word in _words(example)}
    words = [word for example in examples for word in _words(example)]
    unknown = sum(word not in known for word in words) / max(len(words), 1)
    longer = _lengths(examples).median - _lengths(train).median
    return Shift(split, _label_shift(kind, train, examples), unknown, longer)


def _label_shift(kind: AnyKind, train: Sequence[Example], examples: Sequence[Example]) -> float | None:
    if not _known(train) or not _known(examples):
        return None
    if kind.numeric:
        spread = _spread(_known(train))
        return (_spread(_known(examples)).mean - spread.mean) / spread.deviation if spread.deviation else 0.0
    counts, others = (_label_counts(kind, each) for each in (train, examples))
    differences = (
        counts[label] / counts.total() - others[label] / others.total() for label in counts | others
    )
    return sum(map(abs, differences)) / 2


def _label_counts(kind: AnyKind, examples: Sequence[Example]) -> Counter[Label]:
    """Count each label; in multi-label data, count each set of labels."""
    if kind.many_labels:
        return Counter(_known(examples))
    return Counter(chain.from_iterable(example.counted_as for example in examples))


def _shifted_classes(summaries: Sequence[SplitSummary], kind: AnyKind) -> Iterator[str]:
    """Warn about the class with the largest difference of fractions between training and another split."""
    train = next((each for each in summaries if each.name == "train"), None)
    if train is None or kind.numeric:
        return
    before = {each.label: each.share for each in train.labels}
    for split in summaries:
        after = {each.label: each.share for each in split.labels}
        if split is train or not before or not after:
            continue
        both = {each: (before.get(each, 0.0), after.get(each, 0.0)) for each in before | after}
        label = max(both, key=lambda each: round(abs(both[each][0] - both[each][1]), 9))
        one, other = both[label]
        together = [sum(each.count for each in summary.labels) for summary in (train, split)]
        mean = (one * together[0] + other * together[1]) / sum(together)
        error = sqrt(max(mean * (1 - mean), 0.0) * sum(1 / each for each in together))
        if abs(one - other) >= max(_MIN_SHIFT, _MIN_SIGMAS * error):
            yield (
                f"the labels shift: {label!r} is {one:.1%} of train and {other:.1%} of {split.name}; what a "
                "model learns about their frequency, and a threshold, may not fit there"
            )
