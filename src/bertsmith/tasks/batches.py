"""Packed batches of a task: training steps in shuffled order, and a whole set sorted by length.

Shapes: T tokens, N sequences, M items, P tagged words, C classes of a whole set; S sequences of one batch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import stream
from bertsmith.packed import Layout, PackedBatch, split_by_budget
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.kinds.kind import AnyKind

Numbers = NDArray[np.int64]
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Some items, packed; anything with weight 0 is filler for fixed shapes."""

    inputs: PackedBatch
    targets: Tensor
    """Targets as in EncodedSet, for the items (M), windows (S) or tagged words (P) of this batch."""
    weights: Tensor
    """Weight of each target: the weight of its class, or 0 for filler."""
    rows_P: Tensor
    """tag: packed rows of the tagged words; otherwise empty."""
    items_S: Tensor
    """Item of each sequence, numbered within the batch."""
    passages_S2: Tensor
    """span: first and past-the-last packed row of the passage of each sequence; otherwise empty."""
    states_LTD: Tensor | None = None
    """Precomputed states of a frozen encoder (`EncodedSet.states_L`)."""
    teacher: Tensor | None = None
    """A teacher's scores (`EncodedSet.teacher`), in fp32."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "TaskBatch":
        """Return a copy of the batch on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "TaskBatch":
        """Return a copy in page-locked memory, so that a GPU can copy it in the background."""
        return self._mapped(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """Return its tensors in a fixed order, without `states_LTD`, which recorded steps never have."""
        old = self.inputs
        inputs = [old.tokens_T, old.segments_T, old.positions_T, old.layout.starts_S1]
        teacher = [] if self.teacher is None else [self.teacher]
        return [*inputs, self.targets, self.weights, self.rows_P, self.items_S, self.passages_S2, *teacher]

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return every shape and the longest sequence: what a recorded CUDA graph depends on."""
        return (*(tuple(tensor.shape) for tensor in self.tensors()), (self.inputs.layout.longest,))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "TaskBatch":
        old = self.inputs
        inputs = replace(
            old,
            tokens_T=change(old.tokens_T),
            segments_T=change(old.segments_T),
            positions_T=change(old.positions_T),
            layout=replace(old.layout, starts_S1=change(old.layout.starts_S1)),
        )
        return TaskBatch(
            inputs,
            targets=change(self.targets),
            weights=change(self.weights),
            rows_P=change(self.rows_P),
            items_S=change(self.items_S),
            passages_S2=change(self.passages_S2),
            states_LTD=None if self.states_LTD is None else change(self.states_LTD),
            teacher=None if self.teacher is None else change(self.teacher),
        )


@dataclass(frozen=True, slots=True)
class StepItems:
    """The batches of one training step in one process."""

    micros: tuple[TaskBatch, ...]
    count: float
    """Sum of all weights; the step's loss is divided by the total over all processes."""
    examples: int
    tokens: int
    """Number of tokens, without filler."""


@dataclass(frozen=True)
class ShuffledBatches:
    """The training steps: every item once per epoch, in a new order for each epoch."""

    encoded: EncodedSet
    _: KW_ONLY
    examples_per_step: int
    seed: int
    micro_tokens: int
    """Maximum tokens of a micro-batch, filler included; only a single longer item exceeds it."""
    multiple: int
    """Filler rounds the number of tokens up to a multiple of this; 1 means no filler."""
    class_weights_C: Weights | None = None
    """Weights of classes or tags; None if all are 1."""
    rank: int = 0
    """Index of this process among the `world` processes that share each step."""
    world: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch; the last step may be smaller."""
        return -(-self.encoded.items // self.examples_per_step)

    def step(self, number: int) -> StepItems:
        """Return a step by its number, counted from 0 over all epochs; a pure function of the number."""
        epoch, index = divmod(number, self.steps_per_epoch)
        order_M = _order_of_epoch(self.encoded.items, self.seed, epoch)
        items = order_M[index * self.examples_per_step : (index + 1) * self.examples_per_step]
        items = self._packer.by_length(items)  # a loss is a sum, so any order is fine
        own = items[self.rank :: self.world]  # about as many tokens for each process
        if not len(own):  # every process takes part in every step, if only with weight 0
            filler = self._packer.pack(items[:1])
            return StepItems((replace(filler, weights=torch.zeros_like(filler.weights)),), 0.0, 0, 0)
        micros = tuple(self._packer.pack(own[group]) for group in self._packer.groups(own))
        return StepItems(
            micros,
            count=float(sum(micro.weights.sum(dtype=torch.float64) for micro in micros)),
            examples=len(own),
            tokens=int(self._packer.lengths_M[own].sum()),
        )

    @cached_property
    def _packer(self) -> "_Packer":
        return _Packer(self.encoded, self.micro_tokens, self.multiple, self.class_weights_C)


def ordered_batches(
    encoded: EncodedSet, *, micro_tokens: int, multiple: int
) -> Iterator[tuple[TaskBatch, Numbers]]:
    """Yield batches of every item once, the longest first, with the numbers of their items."""
    packer = _Packer(encoded, micro_tokens, multiple, None)
    order_M = packer.by_length(np.arange(encoded.items))[::-1]  # so that a lack of memory shows at once
    for group in packer.groups(order_M):
        yield packer.pack(order_M[group]), order_M[group]


def scores_in_order(
    encoded: EncodedSet, scored: Iterable[tuple[NDArray[np.float32], Numbers]]
) -> NDArray[np.float32]:
    """Return scores of `ordered_batches` in the set's order: [M, C], tag [P, C], span [T, 2], choice [N]."""
    counts = {
        "item": encoded.items,
        "sequence": len(encoded.starts_N1) - 1,
        "token": len(encoded.tokens_T),
        "word": len(encoded.rows_P),
    }
    whole: NDArray[np.float32] | None = None
    for scores, items in scored:
        rows = _score_rows(encoded, items)
        if whole is None:  # the first scores show the number of outputs
            whole = np.full((counts[encoded.unit], *scores.shape[1:]), np.nan, np.float32)
        whole[rows] = scores[: len(rows)]  # filler is at the end
    assert whole is not None, "a set has at least one item"
    return whole


def token_rows(encoded: EncodedSet, items: Numbers) -> Numbers:
    """Return the rows of these items' tokens in the whole set, in the order of a batch."""
    return _run_of(*_tokens_of(encoded, items))


def balanced_weights(kind: AnyKind, encoded: EncodedSet, classes: int) -> Weights:
    """Return class weights that give all classes equal total weight, and an example 1 on average."""
    if not kind.has_class_weights:
        what = f'head.class_weights = "balanced" does not apply to tasks of the kind {kind.name}'
        raise UserError(what, remedy='set it to "equal"')
    labels = encoded.targets[encoded.targets >= 0].astype(np.int64)
    counts_C = np.bincount(labels, minlength=classes)
    present = max(int((counts_C > 0).sum()), 1)
    return np.where(counts_C > 0, len(labels) / present / np.maximum(counts_C, 1), 0.0).astype(np.float32)


@lru_cache(maxsize=4)  # all steps of an epoch share its order
def _order_of_epoch(items: int, seed: int, epoch: int) -> Numbers:
    return stream(seed, "task order", epoch).permutation(items)


def _score_rows(encoded: EncodedSet, items: Numbers) -> Numbers:
    """Return the rows of these items' scores in the whole set."""
    if encoded.unit == "item":
        return items
    if encoded.unit == "sequence":
        return _run_of(*_sequences_of(encoded, items))
    begins, ends = _tokens_of(encoded, items)
    if encoded.unit == "token":
        return token_rows(encoded, items)
    return _run_of(*_words_between(encoded, begins, ends))


# ---- from items to a batch


@dataclass(frozen=True)
class _Packer:
    """Cuts a set into batches with the same settings."""

    encoded: EncodedSet
    micro_tokens: int
    multiple: int
    class_weights_C: Weights | None

    @cached_property
    def lengths_M(self) -> Numbers:
        return self.encoded.lengths_M()

    @cached_property
    def longest_text(self) -> int:
        """Longest sequence of the whole set in tokens: one number for all batches avoids recompilation."""
        return int(np.diff(self.encoded.starts_N1).max(initial=1))

    @property
    def fills(self) -> bool:
        return self.multiple > 1

    def by_length(self, items: Numbers) -> Numbers:
        """Sort items by length: a CPU attends to neighbours of equal length without copying them together."""
        return items[np.argsort(self.lengths_M[items], kind="stable")]

    def groups(self, items: Numbers) -> list[list[int]]:
        """Return the indices of the items that share each batch, within the token budget."""
        round_tokens = self.micro_tokens // self.multiple * self.multiple
        # Batches with filler always have at least one token of it, so that all have the same parts.
        return split_by_budget(self.lengths_M[items].tolist(), round_tokens - int(self.fills))

    def pack(self, items: Numbers) -> TaskBatch:
        """Pack these items into one batch, followed by one item of filler if batches are filled up."""
        encoded = self.encoded
        firsts, pasts = _sequences_of(encoded, items)
        sequences_S = _run_of(firsts, pasts)
        inputs = self._inputs(items, sequences_S)
        targets, rows_P = self._targets(items)
        if encoded.unit == "word":
            # With filler, as many targets as tokens: all sizes then follow from one number, and a recorded or
            # compiled step is reused. Without filler, at least one target.
            fillers = len(inputs.tokens_T) - len(targets) if self.fills else int(len(targets) == 0)
        else:
            fillers = int(self.fills)
        # Without a label, any valid class works as the target, because its weight is 0.
        known = ~np.isnan(targets) if targets.dtype.kind == "f" else targets >= 0
        valid = np.where(known, targets, 0).astype(targets.dtype)
        weights = np.asarray(known if known.ndim == 1 else known.all(-1), np.float32)
        if self.class_weights_C is not None:
            weights *= self.class_weights_C[valid]
        items_S = np.repeat(np.arange(len(items)), pasts - firsts)
        # Passages are counted from their window's first row, but losses index packed rows.
        has_passages = len(encoded.passages_N2) > 0
        starts_S = inputs.layout.starts_S1[: len(sequences_S)].numpy()
        passages_S2 = encoded.passages_N2[sequences_S] + starts_S[:, None] if has_passages else _no_rows(2)
        return TaskBatch(
            inputs,
            targets=_filled(valid, fillers),
            weights=_filled(weights, fillers),
            rows_P=_filled(rows_P, fillers if encoded.unit == "word" else 0),
            items_S=torch.from_numpy(np.append(items_S, np.full(int(self.fills), len(items)))),
            passages_S2=_filled(passages_S2, int(has_passages and self.fills)),
            states_LTD=self._states(items, len(inputs.tokens_T)),
            teacher=self._teacher(items, inputs, fillers),
        )

    def _teacher(self, items: Numbers, inputs: PackedBatch, fillers: int) -> Tensor | None:
        """Return the teacher's scores for these items, with zeros for filler, or None without a teacher."""
        encoded = self.encoded
        if encoded.teacher is None:
            return None
        scores = encoded.teacher[_score_rows(encoded, items)].astype(np.float32)
        rows = {"token": len(inputs.tokens_T), "sequence": inputs.layout.sequences}
        return _filled(scores, rows.get(encoded.unit, len(scores) + fillers) - len(scores))

    def _states(self, items: Numbers, tokens: int) -> Tensor | None:
        """Return a frozen encoder's states of these items, padded with zeros to `tokens` rows, or None."""
        if not self.encoded.states_L:
            return None
        rows_T = token_rows(self.encoded, items)
        states = [_filled(layer_TD[rows_T], tokens - len(rows_T)) for layer_TD in self.encoded.states_L]
        return torch.stack(states)

    def _inputs(self, items: Numbers, sequences_S: Numbers) -> PackedBatch:
        """Return the tokens of these items; filler is one more sequence at the end, never attended to."""
        encoded = self.encoded
        tokens_T = token_rows(encoded, items)
        lengths_S = encoded.starts_N1[sequences_S + 1] - encoded.starts_N1[sequences_S]
        filler = 0
        if self.fills:  # to the next multiple, at least one token
            filler = -(-(len(tokens_T) + 1) // self.multiple) * self.multiple - len(tokens_T)
            lengths_S = np.append(lengths_S, filler)
        starts_S1 = np.append(0, np.cumsum(lengths_S))
        # Filler may be longer than any text; its positions restart, because the position table is not longer.
        positions_T = _run_of(np.zeros_like(lengths_S), lengths_S) % self.longest_text
        return PackedBatch(
            # Filler is the first entry of the vocabulary, whatever it is: its scores are not used.
            tokens_T=_filled(encoded.tokens_T[tokens_T].astype(np.int64), filler),
            segments_T=_filled(encoded.segments_T[tokens_T].astype(np.int64), filler),
            positions_T=torch.from_numpy(positions_T),
            layout=Layout(
                torch.from_numpy(starts_S1.astype(np.int32)), max(self.longest_text, self.multiple)
            ),
        )

    def _targets(self, items: Numbers) -> tuple[NDArray[Any], Numbers]:
        """Return the targets of these items and, for tags, their packed rows."""
        encoded = self.encoded
        if encoded.unit != "word":
            return encoded.targets[items], _no_rows()
        begins_M, ends_M = _tokens_of(encoded, items)
        firsts_M, pasts_M = _words_between(encoded, begins_M, ends_M)
        words_P = _run_of(firsts_M, pasts_M)
        # rows_P are rows of the whole set; shift each item's rows to its tokens in the batch.
        moved_M = np.cumsum(ends_M - begins_M) - ends_M
        return encoded.targets[words_P], encoded.rows_P[words_P] + np.repeat(moved_M, pasts_M - firsts_M)


def _sequences_of(encoded: EncodedSet, items: Numbers) -> tuple[Numbers, Numbers]:
    return encoded.items_M1[items], encoded.items_M1[items + 1]


def _tokens_of(encoded: EncodedSet, items: Numbers) -> tuple[Numbers, Numbers]:
    firsts, pasts = _sequences_of(encoded, items)
    return encoded.starts_N1[firsts], encoded.starts_N1[pasts]


def _words_between(encoded: EncodedSet, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    return np.searchsorted(encoded.rows_P, begins), np.searchsorted(encoded.rows_P, ends)


def _run_of(firsts: Numbers, pasts: Numbers) -> Numbers:
    """Return all numbers from each first to its past-the-last, one range after the other."""
    counts = pasts - firsts
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(pasts - ends, counts)


def _filled(values: NDArray[Any], count: int) -> Tensor:
    """Append `count` zeros to the values."""
    return torch.from_numpy(np.concatenate([values, np.zeros((count, *values.shape[1:]), values.dtype)]))


def _no_rows(*widths: int) -> Numbers:
    return np.zeros((0, *widths), np.int64)
