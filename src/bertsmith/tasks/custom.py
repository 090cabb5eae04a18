"""A user's own table of texts as a task: one class, several, or a number for each text or pair."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path

from bertsmith.core.seeds import key_of
from bertsmith.tasks.example_types import BadLine, Example, Reader
from bertsmith.tasks.kinds.registry import TEXT_KINDS
from bertsmith.tasks.tables import (
    TABLE_SUFFIXES,
    LabelColumn,
    TextColumns,
    bare_suffix,
    text_reader,
)
from bertsmith.tasks.task import Split, Task

MIN_ROWS_TO_SPLIT = 10
"""A file with fewer rows is trained on as a whole: what could be held back would tell nothing."""
_STEMS = {"train": ("train",), "dev": ("dev", "validation", "valid"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class CustomSpec:
    """Which columns of the table are what, and what is asked."""

    text: str
    label: str
    second: str = ""
    """The column of the second texts, where the texts are pairs."""
    kind: str = "classify"
    separator: str = ","
    """multilabel: what parts the labels in a cell; JSON lists need none."""
    key: str = ""
    """The column of the ids; without one, an example's id is its place."""
    dev_fraction: float = 0.1
    """Fraction of the training file that is kept for development; 0 where development has its own file."""
    dev: str = ""
    """The development file, where it does not lie beside the training file."""


def custom_task(spec: CustomSpec) -> Task:
    """The task that such a table poses."""
    texts = (spec.text, spec.second) if spec.second else (spec.text,)
    kind = TEXT_KINDS[spec.kind]
    label = LabelColumn(spec.label, kind.label_rule(spec.separator), unlabelled=kind.unlabelled_cells)
    columns = TextColumns(texts, label, key=spec.key)
    whole = text_reader(replace(columns, keyed="always" if spec.key else "if given"))
    secret = text_reader(replace(columns, label=replace(label, wanted="if given")))

    def elsewhere(_: Path) -> Iterator[Example | BadLine]:
        return whole(Path(spec.dev))

    def training(path: Path) -> Iterator[Example | BadLine]:
        found = list(whole(path))
        held = _held_keys(found, spec.dev_fraction)
        # A line that cannot be taken is reported with the training part, or it would be reported twice.
        return (each for each in found if isinstance(each, BadLine) or each.key not in held)

    def development(path: Path) -> Iterator[Example | BadLine]:
        found = list(whole(path))
        held = _held_keys(found, spec.dev_fraction)
        return (each for each in found if not isinstance(each, BadLine) and each.key in held)

    # The development set has a file of its own anywhere, is a part of the training file, or lies beside it.
    if spec.dev:
        splits = {"train": _files("train", whole), "dev": _files("train", elsewhere)}
    elif spec.dev_fraction:
        part = replace(_files("train", development), may_be_empty=True)
        splits = {"train": _files("train", training), "dev": part}
    else:
        splits = {"train": _files("train", whole), "dev": _files("dev", whole)}
    splits["test"] = _files("test", secret)
    return Task("custom", "Custom", kind, kind.custom_metrics, splits, custom=asdict(spec))


def has_own_dev(data: Path) -> bool:
    """Whether a folder holds a development file, packed or not, beside its training file."""
    if not data.is_dir():
        return False
    names = {f"{stem}{suffix}" for stem in _STEMS["dev"] for suffix in TABLE_SUFFIXES}
    return any(
        (file.name if file.suffix.lower() == bare_suffix(file) else file.stem) in names
        for file in data.iterdir()
    )


def _files(split: str, reader: Reader) -> Split:
    return Split({f"{stem}{suffix}": reader for suffix in TABLE_SUFFIXES for stem in _STEMS[split]})


def _held_keys(found: Sequence[Example | BadLine], dev_fraction: float) -> set[str]:
    """The ids of the examples that are kept for development: those whose ids are drawn.

    At least one is kept, but never the last one of a class, which would be left unknown to the model.
    """
    examples = [each for each in found if not isinstance(each, BadLine)]
    held: set[str] = set()
    if len(examples) < MIN_ROWS_TO_SPLIT:
        return held
    # Drawn by a hash of the id: an example stays on its side when the file is sorted or grows.
    draws = [(key_of(0, "development", each.key) / 2**64, each) for each in examples]
    left = Counter(label for each in examples for label in each.label_names)
    for draw, example in sorted(draws, key=itemgetter(0)):
        if draw >= dev_fraction and held:
            break
        labels = example.label_names
        if all(left[label] > 1 for label in labels):
            held.add(example.key)
            left.subtract(labels)
    return held
