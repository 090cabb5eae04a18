"""The splits of a task, read from its files, checked and encoded."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Literal

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.custom import spec_of
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.encoding_cache import cached_encoding, encoding_key
from bertsmith.tasks.example_types import BadLine, Example
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.label_checks import check_classes, check_spelling, odd_labels
from bertsmith.tasks.stratified_split import TEST
from bertsmith.tasks.task import Task, has_split, labels_of, names_file, read_split
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.text.tokenizer import Tokenizer

UNLABELLED = "test"
"""Name prefix of splits without labels in the published collections: they are for predictions."""

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class EncodedSplit:
    """A split as examples and as tokens."""

    examples: Sequence[Example]
    encoded: EncodedSet


@dataclass(frozen=True, slots=True)
class TaskSplits:
    """The splits of a task, read."""

    task: Task
    splits: Mapping[str, Sequence[Example]]
    labels: tuple[str, ...]
    skipped: tuple[BadLine, ...]

    @property
    def evaluation_names(self) -> list[str]:
        """The splits that a run is evaluated on, the deciding one first."""
        return [name for name in self.splits if name != "train"]

    def limited(self, limit: int | Literal["off"]) -> "TaskSplits":
        """Return at most `limit` examples of each split, chosen by a hash of their ids, and all labels."""
        if limit == "off":
            return self
        splits: dict[str, Sequence[Example]] = {}
        for name, examples in self.splits.items():
            drawn = sorted(examples, key=lambda each: key_of(0, "limit", each.key))[:limit]
            chosen = {example.key for example in drawn}
            splits[name] = [example for example in examples if example.key in chosen]
        return replace(self, splits=splits)


def read_splits(task: Task, data: Path, *, skip_bad: bool) -> TaskSplits:
    """Read the training split and every other split with labels that exists."""
    if "train" not in task.splits:
        what = f"{task.title} does not have training data"
        raise UserError(what, remedy="fine-tune on mnli, then evaluate that run on its file")
    splits: dict[str, Sequence[Example]] = {}
    skipped: list[BadLine] = []
    for name in ["train", *_evaluation_splits(task, data)]:
        read = read_split(task, data, name, skip_bad=skip_bad)
        splits[name] = read.examples
        skipped += read.skipped
    _check_labels(splits)
    labels = labels_of(task, splits["train"])
    for name in [name for name in splits if name != "train"]:
        if skip_bad:
            splits[name], unknown = without_unknown_labels(splits[name], labels)
            skipped += unknown
        if message := warn_of_unknown_labels(task.kind, splits[name], labels):
            _warn_once(f"{name}: {message}")
    return TaskSplits(task, {name: read for name, read in splits.items() if read}, labels, tuple(skipped))


def check_new_labels(splits: TaskSplits) -> None:
    """Raise if a user's own labels can hardly be meant as classes, and warn of odd ones.

    Call it for new runs only: a resumed run has learned the labels already.
    """
    check_spelling(splits.task, splits.splits["train"])
    check_classes(splits.task, splits.splits["train"])
    for message in odd_labels(splits.task, splits.splits["train"]):
        _warn_once(message)


def _check_labels(splits: Mapping[str, Sequence[Example]]) -> None:
    """Raise if all training labels are missing, or if an example of another split lacks one."""
    for name, examples in splits.items():
        bare = [example for example in examples if not example.is_labelled]
        if name == "train" and len(bare) == len(examples):
            what, remedy = "none of the training examples has a label", "give a file with labels"
            raise UserError(what, where=examples[0].where, remedy=remedy)
        if name != "train" and bare:
            what = f"{len(bare):,} of {len(examples):,} examples to evaluate lack a label"
            remedy = "add the labels, or remove the development file"
            raise UserError(f"{what}; this is the first", where=bare[0].where, remedy=remedy)


def split_named(task: Task, file: Path) -> str | None:
    """Return the split that a file belongs to by its name, or None."""
    if (
        task.custom and spec_of(task.custom).is_parted
    ):  # which part an example belongs to is decided inside of the file
        return None
    return next((split for split in task.splits if names_file(task, split, file)), None)


def _evaluation_splits(task: Task, data: Path) -> list[str]:
    """Return the splits to evaluate on; a single file has one only if its name shows it or it is divided."""
    names = [
        name for name in task.splits if name == TEST or (name != "train" and not name.startswith(UNLABELLED))
    ]
    if data.is_file() and not (task.custom and (spec_of(task.custom).is_parted or task.custom["dev"])):
        return [name for name in names if names_file(task, name, data)]
    return [name for name in names if has_split(task, data, name)]


def without_unknown_labels(
    examples: Sequence[Example], labels: tuple[str, ...]
) -> tuple[Sequence[Example], list[BadLine]]:
    """Return the examples with labels that occur in training, and a bad line for each other example."""
    known = set(labels)
    is_known = [known.issuperset(example.label_names) for example in examples]
    kept = list(compress(examples, is_known))
    unknown = [
        BadLine("has a label that does not occur in training", example.where, "correct the label")
        for example, is_one in zip(examples, is_known, strict=True)
        if not is_one
    ]
    return kept, unknown


def warn_of_unknown_labels(kind: AnyKind, examples: Sequence[Example], labels: tuple[str, ...]) -> str:
    """Return a warning about labels that do not occur in training, or ""."""
    known = set(labels)
    unknown = [
        (label, example) for example in examples for label in example.label_names if label not in known
    ]
    if not unknown:
        return ""
    label, example = unknown[0]
    if kind.unit == "word":
        what = f"{len(unknown):,} words have tags"
    else:
        what = f"{len({example.key for _, example in unknown}):,} examples have labels"
    first = f"the first is {label!r} ({example.where})"
    return f"{what} that do not occur in training and count as wrong; {first}"


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def task_config_of(splits: TaskSplits, recipe: FinetuningRecipe) -> TaskConfig:
    """Return the task config of the finished model folder."""
    task = splits.task
    return TaskConfig(
        task=task.name,
        kind=task.kind,
        metrics=task.metrics_for(splits.labels),
        labels=splits.labels,
        pairs=task.kind.has_pairs(splits.splits["train"]),
        text=recipe.text,
        head=recipe.head,
        features=recipe.features,
        answers=recipe.answers,
        custom=dict(task.custom),
    )


def encoded_split(
    examples: Sequence[Example], config: TaskConfig, tokenizer: Tokenizer, *, cache: Path | None = None
) -> EncodedSplit:
    """Encode a split, or take it from the cache if it was encoded before."""

    def make() -> EncodedSet:
        return config.kind.encode(examples, config.labels, tokenizer, config.text)

    if cache is None:
        return EncodedSplit(examples, make())
    key = encoding_key(config.kind, examples, config.labels, tokenizer, config.text)
    return EncodedSplit(examples, cached_encoding(cache, key, config.kind, make))
