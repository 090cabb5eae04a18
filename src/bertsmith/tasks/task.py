"""What a task is: how its files are read, what is asked, and how answers are judged."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bertsmith.tasks.examples import BadLine, Example, Kind

TASK_FILE = "task.json"
"""Says in a fine-tuned model folder how it is asked (tasks.task_file)."""
Reader = Callable[[Path], Iterator[Example | BadLine]]
"""From one file to its examples in order; a file that cannot be read at all is a UserError."""


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a data set: the names its file may have, and how each of these files is read."""

    files: Mapping[str, Reader]
    """File name (a glob is allowed) -> reader, likeliest first."""
    may_be_empty: bool = False
    """A part of another split's file, which may be too small to be parted: there is no such split then."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the papers, or a user's own."""

    name: str
    """As on the command line: sst2."""
    title: str
    """As in the tables: SST-2."""
    kind: Kind
    metrics: tuple[str, ...]
    """Names from `tasks.metrics`; the first one decides."""
    splits: Mapping[str, Split]
    """train, dev, test, and further ones such as dev-mismatched."""
    labels: tuple[str, ...] = ()
    """The classes or tags in the published order; empty where the training file names them."""
    folders: tuple[str, ...] = ()
    """What its folder is called in common collections, such as SST-2."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Dotted keys of the fine-tuning recipe that differ from the defaults, with their published values."""
    custom: Mapping[str, str | float] = field(default_factory=dict)
    """A user's own table: which columns are what."""
