"""A step of one process as micro-batches whose shapes are multiples of a round number.

Shapes: T packed tokens, S sequences, P predicted tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.examples.batch import PretrainingBatch
from bertsmith.examples.pairs import Numbers
from bertsmith.examples.sequences import Rows
from bertsmith.packed import Layout, PackedBatch, split_by_budget


@dataclass(frozen=True, slots=True)
class MicroShape:
    """What every micro-batch of a stage keeps to."""

    tokens: int
    """Most tokens, filler included."""
    multiple: int
    """The numbers of tokens and of predicted tokens are filled up to multiples of it."""
    length: int
    """The stage's longest sequence."""
    pad_id: int
    recipe_length: int
    """The longest sequence of all stages: one number for the whole run, so that nothing is compiled anew."""

    @property
    def capacity(self) -> int:
        """Most tokens of examples, one token of filler being always there."""
        return self.tokens // self.multiple * self.multiple - 1

    @property
    def longest(self) -> int:
        """The longest sequence there can be in the run, filler included."""
        return max(self.recipe_length, self.multiple)


@dataclass(frozen=True, slots=True)
class Targets:
    """What is asked about laid out sequences: predicted tokens in the order of their rows, and pairs."""

    rows_P: Numbers
    ids_P: Numbers
    pair_labels_S: Numbers
    pair_weight: float


def slices_of_ranks(count: int, world: int) -> list[slice]:
    """The examples of a step that each rank takes: contiguous, and as many for each as for the next."""
    return [slice(count * rank // world, count * (rank + 1) // world) for rank in range(world)]


def micro_sizes(lengths_by_rank: list[Numbers], rank: int, *, capacity: int) -> list[int]:
    """How many of its examples the rank takes into each micro-batch; every rank has as many of them."""
    sizes = [_greedy_sizes(lengths, capacity) for lengths in lengths_by_rank]
    wanted = max(len(each) for each in sizes)
    return _even_sizes(lengths_by_rank[rank], wanted, capacity) or _split_up(sizes[rank], wanted)


def _greedy_sizes(lengths: Numbers, capacity: int) -> list[int]:
    return [len(group) for group in split_by_budget(lengths.tolist(), capacity)]


def _even_sizes(lengths: Numbers, count: int, capacity: int) -> list[int] | None:
    """So many micro-batches of about as many tokens each, if all fit: a small last one is compiled anew."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, total * np.arange(1, count) / count, side="right")
    sizes = np.diff([0, *cuts, len(lengths)])
    tokens = np.diff([0, *np.append(0, ends)[cuts], total])
    return sizes.tolist() if (tokens <= capacity).all() and (sizes > 0).all() else None


def _split_up(sizes: list[int], wanted: int) -> list[int]:
    """The same examples in more micro-batches: the largest are halved, and if need be some stay empty."""
    while len(sizes) < wanted:
        place = int(np.argmax([*sizes, 1]))
        if place == len(sizes) or sizes[place] < 2:
            return sizes + [0] * (wanted - len(sizes))
        half = sizes[place] // 2
        sizes = [*sizes[:place], sizes[place] - half, half, *sizes[place + 1 :]]
    return sizes


def cut_micros(
    rows: Rows, targets: Targets, *, sizes: list[int], shape: MicroShape
) -> Iterator[PretrainingBatch]:
    """The sequences as micro-batches of these sizes, each with one filler sequence at its end."""
    ends = np.cumsum(sizes).tolist()
    for first, last in pairwise([0, *ends]):
        yield _micro(rows, targets, sequences=slice(first, last), shape=shape)


def _micro(rows: Rows, targets: Targets, *, sequences: slice, shape: MicroShape) -> PretrainingBatch:
    begin, end = int(rows.starts_S1[sequences.start]), int(rows.starts_S1[sequences.stop])
    total = _rounded_up(end - begin + 1, shape.multiple)
    filler = total - (end - begin)
    own = slice(begin, end)
    starts_S1 = np.append(rows.starts_S1[sequences.start : sequences.stop + 1] - begin, total)
    inputs = PackedBatch(
        tokens_T=_filled(rows.tokens_T[own], np.full(filler, shape.pad_id)),
        segments_T=_filled(rows.segments_T[own], np.zeros(filler, np.int64)),
        positions_T=_filled(rows.positions_T[own], np.arange(filler) % shape.length),
        layout=Layout(torch.from_numpy(starts_S1.astype(np.int32)), shape.longest),
    )
    predicted = slice(*np.searchsorted(targets.rows_P, [begin, end]).tolist())
    rows_P, ids_P = targets.rows_P[predicted] - begin, targets.ids_P[predicted]
    unused = np.zeros(_rounded_up(max(len(rows_P), 1), shape.multiple) - len(rows_P), np.int64)
    labels_S = targets.pair_labels_S[sequences]
    return PretrainingBatch(
        inputs,
        masked_rows_P=_filled(rows_P, unused),
        masked_ids_P=_filled(ids_P, unused),
        masked_weights_P=_weights(1.0, len(rows_P), len(unused)),
        pair_labels_S=_filled(labels_S, np.zeros(1, np.int64)),
        pair_weights_S=_weights(targets.pair_weight, len(labels_S), 1),
    )


def _filled(values: Numbers, filler: Numbers) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values, filler]))


def _weights(weight: float, count: int, fillers: int) -> torch.Tensor:
    weights: NDArray[np.float32] = np.zeros(count + fillers, np.float32)
    weights[:count] = weight
    return torch.from_numpy(weights)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
