"""Epoch indexes: look up the examples of a step, a pure function of (store, recipe, seed, step).

An epoch index holds the epoch's examples, their shuffled order, and the start of each step. It is needed
because the walk that makes the examples depends on its own draws: no example can be found without it. An
index is built at first use, kept on disk, and rebuilt identically if it is missing.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.core.arrays import open_array
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, locked, read_json, sha256_of, write_json
from bertsmith.core.seeds import Words, bits, key_of, sub_keys, uniforms
from bertsmith.core.wording import counted
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.example_index import (
    ExampleIndex,
    FillRules,
    Numbers,
    Sentences,
    Spans,
    SplitText,
    WalkRules,
    fill_across_documents,
    fill_within_documents,
    joined,
    truncated_spans,
    walk_documents,
)
from bertsmith.recipe.data_sections import BatchSection, Stage
from bertsmith.recipe.schema import Recipe
from bertsmith.text.tokenizer import Template, Templates

Split = Literal["train", "held-out"]

# Not run.seed: runs that differ in their seed are evaluated on the same documents.
_HELD_OUT_KEY = np.uint64(key_of(0, "held-out documents"))


def split_documents(split: Split, *, count: int, held_out_fraction: float) -> NDArray[np.int64]:
    """Return the document numbers of a split, ascending; with two or more documents no split is empty."""
    # By a hash of the document's number, not by a count: its split does not depend on other documents.
    hashes = bits(_HELD_OUT_KEY, np.arange(count, dtype=np.uint64))
    held_out: NDArray[np.bool_] = hashes < np.uint64(int(held_out_fraction * 2.0**64))
    if count >= 2 and not held_out.any():
        held_out[hashes.argmin()] = True
    if held_out.all():
        held_out[hashes.argmax()] = False
    documents = np.flatnonzero(held_out if split == "held-out" else ~held_out)
    if not len(documents):
        remedy = "make a store of at least two documents: an empty line divides them"
        raise UserError(
            "the store's only document is used for training, so there is nothing to hold out", remedy=remedy
        )
    return documents


@dataclass(frozen=True, slots=True)
class EpochIndex:
    """The examples of an epoch, the order they are shown in, and the start of each step in that order."""

    examples: ExampleIndex
    order: Numbers
    step_starts: Numbers
    """One entry more than there are steps: the last entry is the end of the last step."""


class StageSource:
    """Source of a stage's examples: they follow from it and the epoch's number alone."""

    def __init__(
        self,
        store: TokenStore,
        recipe: Recipe,
        templates: Templates,
        *,
        number: int = 0,
        split: Split = "train",
    ) -> None:
        """Read the recipe's stage with this number."""
        self.store, self.recipe, self.split = store, recipe, split
        self.stage: Stage = recipe.examples.stages[number]
        self.number = number
        is_pair = recipe.examples.pair_head != "none"
        self.template: Template = templates.pair if is_pair else templates.single
        self.specials = self.template.specials(2 if is_pair else 1)
        """Special tokens in a sequence, without separators between documents."""
        self.single_specials = self.template.specials(1)
        """Special tokens in a sequence that is not a pair."""
        self.text_capacity = self.stage.length - self.specials
        """Maximum tokens of text in a sequence."""
        # Runs that differ in their seed are evaluated on the same held-out examples.
        self.seed = recipe.run.seed if split == "train" else 0
        earlier = [stage.length for stage in recipe.examples.stages[:number]]
        is_again = split == "train" and self.stage.length in earlier
        self.again: tuple[int, ...] = (number,) if is_again else ()
        """The stage's number if an earlier stage has the same length, so that their draws differ; else ()."""

    def purpose(self, epoch: int) -> tuple[int | str, ...]:
        """Return the key of an epoch's draws. With static masks the draws repeat, in all stages alike."""
        masking = self.recipe.masking
        if masking.masks == "static":
            return (self.split, self.stage.length, epoch % masking.copies)
        return (self.split, self.stage.length, epoch, *self.again)

    def keys(self, what: str, epoch: int, numbers: Numbers) -> Words:
        """Return a key for each of these examples; all of its draws follow from the key."""
        return sub_keys(key_of(self.seed, what, *self.purpose(epoch)), numbers)

    @cached_property
    def sentences(self) -> Sentences:
        """The documents of the split."""
        starts = self.store.document_starts
        fraction = self.recipe.examples.held_out_fraction
        documents = split_documents(self.split, count=len(starts) - 1, held_out_fraction=fraction)
        return Sentences(self.store.sentence_starts, starts, documents)

    @cached_property
    def _split_text(self) -> SplitText:
        return SplitText(self.sentences)

    def spans(self, epoch: int, numbers: Numbers, examples: ExampleIndex) -> Spans:
        """Return the text spans of the examples with these numbers."""
        if self.recipe.examples.pairs == "full-sentences":
            lengths = examples.first_length.astype(np.int64)
            return Spans(*self._split_text.parts(examples.first_start, lengths))
        keys_S = self.keys("truncate", epoch, numbers)
        return truncated_spans(examples, capacity=self.text_capacity, keys_S=keys_S)


