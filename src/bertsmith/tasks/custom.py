"""A user's own table of texts as a task: one class, several, or a number for each text or pair."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.tasks import tables
from bertsmith.tasks.example_types import BadLine, Example, Reader
from bertsmith.tasks.kinds.registry import text_kind_named
from bertsmith.tasks.stratified_split import DEV, TEST, held_back, held_back_fold
from bertsmith.tasks.table_format import TableFormat
from bertsmith.tasks.task import Split, Task

_STEMS = {"train": ("train",), "dev": ("dev", "validation", "valid"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class CustomSpec:
    """The roles of a table's columns, the kind of task, and the splits."""

    text: str
    label: str
    second: str = ""
    """Column of the second texts, for pairs of texts."""
    kind: str = "classify"
    separator: str = ","
    """multilabel: separator of the labels in a cell; not needed for JSON lists."""
    key: str = ""
    """Column of the ids; without one, an example's id is its index."""
    dev_fraction: float = 0.1
    """Fraction of the training file kept for development; 0 if there is a development file."""
    dev: str = ""
    """Development file, if it is not in the folder of the training file."""
    test_fraction: float = 0.0
    """Fraction of the training file kept for testing the finished model."""
    folds: int = 0
    """Number of folds of the file, with `fold`, counted from 0, for development; 0: none."""
    fold: int = 0

    @property
    def is_parted(self) -> bool:
        """True if a part of the training file is held back."""
        return bool((self.dev_fraction and not self.dev) or self.test_fraction or self.folds)


def custom_task(spec: CustomSpec, form: TableFormat = tables.USUAL_FORMAT) -> Task:
    """Make the task of such a table, written in this format."""
    for part, fraction in (("development set", spec.dev_fraction), ("test part", spec.test_fraction)):
        if not 0 <= fraction < 1:  # also rejects NaN
            what = f"a {part} cannot be {fraction:g} of the rows"
            raise UserError(what, remedy="give a fraction, for example 0.1, or 0 for none")
    texts = (spec.text, spec.second) if spec.second else (spec.text,)
    kind = text_kind_named(spec.kind)
    label = tables.LabelColumn(spec.label, kind.label_rule(spec.separator), unlabelled=kind.unlabelled_cells)
    columns = tables.TextColumns(texts, label, key=spec.key)
    whole = tables.text_reader(replace(columns, keyed="always" if spec.key else "if given"), form)
    unlabelled = tables.text_reader(replace(columns, label=replace(label, wanted="if given")), form)

    def elsewhere(_: Path) -> Iterator[Example | BadLine]:
        return whole(Path(spec.dev))

    # The development set is a separate file, a part of the training file, or a file next to it.
    splits = {"train": _files("train", _part(whole, spec, "train") if spec.is_parted else whole)}
    if spec.dev:
        splits[DEV] = _files("train", elsewhere)
    elif spec.dev_fraction or spec.folds:
        splits[DEV] = replace(_files("train", _part(whole, spec, DEV)), may_be_empty=True)
    else:
        splits[DEV] = _files("dev", whole)
    splits["test"] = _files("test", unlabelled)
    if spec.test_fraction:
        splits[TEST] = replace(_files("train", _part(whole, spec, TEST)), may_be_empty=True)
    return Task(
        "custom", "Custom", kind, kind.custom_metrics, splits, custom=asdict(spec), own=True, form=form
    )


def spec_of(custom: Mapping[str, str | float]) -> CustomSpec:
    """Restore the spec of a table from a task.json or a run folder."""
    if unknown := sorted(custom.keys() - {each.name for each in fields(CustomSpec)}):
        what = f"the model was fine-tuned by another version of bertsmith, which used custom.{unknown[0]}"
        raise UserError(what, remedy="fine-tune it again")
    return CustomSpec(**custom)  # type: ignore[arg-type]


def has_own_dev(data: Path) -> bool:
    """True if a folder has a development file, compressed or not, next to its training file."""
    if not data.is_dir():
        return False
    names = {f"{stem}{suffix}" for stem in _STEMS["dev"] for suffix in tables.TABLE_SUFFIXES}
    return any(
        (file.name if file.suffix.lower() == tables.bare_suffix(file) else file.stem) in names
        for file in data.iterdir()
    )


def _files(split: str, reader: Reader) -> Split:
    return Split({f"{stem}{suffix}": reader for suffix in tables.TABLE_SUFFIXES for stem in _STEMS[split]})


def _part(whole: Reader, spec: CustomSpec, split: str) -> Reader:
    """Return a reader of the part of a file that belongs to a split."""

    def read(path: Path) -> Iterator[Example | BadLine]:
        found = list(whole(path))
        held = _held_back([each for each in found if not isinstance(each, BadLine)], spec)
        for each in found:
            # Report a bad line with the training part only, so that it is not reported twice.
            if ("train" if isinstance(each, BadLine) else held.get(each.key, "train")) == split:
                yield each

    return read


def _held_back(examples: Sequence[Example], spec: CustomSpec) -> dict[str, str]:
    """Return the split of each held-back example by its id."""
    if spec.folds:
        return held_back_fold(examples, int(spec.fold), int(spec.folds), test_fraction=spec.test_fraction)
    return held_back(examples, dev_fraction=spec.dev_fraction, test_fraction=spec.test_fraction)
