"""Tasks, and reading the examples of a split from a data folder or file."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import COMPRESSED_SUFFIXES
from bertsmith.tasks.example_types import (
    BadLabel,
    BadLine,
    Example,
    Reader,
    Undecided,
    unreadable,
)
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.metrics import Metric
from bertsmith.tasks.table_format import TableFormat
from bertsmith.tasks.tables import TABLE_SUFFIXES, bare_suffix


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a data set: possible names of its file, each with a reader."""

    files: Mapping[str, Reader]
    """File name (or glob) -> reader, most likely first."""
    may_be_empty: bool = False
    """True for a part of another split's file that is missing if the file is too small to divide."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task from the papers, or a user's own."""

    name: str
    """Name on the command line: sst2."""
    title: str
    """Title in tables: SST-2."""
    kind: AnyKind
    metrics: tuple[str, ...]
    """Names of the kind's metrics; the first one decides."""
    splits: Mapping[str, Split]
    """Splits by name: train, dev, test, and further ones such as dev-mismatched."""
    labels: tuple[str, ...] = ()
    """Classes or tags in the published order; empty if the training file defines them."""
    folders: tuple[str, ...] = ()
    """Names of its folder in common collections, such as SST-2."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Dotted keys of the fine-tuning recipe that differ from the defaults, with their published values."""
    custom: Mapping[str, str | float] = field(default_factory=dict)
    """Columns of a user's own table (the fields of `custom.CustomSpec`)."""
    own: bool = False
    """True for a user's own data: no settings are published, and simple models are fitted for comparison."""
    form: TableFormat = TableFormat()
    """Format of the user's own table; not stored with the model."""

    @property
    def deciding_metric(self) -> Metric:
        """The metric that decides between checkpoints and between runs."""
        return self.kind.metric_named(self.metrics[0])

    def metrics_for(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the metrics for these labels, the deciding one first."""
        return self.kind.own_metrics(self.metrics, labels) if self.own else self.metrics


_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class ReadSplit:
    """The examples of a split, and the skipped ones."""

    examples: tuple[Example, ...]
    skipped: tuple[BadLine, ...]
    """Lines that could not be read, and examples that the annotators disagreed on."""
    path: Path
    """The file, or the folder if several files make the split."""


@dataclass(frozen=True, slots=True)
class _Source:
    paths: tuple[Path, ...]
    reader: Reader


def has_split(task: Task, data: Path, split: str) -> bool:
    """True if the data contain this split of the task."""
    source = _source(task, data, split) if split in task.splits else None
    if source is None or not task.splits[split].may_be_empty:
        return source is not None
    return any(not isinstance(found, BadLine) for found in _checked(task, source))


def read_split(task: Task, data: Path, split: str, *, skip_bad: bool) -> ReadSplit:
    """Read the examples of a split; raise at a bad line, unless bad lines are to be skipped."""
    source = _found_source(task, data, split)
    read = _sorted_out(_checked(task, source), source, skip_bad=skip_bad)
    return _filled(read, task, split)


def read_for_prediction(task: Task, data: Path, split: str, *, skip_bad: bool) -> ReadSplit:
    """Read the examples of a split for predictions, ignoring bad and unknown labels."""
    source = _found_source(task, data, split)
    taken = (each.example if isinstance(each, BadLabel) else each for each in _checked(task, source))
    return _filled(_sorted_out(taken, source, skip_bad=skip_bad), task, split)


def _sorted_out(found: Iterable[Example | BadLine], source: _Source, *, skip_bad: bool) -> ReadSplit:
    examples: list[Example] = []
    skipped: list[BadLine] = []
    for each in found:
        if not isinstance(each, BadLine):
            examples.append(each)
        elif skip_bad or isinstance(each, Undecided):
            skipped.append(each)
        else:
            remedy = f"{each.remedy}, or leave such lines out with `skip_bad=True`"
            raise UserError(each.what, where=each.where, remedy=remedy)
    path = source.paths[0] if len(source.paths) == 1 else source.paths[0].parent
    return ReadSplit(tuple(examples), tuple(skipped), path)


def _filled(read: ReadSplit, task: Task, split: str) -> ReadSplit:
    if not read.examples:
        published = bool(task.folders)
        remedy = f"download the {split} file of {task.title} again" if published else "put examples into it"
        skipped = ""
        if read.skipped:
            first = read.skipped[0]
            skipped = f": {len(read.skipped):,} lines were skipped, first: {first.where} {first.what}"
            remedy = first.remedy
        raise UserError(f"contains no examples{skipped}", where=str(read.path), remedy=remedy)
    return read


def labels_of(task: Task, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the classes or tags in order: the published ones, or else the sorted labels of the examples."""
    if task.labels or not task.kind.min_labels:
        return task.labels
    counts = Counter(label for example in examples for label in example.label_names)
    if len(counts) < task.kind.min_labels:
        found = f"only the label {next(iter(counts))!r}" if counts else "no labels"
        what = f"there is nothing to learn: the examples have {found}"
        remedy = "choose another label column, or add examples of other classes"
        raise UserError(what, where=examples[0].where if examples else "", remedy=remedy)
    if all(map(_NUMBER.fullmatch, counts)):
        return tuple(sorted(counts, key=lambda label: (float(label), label)))
    return tuple(sorted(counts))


def _found_source(task: Task, data: Path, split: str) -> _Source:
    if split not in task.splits:
        remedy = f"its splits are {', '.join(task.splits)}"
        raise UserError(f"{task.title} does not have a split {split!r}", remedy=remedy)
    source = _source(task, data, split)
    if source is None:
        raise _not_found(task, data, split)
    return source


def _source(task: Task, data: Path, split: str) -> _Source | None:
    if data.is_file():
        return _file_source(task, data, split)
    for folder in (data, *(data / name for name in task.folders)):
        for pattern, reader in task.splits[split].files.items():
            if paths := _matching(folder, pattern):
                return _Source(paths, reader)
    return None


def _file_source(task: Task, file: Path, split: str) -> _Source | None:
    """Find the reader for a file of any name: by its name, else by its format, else as another split's.

    For kinds `from_tables`, any table with the columns of the most likely file is accepted.
    """
    own = task.splits[split].files
    others = {name: reader for each in task.splits.values() for name, reader in each.files.items()}
    named = [reader for pattern, reader in own.items() if has_name(file, pattern)]
    formatted = [reader for pattern, reader in own.items() if bare_suffix(Path(pattern)) == bare_suffix(file)]
    foreign = [reader for pattern, reader in others.items() if has_name(file, pattern)]
    tabular = own.values() if task.kind.from_tables and bare_suffix(file) in TABLE_SUFFIXES else ()
    return next((_Source((file,), reader) for reader in (*named, *formatted, *foreign, *tabular)), None)


def has_name(file: Path, pattern: str) -> bool:
    """True if a file, compressed or not, has a name of this pattern."""
    return any(fnmatch(file.name, Path(pattern).name + suffix) for suffix in ("", *COMPRESSED_SUFFIXES))


def names_file(task: Task, split: str, file: Path) -> bool:
    """True if a file has one of the names of a split."""
    return any(has_name(file, pattern) for pattern in task.splits[split].files)


def _matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    for suffix in ("", *COMPRESSED_SUFFIXES):
        if found := sorted(folder.glob(pattern + suffix)):
            return tuple(found)
    return ()


def _not_found(task: Task, data: Path, split: str) -> UserError:
    names = ", ".join(task.splits[split].files)
    if data.is_file():
        own = (bare_suffix(Path(pattern)) for pattern in task.splits[split].files)
        formats = TABLE_SUFFIXES if task.kind.from_tables else filter(None, dict.fromkeys(own))
        what = f"is not in a supported format of {task.title}"
        return UserError(what, where=str(data), remedy=f"write it as {', '.join(formats)}")
    if not data.exists():
        return UserError("does not exist", where=str(data), remedy=f"name a folder with {names}")
    remedy = f"looked for {names}, compressed or not"
    folders = [name for name in task.folders if (data / name).is_dir()]
    if folders:
        remedy += f", also in {', '.join(folders)}"
    return UserError(f"lacks the {split} file of {task.title}", where=str(data), remedy=remedy)


def _checked(task: Task, source: _Source) -> Iterator[Example | BadLine]:
    """Yield examples, or a BadLine for one with an unreadable text, a repeated id or an unknown label."""
    seen: dict[str, str] = {}
    known = set(task.labels)
    for path in source.paths:
        for example in source.reader(path):
            if isinstance(example, BadLine):
                yield example
            elif example.key in seen:
                what = f"has the id {example.key!r}, as {seen[example.key]} has"
                yield BadLine(what, example.where, "give every example a different id")
            else:
                seen[example.key] = example.where
                yield unreadable(example) or _with_known_labels(example, known)


def _with_known_labels(example: Example, known: set[str]) -> Example | BadLine:
    if not known or known.issuperset(example.label_names):
        return example
    unknown = sorted(set(example.label_names) - known)
    what = f"has the unknown label {unknown[0]!r}; the labels are {', '.join(sorted(known))}"
    return BadLabel(what, example.where, "correct the label", example)