def make_epoch_index(source: StageSource, epoch: int, *, steps_before: int = 0) -> EpochIndex:
    """Build an epoch's index: examples in random order, cut into steps; earlier steps count in a ramp."""
    index = _examples(source, epoch)
    # The order's key includes the epoch's number: static masks show the same examples in another order.
    key = key_of(source.seed, "order", source.split, source.stage.length, epoch, *source.again)
    # Stable, so that the order of equal draws does not depend on numpy's choice of a sorting algorithm.
    order = np.argsort(bits(np.uint64(key), np.arange(len(index), dtype=np.uint64)), kind="stable")
    batch, lengths = source.recipe.batch, index.length[order].astype(np.int64)
    starts = cut_steps(lengths, batch, steps_before=steps_before if not source.number else batch.ramp_steps)
    if source.split == "held-out" and starts[-1] < len(order):
        starts = np.append(starts, len(order))  # evaluation takes the incomplete step, too
    return EpochIndex(index, order, starts)


def _examples(source: StageSource, epoch: int) -> ExampleIndex:
    settings, purpose = source.recipe.examples, source.purpose(epoch)
    fill = FillRules(
        source.text_capacity,
        source.single_specials,
        short_fraction=settings.short_fraction,
        short_length=settings.short_length,
        key=key_of(source.seed, "short", *purpose),
    )
    if settings.pairs == "full-sentences":
        return fill_across_documents(source.sentences, fill)
    if settings.pairs == "doc-sentences":
        return fill_within_documents(source.sentences, fill)
    rules = WalkRules(
        kind=settings.pairs,
        capacity=source.text_capacity,
        specials=source.specials,
        negative_probability=settings.negative_probability,
        short_probability=settings.short_probability,
        seed=source.seed,
        purpose=purpose,
    )
    if not settings.single_fraction:
        return walk_documents(source.sentences, rules)
    documents = source.sentences.documents
    keys = sub_keys(key_of(source.seed, "single", *purpose), documents)
    is_single = uniforms(keys, np.uint64(0)) < settings.single_fraction
    paired = replace(source.sentences, documents=documents[~is_single])
    single = replace(source.sentences, documents=documents[is_single])
    return joined([walk_documents(paired, rules), fill_within_documents(single, fill)])


def cut_steps(lengths: Numbers, batch: BatchSection, *, steps_before: int = 0) -> Numbers:
    """Return the starts of the whole steps and the end of the last; remaining examples are dropped."""
    if batch.by == "sequences":
        ramp = range(steps_before, batch.ramp_steps if batch.ramp_from != "off" else 0)
        begun = np.cumsum([0, *(batch.size_at(step) for step in ramp)])
        if begun[-1] > len(lengths):
            return begun[begun <= len(lengths)]
        return np.append(begun[:-1], np.arange(begun[-1], len(lengths) + 1, batch.sequences))
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, used = [0], 0
    while starts[-1] < len(lengths):
        # As many examples as fit, but at least one: a single example may be longer than a step.
        allowed = batch.size_at(steps_before + len(starts) - 1)
        cut = max(int(np.searchsorted(ends, used + allowed, side="right")), starts[-1] + 1)
        if cut == len(lengths) and ends[-1] - used < allowed:
            break
        starts.append(cut)
        used = int(ends[cut - 1])
    return np.array(starts, np.int64)


INDEX_FORMAT = 1
"""Part of an index's name. Increase it when the same settings define different examples."""

EPOCHS_KEPT = 4
"""Indexes kept on disk. One is in use, or two while workers cross from one epoch to the next."""

# Recipe keys under their names in the first indexes, so that those indexes stay valid.
_NAMES_IN_DIGEST = {
    "negative_probability": "negative_share",
    "short_probability": "short_share",
    "held_out_fraction": "held_out_share",
}

_INDEX_ARRAYS = tuple(each.name for each in fields(ExampleIndex))
_ARRAYS = (*_INDEX_ARRAYS, "order", "step_starts")
_DELETE = "delete it: it will be rebuilt"
CHECKSUMS = "sha256"


@dataclass(frozen=True, slots=True)
class StepExamples:
    """The examples of a step, or some of them, in the order they are shown."""

    epoch: int
    numbers: Numbers
    index: ExampleIndex

    def part(self, rows: slice) -> "StepExamples":
        """Return the examples in a slice of rows."""
        return StepExamples(self.epoch, self.numbers[rows], self.index.rows(rows))


