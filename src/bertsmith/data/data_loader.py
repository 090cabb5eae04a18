"""The pre-training data loader: builds the batches of a step from its index alone.

    StepIndex -> PretrainingDataset -> StepBatches

The dataset is a pure function of the step's index. So worker processes may build steps ahead of time, a
resumed run needs only the number of its step, and every rank finds its own slice of the same step.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from bertsmith.core.errors import UserError
from bertsmith.core.mapped_files import cut_off, handle_bus_errors
from bertsmith.core.measures import Field
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data import collate
from bertsmith.data.epoch_index import Split, StageIndex, StageSource
from bertsmith.data.masking import Masker, Vocabulary, read_vocabulary, stored_units
from bertsmith.recipe.schema import Recipe
from bertsmith.text.tokenizer import Templates, read_templates

# In bytes; a tensor can be read in place only from a multiple of its element's size.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A step of a stage, counted from the stage's start, and the run's progress from 0 to 1.

    The progress matters only for masking levels that follow each other over the run.
    """

    stage: int
    step: int
    progress: float = 0.0
    masking_rate: float | None = None
    """Masking rate of this step if it changes over the run, else None (the recipe's rate)."""


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The micro-batches and counts of one process in one step."""

    index: StepIndex
    micros: tuple[collate.PretrainingBatch, ...]
    counts: dict[str, float]
    """Counts of the fields, and the numbers of tokens and sequences (`counts_of`)."""

    def pin_memory(self) -> "StepBatches":
        """Return a copy of the step in page-locked memory."""
        return replace(self, micros=tuple(micro.pin_memory() for micro in self.micros))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # One tensor for all: a loader worker sends each tensor through a separate file, and file handles run
        # out. As bytes: ids, offsets and weights have different types, and each must arrive unchanged.
        parts: list[Tensor] = []
        types: list[dict[str, tuple[torch.dtype, int]]] = []
        for micro in self.micros:
            tensors = micro.named_tensors()
            types.append({name: (tensor.dtype, len(tensor)) for name, tensor in tensors.items()})
            for tensor in tensors.values():
                raw = tensor.contiguous().view(torch.uint8)
                parts.append(torch.nn.functional.pad(raw, (0, -len(raw) % _ALIGNMENT)))
        longest = self.micros[0].inputs.layout.longest
        return _unpickled_step, (self.index, _to_send(torch.cat(parts)), types, longest, self.counts)


@dataclass(frozen=True)
class PretrainingDataset(Dataset[StepBatches]):
    """The steps of a run as one process of `world` sees them; can be pickled to loader workers."""

    store: TokenStore | Path
    recipe: Recipe
    _: KW_ONLY
    micro_tokens: int
    """Maximum tokens in one micro-batch, filler included."""
    cache: Path
    """Folder for the indexes of epochs."""
    rank: int = 0
    world: int = 1
    multiples: collate.Multiples = collate.Multiples()
    split: Split = "train"
    fields: Sequence[Field] = collate.WORD_FIELDS + collate.PAIR_FIELDS
    """Fields of the batches, which the objective declares; by default those of BERT's."""
    _collators: dict[int, collate.Collator] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.predicts and stored_units(self.recipe.masking) and not self.opened_store.has_units:
            remedy = "make the store with `bertsmith corpus --lexicon FILE`"
            what = "was made without phrases and entities, which the recipe's masking requires"
            raise UserError(what, where=str(self.opened_store.folder), remedy=remedy)
        assert self._vocabulary  # read here once, not in every worker

    def __getitem__(self, index: StepIndex) -> StepBatches:
        """Return this process's part of a step."""
        collator = self.collator(index.stage)
        lengths = [stage.length for stage in self.recipe.examples.stages]
        length, pad_id = lengths[index.stage], self._vocabulary.pad_id
        shape = collate.MicroShape(
            self.micro_tokens, self.multiples, length, pad_id, recipe_length=max(lengths)
        )
        if shape.capacity < length:
            needed = -(-(length + 1) // self.multiples.tokens) * self.multiples.tokens
            what = f"batch.micro_tokens = {self.micro_tokens} cannot hold a sequence of {length} tokens"
            raise UserError(what, remedy=f"allow {needed} or more")
        examples = collator.index.examples(index.step)
        slices = collate.slices_of_ranks(len(examples.numbers), self.world)
        # Every rank computes the sizes of all ranks, so they agree on the number of micro-batches.
        lengths_by_rank = [examples.index.length[each].astype(np.int64) for each in slices]
        sizes = collate.micro_sizes(lengths_by_rank, self.rank, capacity=shape.capacity)
        collated = collator.collate(
            examples.part(slices[self.rank]), progress=index.progress, rate=index.masking_rate
        )
        micros = tuple(collate.micro_batches(collated, self.fields, sizes=sizes, shape=shape))
        return StepBatches(index, micros, collate.counts_of(micros, self.fields))

    def stage_index(self, stage: int) -> StageIndex:
        """Return the index of a stage's examples."""
        return self.collator(stage).index

    def collator(self, stage: int) -> collate.Collator:
        """Return the collator of a stage, built at first use."""
        if stage not in self._collators:
            vocabulary, store = self._vocabulary, self.opened_store
            source = StageSource(store, self.recipe, vocabulary.templates, number=stage, split=self.split)
            masked, masker = vocabulary.masked, None
            if masked is not None:
                masker = Masker(self.recipe.masking, masked, max_predictions=source.stage.predictions)
            index = StageIndex(source, cache=self.cache)
            self._collators[stage] = collate.Collator(index, masker, self.predicts)
        return self._collators[stage]

    @property
    def predicts(self) -> bool:
        """True if a field is of predicted tokens."""
        return any(each.per == "P" for each in self.fields)

    @cached_property
    def opened_store(self) -> TokenStore:
        """The token store, opened at first use."""
        return self.store if isinstance(self.store, TokenStore) else TokenStore.open(self.store)

    @cached_property
    def _vocabulary(self) -> "_Vocabulary":
        tokenizer = self.opened_store.tokenizer()
        is_masked = self.predicts and self.recipe.examples.masks_tokens
        masked = None
        if is_masked and not tokenizer.has_mask:
            remedy = "set examples.objective to left-to-right, or use a vocabulary with a mask"
            raise UserError("this tokenizer lacks a mask_token", where=tokenizer.spec.where, remedy=remedy)
        if is_masked:
            masked = read_vocabulary(tokenizer, self.recipe.masking, self.opened_store.token_counts)
        return _Vocabulary(read_templates(tokenizer), tokenizer.pad_id, masked)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_collators": {}}  # without open indexes, which would be copied whole


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The properties of the tokenizer that batches depend on."""

    templates: Templates
    pad_id: int
    masked: Vocabulary | None


def _to_send(flat: Tensor) -> Tensor | NDArray[np.uint8]:
    """Put a worker's bytes in shared memory; if that is full, return them for the (slower) pipe."""
    if get_worker_info() is not None:
        try:
            flat.untyped_storage().share_memory_()
        except RuntimeError:  # containers get 64 MB by default; a later failure would go unnoticed
            return flat.numpy()
    return flat


@dataclass(frozen=True)
class _ReportingErrors(Dataset["StepBatches | UserError"]):
    """Returns a UserError instead of raising it: for an exception, a worker would send a traceback."""

    dataset: PretrainingDataset

    def __getitem__(self, index: StepIndex) -> "StepBatches | UserError":
        try:
            return self.dataset[index]
        except UserError as error:
            return error


@contextmanager
def reporting_dead_workers() -> Iterator[None]:
    """Turn the death of a loader worker into an error of one line, within this context.

    torch raises the exception in the main thread as soon as it notices, at any point of the code.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        if (cut := cut_off()) is not None:
            raise cut from error
        remedy = "use fewer (`run.loader_workers=1`) if memory ran out; the same command resumes"
        what = f"a loader worker died ({str(error).split(') ', 1)[-1].splitlines()[0].strip(' .')})"
        raise UserError(what, key="run.loader_workers", remedy=remedy) from error


def load_steps(
    dataset: PretrainingDataset,
    indices: Iterable[StepIndex],
    *,
    workers: int,
    pin: bool,
    in_worker: Callable[[int], None] | None = None,
) -> Generator[StepBatches]:
    """Yield the steps with these indices, in order; workers build them ahead.

    Each worker first calls `in_worker` with its number.
    """
    # The loader reads indices ahead of the requested steps and returns steps in the order of the indices. So
    # the number of workers, and which of them is late, does not affect the output.
    loader = DataLoader(
        _ReportingErrors(dataset),
        batch_size=None,  # an item is a whole step already
        sampler=indices,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_unchanged,
        worker_init_fn=partial(_begin_worker, in_worker),
        generator=torch.Generator(),  # otherwise starting the loader would draw from dropout's generator
    )
    ready = iter(loader)
    try:
        for step in ready:
            if isinstance(step, UserError):
                raise step
            yield step
    finally:
        # torch ends its workers when the last reference is gone, but on a GPU they were seen to live longer.
        getattr(ready, "_shutdown_workers", lambda: None)()


def _begin_worker(in_worker: Callable[[int], None] | None, number: int) -> None:
    handle_bus_errors()
    if in_worker is not None:
        in_worker(number)


def _unchanged(step: Any) -> Any:
    return step


def _unpickled_step(
    index: StepIndex,
    sent: Tensor | NDArray[np.uint8],
    types: Sequence[Mapping[str, tuple[torch.dtype, int]]],
    longest: int,
    counts: dict[str, float],
) -> StepBatches:
    """Rebuild the step that `StepBatches.__reduce__` took apart; its tensors are views of the bytes."""
    flat = torch.as_tensor(sent)
    micros, start = [], 0
    for names in types:
        tensors = {}
        for name, (dtype, length) in names.items():
            size = length * dtype.itemsize
            tensors[name] = flat[start : start + size].view(dtype)
            start += size + -size % _ALIGNMENT
        micros.append(collate.PretrainingBatch.from_tensors(tensors, longest=longest))
    return StepBatches(index, tuple(micros), counts)
