"""A user's own table of texts as a task: one class, several, or a number for each text or pair."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Literal

from bertsmith.ground.seeds import key_of
from bertsmith.tasks.examples import BadLine, Example
from bertsmith.tasks.labels import LabelRule, number, several, word
from bertsmith.tasks.reading import labels_in
from bertsmith.tasks.tables import TABLE_SUFFIXES, bare_suffix
from bertsmith.tasks.task import Reader, Split, Task
from bertsmith.tasks.text_rows import LabelColumn, TextColumns, text_reader

CustomKind = Literal["classify", "multilabel", "regress"]

FEWEST_TO_PART = 10
"""A file with fewer rows is trained on as a whole: what could be held back would tell nothing."""
_STEMS = {"train": ("train",), "dev": ("dev", "validation", "valid"), "test": ("test",)}
_METRICS: dict[CustomKind, tuple[str, ...]] = {
    "classify": ("accuracy", "macro_f1"),
    "multilabel": ("micro_f1",),
    "regress": ("spearman", "pearson", "mean_absolute_error", "root_mean_squared_error"),
}


@dataclass(frozen=True, slots=True)
class CustomSpec:
    """Which columns of the table are what, and what is asked."""

    text: str
    label: str
    second: str = ""
    """The column of the second texts, where the texts are pairs."""
    kind: CustomKind = "classify"
    separator: str = ","
    """multilabel: what parts the labels in a cell; JSON lists need none."""
    key: str = ""
    """The column of the ids; without one, an example's id is its place."""
    dev_share: float = 0.1
    """The share of the training file that is kept for development; 0 where development has its own file."""
    dev: str = ""
    """The development file, where it does not lie beside the training file."""


def custom_task(spec: CustomSpec) -> Task:
    """The task that such a table poses."""
    texts = (spec.text, spec.second) if spec.second else (spec.text,)
    # Of several labels an empty cell says that there are none; only a missing column leaves them untold.
    told = LabelColumn(spec.label, _rule(spec), untold=() if spec.kind == "multilabel" else ("",))
    columns = TextColumns(texts, told, key=spec.key)
    whole = text_reader(replace(columns, keyed="always" if spec.key else "if told"))
    secret = text_reader(replace(columns, label=replace(told, wanted="if told")))
    splits = {**_labelled_splits(spec, whole), "test": _files("test", secret)}
    metrics = _METRICS[spec.kind]
    return Task("custom", "Custom", spec.kind, metrics, splits, custom=asdict(spec))


def _labelled_splits(spec: CustomSpec, whole: Reader) -> dict[str, Split]:
    if spec.dev:

        def elsewhere(_: Path) -> Iterator[Example | BadLine]:
            return whole(Path(spec.dev))

        return {"train": _files("train", whole), "dev": _files("train", elsewhere)}
    if spec.dev_share:
        training, held = _parted(whole, spec.dev_share)
        part = replace(_files("train", held), may_be_empty=True)
        return {"train": _files("train", training), "dev": part}
    return {"train": _files("train", whole), "dev": _files("dev", whole)}


def has_own_dev(data: Path) -> bool:
    """Whether a folder holds a development file beside its training file."""
    names = [f"{stem}{suffix}" for stem in _STEMS["dev"] for suffix in TABLE_SUFFIXES]
    return data.is_dir() and any(bare.name in names for bare in map(_unpacked, data.iterdir()))


def _unpacked(file: Path) -> Path:
    return file if file.suffix.lower() == bare_suffix(file) else file.with_suffix("")


def _rule(spec: CustomSpec) -> LabelRule:
    if spec.kind == "multilabel":
        return several(spec.separator)
    return number if spec.kind == "regress" else word


def _files(split: str, reader: Reader) -> Split:
    return Split({f"{stem}{suffix}": reader for suffix in TABLE_SUFFIXES for stem in _STEMS[split]})


def _parted(reader: Reader, dev_share: float) -> tuple[Reader, Reader]:
    """Readers of the two parts of a file."""

    def training(path: Path) -> Iterator[Example | BadLine]:
        found = list(reader(path))
        held = _held_keys(found, dev_share)
        # A line that cannot be taken is told with the training part, or it would be told twice.
        return (each for each in found if isinstance(each, BadLine) or each.key not in held)

    def development(path: Path) -> Iterator[Example | BadLine]:
        found = list(reader(path))
        held = _held_keys(found, dev_share)
        return (each for each in found if not isinstance(each, BadLine) and each.key in held)

    return training, development


def _held_keys(found: Sequence[Example | BadLine], dev_share: float) -> set[str]:
    """The ids of the examples that are kept for development: those whose ids are drawn.

    At least one is kept, but never the last one of a class, which would be left unknown to the model.
    """
    examples = [each for each in found if not isinstance(each, BadLine)]
    held: set[str] = set()
    if len(examples) < FEWEST_TO_PART:
        return held
    left = Counter(label for each in examples for label in labels_in(each))
    for draw, example in sorted(((_draw(each.key), each) for each in examples), key=itemgetter(0)):
        if draw >= dev_share and held:
            break
        labels = labels_in(example)
        if all(left[label] > 1 for label in labels):
            held.add(example.key)
            left.subtract(labels)
    return held


def _draw(key: str) -> float:
    return key_of(0, "development", key) / 2**64