class StageIndex:
    """The steps of one stage of a recipe, counted from 0, through as many epochs as needed."""

    def __init__(self, source: StageSource, *, cache: Path) -> None:
        self.source = source
        recipe = source.recipe
        # Options that are off change no example: leave them out, so that older indexes stay valid.
        off = set() if recipe.examples.short_fraction else {"short_fraction", "short_length"}
        off |= set() if recipe.examples.single_fraction else {"single_fraction"}
        examples = recipe.examples.model_dump(exclude={"objective", "stages", "pair_weight"} | off)
        off = {"ramp_from", "ramp_steps"} if recipe.batch.ramp_from == "off" else set()
        # The folder's name depends on everything that changes the examples, their order or the steps, and on
        # nothing else: runs that differ only in masking or training share their indexes.
        settings = {
            "format": INDEX_FORMAT,
            "store": source.store.hash,
            "seed": source.seed,
            "examples": {_NAMES_IN_DIGEST.get(key, key): value for key, value in examples.items()},
            "specials": source.specials,
            "copies": recipe.masking.copies if recipe.masking.masks == "static" else "dynamic",
            "batch": recipe.batch.model_dump(exclude={"micro_tokens"} | off),
        }
        digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()
        name = "-".join(map(str, (source.split, source.stage.length, *source.again, digest)))
        self._folder = cache / name
        self._steps: list[int] = []
        self._open: tuple[int, EpochIndex] | None = None

    def examples(self, step: int) -> StepExamples:
        """Return the examples of a step; a step never crosses epochs."""
        epoch = 0
        while step >= self.steps_in(epoch):
            step -= self.steps_in(epoch)
            epoch += 1
        index = self.epoch(epoch)
        first, last = index.step_starts[step : step + 2].tolist()
        numbers = np.asarray(index.order[first:last], np.int64)
        return StepExamples(epoch, numbers, index.examples.rows(numbers))

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps of an epoch, from its summary, which outlives the arrays."""
        while len(self._steps) <= epoch:
            summary = self._summary_file(len(self._steps))
            if not summary.is_file():
                self._read_or_make(len(self._steps))
            steps = read_json(summary, remedy=_DELETE).get("steps")
            if not isinstance(steps, int) or steps < 1:
                what = "does not contain the number of steps of the epoch"
                raise UserError(what, where=str(summary), remedy=_DELETE)
            self._steps.append(steps)
        return self._steps[epoch]

    def epoch(self, number: int) -> EpochIndex:
        """Return the index of an epoch, and build it if it is not on disk."""
        if self._open is None or self._open[0] != number:
            self._open = number, self._read_or_make(number)
        return self._open[1]

    def _read_or_make(self, number: int) -> EpochIndex:
        # Loader workers and ranks arrive here at once. One of them builds the index while the others wait at
        # the lock, check again, and then read it after releasing the lock.
        folder = self._epoch_folder(number)
        while True:
            if not self._is_there(number):
                with locked(self._folder / "lock"):
                    if not self._is_there(number):
                        self._make(number)
            with suppress(FileNotFoundError):  # another process, further on, has just deleted it
                self._check(number)
                index = ExampleIndex(*(_read_array(folder, name) for name in _INDEX_ARRAYS))
                return EpochIndex(index, _read_array(folder, "order"), _read_array(folder, "step_starts"))

    def _is_there(self, number: int) -> bool:
        files = [self._epoch_folder(number) / f"{name}.npy" for name in _ARRAYS]
        return all(file.is_file() for file in [*files, self._summary_file(number)])

    def _check(self, number: int) -> None:
        """Raise an error if a file's checksum differs: the run would silently use other examples."""
        known = read_json(self._summary_file(number), remedy=_DELETE).get(CHECKSUMS, {})
        for name, checksum in known.items():
            file = self._epoch_folder(number) / f"{name}.npy"
            if file.is_file() and sha256_of(file) != checksum:
                what = f"{file.name} is damaged: its checksum differs"
                raise UserError(what, where=str(file.parent), remedy=_DELETE)

    def _make(self, number: int) -> None:
        has_ramp = self.source.recipe.batch.ramp_from != "off"
        steps_before = sum(map(self.steps_in, range(number))) if has_ramp else 0
        epoch = make_epoch_index(self.source, number, steps_before=steps_before)
        if len(epoch.step_starts) < 2:
            batch, length = self.source.recipe.batch, self.source.stage.length
            size = f"batch.{batch.by} = {batch.sequences if batch.by == 'sequences' else batch.tokens}"
            found = counted(len(epoch.examples), "example")
            what = f"yields {found} of at most {length} tokens, not enough for {size}"
            remedy = "add text, or make steps smaller"
            raise UserError(what, where=str(self.source.store.folder), remedy=remedy)
        with atomic_folder(self._epoch_folder(number)) as temporary:
            for name in _ARRAYS:
                array = getattr(epoch.examples if name in _INDEX_ARRAYS else epoch, name)
                np.save(temporary / f"{name}.npy", array)
            checksums = {name: sha256_of(temporary / f"{name}.npy") for name in _ARRAYS}
        # Written after the arrays: `_is_there` requires both, so a process killed between the two leaves an
        # index that counts as missing.
        summary = {"steps": len(epoch.step_starts) - 1, CHECKSUMS: checksums}
        write_json(self._summary_file(number), summary)
        # An old epoch's summary stays: a resumed run needs the number of steps in that epoch.
        shutil.rmtree(self._epoch_folder(number - EPOCHS_KEPT), ignore_errors=True)

    def _epoch_folder(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:05d}"

    def _summary_file(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch:05d}.json"


def _read_array(folder: Path, name: str) -> NDArray[Any]:
    # As a plain array: indexing an np.memmap costs more.
    return np.asarray(open_array(folder / f"{name}.npy", remedy=_DELETE))
