"""Which examples a step shows: a pure function of (store, recipe, step), looked up in the index of its epoch.

An epoch's index is made when it is first needed, kept on disk, and made again, identically, if it is missing.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.epoch import Epoch, StageSource, make_epoch
from bertsmith.examples.pairs import ExampleIndex, Numbers
from bertsmith.examples.sequences import Spans
from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_folder, read_json, write_json
from bertsmith.ground.seeds import Words

INDEX_FORMAT = 1
"""Part of an index's name: to be raised when the same settings come to mean other examples."""

EPOCHS_KEPT = 4
"""How many indexes stay on disk. At any time one is read, or two while workers cross from epoch to epoch."""

_INDEX_ARRAYS = tuple(each.name for each in fields(ExampleIndex))
_ARRAYS = (*_INDEX_ARRAYS, "order", "step_starts")
_DELETE = "delete it: it will be made again"


@dataclass(frozen=True, slots=True)
class StepSpan:
    """The examples of a step: from `first` up to `last`, excluded, in the shuffled order of the epoch."""

    epoch: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StepExamples:
    """The examples of a step, or some of them, in the order they are shown."""

    epoch: int
    numbers: Numbers
    index: ExampleIndex

    def part(self, places: slice) -> "StepExamples":
        """Some neighbours among these examples."""
        return StepExamples(self.epoch, self.numbers[places], self.index.rows(places))


class StagePlan:
    """The steps of one stage of a recipe, counted from 0, through as many epochs as it takes."""

    def __init__(self, source: StageSource, *, cache: Path) -> None:
        self.source = source
        self._folder = cache / _name(source)
        self._steps: list[int] = []
        self._open: tuple[int, Epoch] | None = None

    def step(self, number: int) -> StepSpan:
        """The place of a step's examples; no step crosses epochs."""
        epoch = 0
        while number >= self.steps_in(epoch):
            number -= self.steps_in(epoch)
            epoch += 1
        starts = self.epoch(epoch).step_starts
        return StepSpan(epoch, int(starts[number]), int(starts[number + 1]))

    def examples(self, span: StepSpan) -> StepExamples:
        """The examples of a step."""
        epoch = self.epoch(span.epoch)
        numbers = np.asarray(epoch.order[span.first : span.last], np.int64)
        return StepExamples(span.epoch, numbers, epoch.index.rows(numbers))

    def spans(self, examples: StepExamples) -> Spans:
        """The text of examples."""
        return self.source.spans(examples.epoch, examples.numbers, examples.index)

    def keys(self, what: str, examples: StepExamples) -> Words:
        """A key for each example: its draws depend on nothing else."""
        return self.source.keys(what, examples.epoch, examples.numbers)

    def steps_in(self, epoch: int) -> int:
        """How many steps an epoch has."""
        while len(self._steps) <= epoch:
            self._steps.append(self._count_steps(len(self._steps)))
        return self._steps[epoch]

    def epoch(self, number: int) -> Epoch:
        """The index of an epoch, made if it is not on disk."""
        if self._open is None or self._open[0] != number:
            self._open = number, self._read_or_make(number)
        return self._open[1]

    def _count_steps(self, epoch: int) -> int:
        note = self._note(epoch)
        if not note.is_file():
            self._read_or_make(epoch)
        steps = read_json(note, remedy=_DELETE).get("steps")
        if not isinstance(steps, int) or steps < 1:
            raise UserError("does not say how many steps the epoch has", where=str(note), remedy=_DELETE)
        return steps

    def _read_or_make(self, number: int) -> Epoch:
        while True:
            if not self._is_there(number):
                with _only_one(self._folder):
                    if not self._is_there(number):
                        self._make(number)
            with suppress(FileNotFoundError):  # another process, further on, has just cleared it away
                return _read_epoch(self._place(number))

    def _is_there(self, number: int) -> bool:
        files = [self._place(number) / f"{name}.npy" for name in _ARRAYS]
        return all(file.is_file() for file in [*files, self._note(number)])

    def _make(self, number: int) -> None:
        epoch = make_epoch(self.source, number)
        if len(epoch.step_starts) < 2:
            raise self._too_small(epoch)
        _write_epoch(self._place(number), epoch)
        write_json(self._note(number), {"steps": len(epoch.step_starts) - 1})
        # Its note stays: a resumed run must know how many steps the epoch had.
        shutil.rmtree(self._place(number - EPOCHS_KEPT), ignore_errors=True)

    def _too_small(self, epoch: Epoch) -> UserError:
        batch, length = self.source.recipe.batch, self.source.stage.length
        size = f"batch.{batch.by} = {batch.sequences if batch.by == 'sequences' else batch.tokens}"
        what = f"gives {len(epoch.index)} examples of at most {length} tokens, not enough for {size}"
        return UserError(what, where=str(self.source.store.folder), remedy="add text, or make steps smaller")

    def _place(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:05d}"

    def _note(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:05d}.json"


def _name(source: StageSource) -> str:
    """A folder name that differs wherever the examples, their order or the steps do."""
    recipe = source.recipe
    facts = {
        "format": INDEX_FORMAT,
        "store": source.store.hash,
        "seed": source.seed,
        "examples": recipe.examples.model_dump(exclude={"objective", "stages"}),
        "specials": source.specials,
        "copies": recipe.masking.copies if recipe.masking.masks == "static" else "dynamic",
        "batch": recipe.batch.model_dump(exclude={"micro_tokens"}),
    }
    digest = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    return "-".join(map(str, (source.split, source.stage.length, *source.again, digest)))


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Lets one process at a time make indexes: the others wait, and find what they need."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        what, remedy = f"cannot be written ({error.strerror})", "choose a place that can be written"
        raise UserError(what, where=str(folder), remedy=remedy) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # let go when the process ends, however it ends
        yield
    finally:
        os.close(handle)


def _write_epoch(folder: Path, epoch: Epoch) -> None:
    with atomic_folder(folder) as temporary:
        for name in _ARRAYS:
            array = getattr(epoch.index if name in _INDEX_ARRAYS else epoch, name)
            np.save(temporary / f"{name}.npy", array)


def _read_epoch(folder: Path) -> Epoch:
    index = ExampleIndex(*(_read_array(folder, name) for name in _INDEX_ARRAYS))
    return Epoch(index, _read_array(folder, "order"), _read_array(folder, "step_starts"))


def _read_array(folder: Path, name: str) -> NDArray[Any]:
    try:
        # As a plain array: indexing a np.memmap costs more.
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise
    except (ValueError, OSError, EOFError) as error:
        what = f"{name}.npy cannot be read ({error})"
        raise UserError(what, where=str(folder), remedy=_DELETE) from error
