"""What a run learns from and is judged on: the task's splits, read, named and as tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding import encode_split
from bertsmith.tasks.encoding_cache import cached_encoding, encoding_key
from bertsmith.tasks.examples import BadLine, Example, TextExample
from bertsmith.tasks.reading import has_split, labels_of, read_split
from bertsmith.tasks.task import Task
from bertsmith.tasks.task_file import TaskNote
from bertsmith.text.tokenizer import Tokenizer

UNLABELLED = "test"
"""Splits whose names begin so have no labels in the published collections: they are for predictions."""


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
    splits: dict[str, Sequence[Example]] = {}
    skipped: list[BadLine] = []
    for name in task.splits:
        if name == "train" or (not _for_prediction(name) and has_split(task, data, name)):
            read = read_split(task, data, name, skip_bad=skip_bad)
            splits[name] = read.examples
            skipped += read.skipped
    return Material(task, splits, labels_of(task, splits["train"]), tuple(skipped))


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


def _for_prediction(split: str) -> bool:
    return split.startswith(UNLABELLED)
