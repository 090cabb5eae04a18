"""The batches of a step, built from its address alone, in this process or ahead of time in others."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bertsmith.corpus.store import TokenStore
from bertsmith.examples.assembly import Assembly
from bertsmith.examples.batch import PretrainingBatch
from bertsmith.examples.epoch import StageSource
from bertsmith.examples.masking import Masker, Vocabulary, coded_units, read_vocabulary
from bertsmith.examples.micro import MicroShape, cut_micros, micro_sizes, slices_of_ranks
from bertsmith.examples.plan import StagePlan
from bertsmith.examples.split import Split
from bertsmith.examples.template import Templates, read_templates
from bertsmith.ground.errors import UserError
from bertsmith.packed import Layout, PackedBatch
from bertsmith.recipe.schema import Recipe

# How many tensors a micro-batch consists of.
_PARTS = 9


@dataclass(frozen=True, slots=True)
class StepAddress:
    """A step of a stage, counted from the stage's start, and how far the run has come, from 0 to 1.

    The progress matters only to masking levels that follow each other over the run.
    """

    stage: int
    step: int
    progress: float = 0.0


@dataclass(frozen=True, slots=True)
class StepBatches:
    """All that one process sees in a step; the counts are those of this process."""

    address: StepAddress
    micros: tuple[PretrainingBatch, ...]
    masked: float
    """Predicted tokens."""
    pairs: float
    """Sequences with a pair label."""
    tokens: int
    """Tokens of examples."""
    filler: int
    """Tokens that only fill shapes."""
    sequences: int

    def pin_memory(self) -> "StepBatches":
        """The same step in page-locked memory."""
        micros = tuple(micro.pin_memory() for micro in self.micros)
        return StepBatches(self.address, micros, *self._counts())

    def _counts(self) -> tuple[float, float, int, int, int]:
        return self.masked, self.pairs, self.tokens, self.filler, self.sequences

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # As one tensor: a loader's worker hands every tensor over in a file of its own, and files run out.
        parts = [tensor for micro in self.micros for tensor in _parts(micro)]
        flat = torch.cat([part.long() for part in parts])
        sizes = tuple(len(part) for part in parts)
        longest = self.micros[0].inputs.layout.longest
        return _unpacked, (self.address, flat, sizes, longest, self._counts())


@dataclass(frozen=True)
class Feed:
    """Builds the batches of any step for one process of `world`; can be pickled to other processes."""

    store: TokenStore | Path
    recipe: Recipe
    _: KW_ONLY
    micro_tokens: int
    """Most tokens in one micro-batch, filler included."""
    cache: Path
    """Folder for the indexes of epochs."""
    rank: int = 0
    world: int = 1
    multiple: int = 64
    """Numbers of tokens and of predicted tokens in a micro-batch are multiples of it."""
    split: Split = "train"
    _stages: dict[int, Assembly] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if coded_units(self.recipe.masking) and not self.opened_store.has_units:
            remedy = "make the store with `bertsmith corpus --lexicon FILE`"
            what = "knows no phrases or entities, which the recipe's masking asks for"
            raise UserError(what, where=str(self.opened_store.folder), remedy=remedy)
        assert self._vocabulary  # read here once, not in every worker

    def build(self, address: StepAddress) -> StepBatches:
        """This process's part of a step."""
        assembly, shape = self.assembly(address.stage), self._shape(address.stage)
        whole = assembly.plan.examples(assembly.plan.step(address.step))
        slices = slices_of_ranks(len(whole.numbers), self.world)
        lengths_by_rank = [whole.index.length[each].astype(np.int64) for each in slices]
        sizes = micro_sizes(lengths_by_rank, self.rank, capacity=shape.capacity)
        rows, targets = assembly.assemble(whole.part(slices[self.rank]), progress=address.progress)
        micros = tuple(cut_micros(rows, targets, sizes=sizes, shape=shape))
        return StepBatches(
            address,
            micros,
            masked=float(len(targets.rows_P)),
            pairs=targets.pair_weight * len(targets.pair_labels_S),
            tokens=len(rows.tokens_T),
            filler=sum(len(micro.inputs.tokens_T) for micro in micros) - len(rows.tokens_T),
            sequences=len(targets.pair_labels_S),
        )

    def plan(self, stage: int) -> StagePlan:
        """The plan of a stage."""
        return self.assembly(stage).plan

    def assembly(self, stage: int) -> Assembly:
        """What makes sequences of a stage's examples."""
        if stage not in self._stages:
            known = self._vocabulary
            source = StageSource(
                self.opened_store, self.recipe, known.templates, number=stage, split=self.split
            )
            most = source.stage.predictions
            masker = Masker(self.recipe.masking, known.masked, most) if known.masked else None
            self._stages[stage] = Assembly(StagePlan(source, cache=self.cache), masker)
        return self._stages[stage]

    @cached_property
    def opened_store(self) -> TokenStore:
        """The store that the text comes from."""
        return self.store if isinstance(self.store, TokenStore) else TokenStore.open(self.store)

    @cached_property
    def _vocabulary(self) -> "_Vocabulary":
        tokenizer, is_masked = self.opened_store.tokenizer(), self.recipe.examples.objective == "masked"
        masked = read_vocabulary(tokenizer, self.recipe.masking) if is_masked else None
        return _Vocabulary(read_templates(tokenizer), tokenizer.pad_id, masked)

    def _shape(self, stage: int) -> MicroShape:
        lengths = [each.length for each in self.recipe.examples.stages]
        length, pad_id = lengths[stage], self._vocabulary.pad_id
        shape = MicroShape(self.micro_tokens, self.multiple, length, pad_id, recipe_length=max(lengths))
        if shape.capacity < length:
            needed = -(-(length + 1) // self.multiple) * self.multiple
            what = f"batch.micro_tokens = {self.micro_tokens} cannot hold a sequence of {length} tokens"
            raise UserError(what, remedy=f"allow {needed} or more")
        return shape

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stages": {}}  # open indexes stay here: they would be copied whole


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What batches must know about the tokenizer."""

    templates: Templates
    pad_id: int
    masked: Vocabulary | None


def steps_ahead(
    feed: Feed, addresses: Iterable[StepAddress], *, workers: int, pin: bool
) -> Iterator[StepBatches]:
    """The steps at these addresses, in order; workers build them while the caller is busy with others."""
    loader = DataLoader(
        _Steps(feed),
        batch_size=None,
        sampler=addresses,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # else starting the loader would draw from the generator of dropout
    )
    yield from loader


class _Steps(Dataset[StepBatches]):
    """A feed as the data set of a loader, which asks for addresses instead of numbers."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __getitem__(self, address: StepAddress) -> StepBatches:
        return self._feed.build(address)


def _as_it_is(step: Any) -> Any:
    return step


def _parts(micro: PretrainingBatch) -> tuple[Tensor, ...]:
    inputs = micro.inputs
    per_token = (inputs.tokens_T, inputs.segments_T, inputs.positions_T, inputs.layout.starts_S1)
    per_prediction = (micro.masked_rows_P, micro.masked_ids_P, micro.masked_weights_P)
    return (*per_token, *per_prediction, micro.pair_labels_S, micro.pair_weights_S)


def _unpacked(
    address: StepAddress, flat: Tensor, sizes: tuple[int, ...], longest: int, counts: tuple[Any, ...]
) -> StepBatches:
    parts = torch.split(flat, list(sizes))
    micros = [_micro(parts[place : place + _PARTS], longest) for place in range(0, len(parts), _PARTS)]
    return StepBatches(address, tuple(micros), *counts)


def _micro(parts: Sequence[Tensor], longest: int) -> PretrainingBatch:
    tokens_T, segments_T, positions_T, starts_S1, rows_P, ids_P, weights_P, labels_S, pair_weights_S = parts
    layout = Layout(starts_S1.int(), longest)
    inputs = PackedBatch(tokens_T, segments_T, positions_T, layout)
    return PretrainingBatch(inputs, rows_P, ids_P, weights_P.float(), labels_S, pair_weights_S.float())
