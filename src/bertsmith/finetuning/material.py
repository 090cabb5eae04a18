"""What a run learns from and is judged on: the task's splits, read, named and as tokens."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from pathlib import Path

from bertsmith.ground.errors import UserError
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding import encode_split
from bertsmith.tasks.encoding_cache import cached_encoding, encoding_key
from bertsmith.tasks.examples import BadLine, Example, TaggedExample, TextExample
from bertsmith.tasks.reading import has_name, has_split, is_labelled, labels_in, labels_of, read_split
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_file import TaskNote
from bertsmith.text.tokenizer import Tokenizer

UNLABELLED = "test"
"""Splits whose names begin so have no labels in the published collections: they are for predictions."""

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A split as examples and as tokens."""

    examples: Sequence[Example]
    encoded: EncodedSet


@dataclass(frozen=True, slots=True)
class Material:
    """The splits of a task, read."""

    task: Task
    splits: Mapping[str, Sequence[Example]]
    labels: tuple[str, ...]
    skipped: tuple[BadLine, ...]

    @property
    def exams(self) -> list[str]:
        """The splits that a run is judged on, the deciding one first."""
        return [name for name in self.splits if name != "train"]


def read_material(task: Task, data: Path, *, skip_bad: bool) -> Material:
    """The training split and every further split with labels that is there."""
    if "train" not in task.splits:
        what = f"{task.title} has no training data of its own"
        raise UserError(what, remedy="fine-tune on mnli, then evaluate that run on its file")
    splits: dict[str, Sequence[Example]] = {}
    skipped: list[BadLine] = []
    for name in ["train", *_exams_in(task, data)]:
        read = read_split(task, data, name, skip_bad=skip_bad)
        splits[name] = read.examples
        skipped += read.skipped
    _refuse_unlabelled(splits)
    labels = labels_of(task, splits["train"])
    for name in [name for name in splits if name != "train"]:
        if skip_bad:
            splits[name], strange = without_strange_labels(splits[name], labels)
            skipped += strange
        if remark := on_strange_labels(splits[name], labels):
            _tell_once(f"{name}: {remark}")
    return Material(task, {name: read for name, read in splits.items() if read}, labels, tuple(skipped))


def _refuse_unlabelled(splits: Mapping[str, Sequence[Example]]) -> None:
    """Stop where there is nothing to learn from, or something that cannot be judged."""
    for name, examples in splits.items():
        bare = [example for example in examples if not is_labelled(example)]
        if name == "train" and len(bare) == len(examples):
            what, remedy = "no training example has a label", "name a file with labels"
            raise UserError(what, where=examples[0].where, remedy=remedy)
        if name != "train" and bare:
            what = f"{len(bare):,} of {len(examples):,} examples to judge the model by have no label"
            remedy = "add the labels, or take the development file away"
            raise UserError(f"{what}; this is the first", where=bare[0].where, remedy=remedy)


def split_named(task: Task, file: Path) -> str | None:
    """The split that a file belongs to by its name, if any."""
    if task.custom.get("dev_share"):  # which part an example belongs to is decided inside of the file
        return None
    return next((split for split in task.splits if names_file(task, split, file)), None)


def names_file(task: Task, split: str, file: Path) -> bool:
    """Whether a file has one of the names of a split."""
    return any(has_name(file, pattern) for pattern in task.splits[split].files)


def _exams_in(task: Task, data: Path) -> list[str]:
    """The splits that a run is judged on; a single file has none but by its name, or where it is parted."""
    exams = [name for name in task.splits if name != "train" and not name.startswith(UNLABELLED)]
    if data.is_file() and not (task.custom.get("dev_share") or task.custom.get("dev")):
        return [name for name in exams if names_file(task, name, data)]
    return [name for name in exams if has_split(task, data, name)]


def without_strange_labels(
    examples: Sequence[Example], labels: tuple[str, ...]
) -> tuple[Sequence[Example], list[BadLine]]:
    """The examples whose labels occur in training, and a line for each of the others."""
    known = set(labels)
    is_known = [known.issuperset(labels_in(example)) for example in examples]
    kept = list(compress(examples, is_known))
    strange = [
        BadLine("has a label that training has not", example.where, "mend the label")
        for example, is_one in zip(examples, is_known, strict=True)
        if not is_one
    ]
    return kept, strange


def on_strange_labels(examples: Sequence[Example], labels: tuple[str, ...]) -> str:
    """What is to be said of labels that training does not have; nothing where there are none."""
    known = set(labels)
    strange = [(label, example) for example in examples for label in labels_in(example) if label not in known]
    if not strange:
        return ""
    label, example = strange[0]
    if isinstance(example, TaggedExample):
        what = f"{len(strange):,} words have tags"
    else:
        what = f"{len({example.key for _, example in strange}):,} examples have labels"
    first = f"the first is {label!r} ({example.where})"
    return f"{what} that training does not have and count as wrong; {first}"


@cache
def _tell_once(remark: str) -> None:
    log.warning("%s", remark)


def note_of(material: Material, recipe: FinetuningRecipe) -> TaskNote:
    """What the finished folder will say of itself."""
    task, first = material.task, material.splits["train"][0]
    pairs = isinstance(first, TextExample) and not isinstance(first.texts, str)
    return TaskNote(
        task=task.name,
        kind=task.kind,
        metrics=task.metrics,
        labels=material.labels,
        pairs=pairs,
        text=recipe.text,
        head=recipe.head,
        answers=recipe.answers,
        custom=dict(task.custom),
    )


def encoded_sheet(
    examples: Sequence[Example], note: TaskNote, tokenizer: Tokenizer, *, cache: Path | None = None
) -> Sheet:
    """A split as tokens, from the cache where it was encoded before."""

    def make() -> EncodedSet:
        return encode_split(note.kind, examples, note.labels, tokenizer, note.text)

    if cache is None:
        return Sheet(examples, make())
    key = encoding_key(note.kind, examples, note.labels, tokenizer, note.text)
    return Sheet(examples, cached_encoding(cache, key, make))
