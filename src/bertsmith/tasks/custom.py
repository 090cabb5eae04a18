"""A user's own table of texts as a task: one class, several, or a number for each text or pair."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bertsmith.ground.seeds import key_of
from bertsmith.tasks.examples import BadLine, Example
from bertsmith.tasks.labels import LabelRule, number, several, word
from bertsmith.tasks.tables import TABLE_SUFFIXES, bare_suffix
from bertsmith.tasks.task import Reader, Split, Task
from bertsmith.tasks.text_rows import LabelColumn, TextColumns, text_reader

CustomKind = Literal["classify", "multilabel", "regress"]

_STEMS = {"train": ("train",), "dev": ("dev", "validation", "valid"), "test": ("test",)}
_METRICS: dict[CustomKind, tuple[str, ...]] = {
    "classify": ("accuracy", "macro_f1"),
    "multilabel": ("micro_f1",),
    "regress": ("spearman", "pearson"),
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


def custom_task(spec: CustomSpec) -> Task:
    """The task that such a table poses."""
    texts = (spec.text, spec.second) if spec.second else (spec.text,)
    told = LabelColumn(spec.label, _rule(spec), untold=() if spec.kind == "multilabel" else ("",))
    whole = text_reader(TextColumns(texts, told, key=spec.key))
    secret = text_reader(TextColumns(texts, replace(told, wanted="if told", untold=("",)), key=spec.key))
    if spec.dev_share:
        training, held = _parted(whole, spec.dev_share)
        splits = {"train": _files("train", training), "dev": _files("train", held)}
    else:
        splits = {"train": _files("train", whole), "dev": _files("dev", whole)}
    splits["test"] = _files("test", secret)
    metrics = _METRICS[spec.kind]
    return Task("custom", "Custom", spec.kind, metrics, splits, custom=asdict(spec))


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
    """Readers of the two parts of a file; which part an example belongs to depends on its id alone."""

    def is_held(example: Example | BadLine) -> bool:
        # A line that cannot be taken is told with the training part, or it would be told twice.
        return not isinstance(example, BadLine) and _draw(example.key) < dev_share

    def training(path: Path) -> Iterator[Example | BadLine]:
        return (example for example in reader(path) if not is_held(example))

    def held(path: Path) -> Iterator[Example | BadLine]:
        return (example for example in reader(path) if is_held(example))

    return training, held


def _draw(key: str) -> float:
    return key_of(0, "development", key) / 2**64
