"""Packed batches of a task: the steps of training in shuffled order, and a whole set sorted by length.

Shapes: T tokens, N sequences, M items, P tagged words, C classes of a whole set; S sequences of one batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.ground.seeds import stream
from bertsmith.packed import Layout, PackedBatch, split_by_budget
from bertsmith.tasks.encoded import EncodedSet, TaskBatch

Numbers = NDArray[np.int64]
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepItems:
    """What one step of training learns from."""

    micros: tuple[TaskBatch, ...]
    count: float
    """The sum of all weights: what the step's loss is divided by."""
    examples: int
    tokens: int
    """Without filler."""


@dataclass(frozen=True)
class ShuffledBatches:
    """The steps of training: every item once an epoch, in an order of its own for each epoch."""

    encoded: EncodedSet
    _: KW_ONLY
    examples_per_step: int
    seed: int
    micro_tokens: int
    """Most tokens of a micro-batch, filler included; only an item that is longer by itself exceeds it."""
    multiple: int
    """The number of tokens is filled up to a multiple of it; 1 leaves filler out."""
    class_weights_C: Weights | None = None
    """Of classes or tags; None where all weigh 1."""

    @property
    def steps_per_epoch(self) -> int:
        """How many steps show every item once; the last one may be smaller."""
        return -(-self.encoded.items // self.examples_per_step)

    def step(self, number: int) -> StepItems:
        """The step of this number, counted from 0 through all epochs; the same whoever asks, and when."""
        items = self._items(number)
        micros = tuple(self._packer.pack(items[group]) for group in self._packer.groups(items))
        return StepItems(
            micros,
            count=float(sum(micro.weights.sum(dtype=torch.float64) for micro in micros)),
            examples=len(items),
            tokens=int(self._packer.lengths_M[items].sum()),
        )

    def _items(self, number: int) -> Numbers:
        epoch, place = divmod(number, self.steps_per_epoch)
        order_M = _order_of_epoch(self.encoded.items, self.seed, epoch)
        items = order_M[place * self.examples_per_step : (place + 1) * self.examples_per_step]
        return self._packer.by_length(items)

    @cached_property
    def _packer(self) -> "_Packer":
        return _Packer(self.encoded, self.micro_tokens, self.multiple, self.class_weights_C)


def ordered_batches(
    encoded: EncodedSet, *, micro_tokens: int, multiple: int
) -> Iterator[tuple[TaskBatch, Numbers]]:
    """Every item once, the longest first, as batches with the numbers of their items."""
    packer = _Packer(encoded, micro_tokens, multiple, None)
    order_M = packer.by_length(np.arange(encoded.items))[::-1]  # what does not fit the memory fails at once
    for group in packer.groups(order_M):
        yield packer.pack(order_M[group]), order_M[group]


def scores_in_order(
    encoded: EncodedSet, scored: Iterable[tuple[NDArray[np.float32], Numbers]]
) -> NDArray[np.float32]:
    """Scores of `ordered_batches` in the order of the set: [M, C], tag [P, C], span [T, 2], choice [N]."""
    whole: NDArray[np.float32] | None = None
    for scores, items in scored:
        places = _places_of_scores(encoded, items)
        if whole is None:
            whole = np.full((_count_of_scores(encoded), *scores.shape[1:]), np.nan, np.float32)
        whole[places] = scores[: len(places)]  # filler stands at the end
    assert whole is not None, "a set has at least one item"
    return whole


def balanced_weights(encoded: EncodedSet, classes: int) -> Weights:
    """A weight for each class so that all classes weigh the same in sum, and an example 1 on average."""
    if encoded.kind not in ("classify", "tag"):
        what = f'head.class_weights = "balanced" means nothing for a task of the kind {encoded.kind}'
        raise UserError(what, remedy='set it to "equal"')
    labels = encoded.targets[encoded.targets >= 0].astype(np.int64)
    counts_C = np.bincount(labels, minlength=classes)
    present = max(int((counts_C > 0).sum()), 1)
    return np.where(counts_C > 0, len(labels) / present / np.maximum(counts_C, 1), 0.0).astype(np.float32)


@lru_cache(maxsize=4)
def _order_of_epoch(items: int, seed: int, epoch: int) -> Numbers:
    return stream(seed, "task order", epoch).permutation(items)


def _places_of_scores(encoded: EncodedSet, items: Numbers) -> Numbers:
    """Where the scores of these items stand in the whole set."""
    if encoded.kind in ("classify", "multilabel", "regress"):
        return items
    if encoded.kind == "choice":
        return _run_of(*_sequences_of(encoded, items))
    begins, ends = _tokens_of(encoded, items)
    if encoded.kind == "span":
        return _run_of(begins, ends)
    return _run_of(*_words_between(encoded, begins, ends))


def _count_of_scores(encoded: EncodedSet) -> int:
    counts = {
        "tag": len(encoded.rows_P),
        "span": len(encoded.tokens_T),
        "choice": len(encoded.starts_N1) - 1,
    }
    return counts.get(encoded.kind, encoded.items)


# ---- from items to a batch


@dataclass(frozen=True)
class _Packer:
    """Cuts a set into batches of one manner."""

    encoded: EncodedSet
    micro_tokens: int
    multiple: int
    class_weights_C: Weights | None

    @cached_property
    def lengths_M(self) -> Numbers:
        return self.encoded.lengths_M()

    @cached_property
    def longest_text(self) -> int:
        """Of the whole set: one number for all batches, so that nothing is compiled anew."""
        return int(np.diff(self.encoded.starts_N1).max(initial=1))

    @property
    def fills(self) -> bool:
        return self.multiple > 1

    def by_length(self, items: Numbers) -> Numbers:
        """Items sorted by length: a CPU attends to neighbours of one length without copying them together."""
        return items[np.argsort(self.lengths_M[items], kind="stable")]

    def groups(self, items: Numbers) -> list[list[int]]:
        """The places of the items that share a batch, within the token budget."""
        round_tokens = self.micro_tokens // self.multiple * self.multiple
        # Where batches are filled up, one token of filler is always there, so that all have the same parts.
        return split_by_budget(self.lengths_M[items].tolist(), round_tokens - int(self.fills))

    def pack(self, items: Numbers) -> TaskBatch:
        """These items as one batch, with one item of filler at its end where batches are filled up."""
        encoded = self.encoded
        firsts, pasts = _sequences_of(encoded, items)
        sequences_S = _run_of(firsts, pasts)
        inputs = self._inputs(items, sequences_S)
        starts_S = inputs.layout.starts_S1[: len(sequences_S)].numpy()
        targets, rows_P = self._targets(items)
        fillers = self._fillers(len(targets), len(inputs.tokens_T))
        cleaned, weights = _cleaned(targets, self.class_weights_C)
        items_S = np.repeat(np.arange(len(items)), pasts - firsts)
        is_span = encoded.kind == "span"
        passages_S2 = encoded.passages_N2[sequences_S] + starts_S[:, None] if is_span else _no_rows(2)
        return TaskBatch(
            inputs,
            targets=_filled(cleaned, fillers),
            weights=_filled(weights, fillers),
            rows_P=_filled(rows_P, fillers if encoded.kind == "tag" else 0),
            items_S=torch.from_numpy(np.append(items_S, np.full(int(self.fills), len(items)))),
            passages_S2=_filled(passages_S2, int(is_span and self.fills)),
        )

    def _inputs(self, items: Numbers, sequences_S: Numbers) -> PackedBatch:
        encoded = self.encoded
        tokens_T = _run_of(*_tokens_of(encoded, items))
        lengths_S = encoded.starts_N1[sequences_S + 1] - encoded.starts_N1[sequences_S]
        filler = _rounded_up(len(tokens_T) + 1, self.multiple) - len(tokens_T) if self.fills else 0
        lengths_S = np.append(lengths_S, np.full(int(self.fills), filler))
        starts_S1 = np.append(0, np.cumsum(lengths_S))
        return PackedBatch(
            # Filler is made of the first word of the vocabulary, whatever it is: nobody reads its scores.
            tokens_T=_filled(encoded.tokens_T[tokens_T].astype(np.int64), filler),
            segments_T=_filled(encoded.segments_T[tokens_T].astype(np.int64), filler),
            positions_T=torch.from_numpy(_run_of(np.zeros_like(lengths_S), lengths_S) % self.longest_text),
            layout=Layout(
                torch.from_numpy(starts_S1.astype(np.int32)), max(self.longest_text, self.multiple)
            ),
        )

    def _targets(self, items: Numbers) -> tuple[NDArray[Any], Numbers]:
        """What is asked about these items and, of tags, in which packed rows."""
        encoded = self.encoded
        if encoded.kind != "tag":
            return encoded.targets[items], _no_rows()
        begins_M, ends_M = _tokens_of(encoded, items)
        firsts_M, pasts_M = _words_between(encoded, begins_M, ends_M)
        words_P = _run_of(firsts_M, pasts_M)
        moved_M = np.cumsum(ends_M - begins_M) - ends_M
        return encoded.targets[words_P], encoded.rows_P[words_P] + np.repeat(moved_M, pasts_M - firsts_M)

    def _fillers(self, targets: int, tokens: int) -> int:
        """How many targets of weight 0 are added."""
        if self.encoded.kind == "tag":
            # As many as tokens, where batches are filled up: then their sizes follow from one number.
            return tokens - targets if self.fills else int(targets == 0)
        return int(self.fills)


def _cleaned(targets: NDArray[Any], class_weights_C: Weights | None) -> tuple[NDArray[Any], Weights]:
    """Targets with 0 where there is no label, and the weight of each, then 0 too."""
    known = ~np.isnan(targets) if targets.dtype.kind == "f" else targets >= 0
    cleaned = np.where(known, targets, 0).astype(targets.dtype)
    weights = np.asarray(known if known.ndim == 1 else known.all(-1), np.float32)
    if class_weights_C is not None:
        weights *= class_weights_C[cleaned]
    return cleaned, weights


def _sequences_of(encoded: EncodedSet, items: Numbers) -> tuple[Numbers, Numbers]:
    return encoded.items_M1[items], encoded.items_M1[items + 1]


def _tokens_of(encoded: EncodedSet, items: Numbers) -> tuple[Numbers, Numbers]:
    firsts, pasts = _sequences_of(encoded, items)
    return encoded.starts_N1[firsts], encoded.starts_N1[pasts]


def _words_between(encoded: EncodedSet, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    return np.searchsorted(encoded.rows_P, begins), np.searchsorted(encoded.rows_P, ends)


def _run_of(firsts: Numbers, pasts: Numbers) -> Numbers:
    """All numbers from each first to its past-the-last, one range after the other."""
    counts = pasts - firsts
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(pasts - ends, counts)


def _filled(values: NDArray[Any], count: int) -> Tensor:
    """The values with zeros behind them."""
    return torch.from_numpy(np.concatenate([values, np.zeros((count, *values.shape[1:]), values.dtype)]))


def _no_rows(*widths: int) -> Numbers:
    return np.zeros((0, *widths), np.int64)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
