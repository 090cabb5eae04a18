"""Collating: from the examples of a step to micro-batches of packed tokens and their targets.

    StepExamples -> PackedSequences (special tokens around the text) -> Collated (masking) -> PretrainingBatch

An objective declares the other tensors of its batches (`Field`): how they are made, filled up and counted.

Shapes: X tokens of text, T all tokens, N spans of text, S sequences, S1 = S + 1 boundaries,
P predicted tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.arrays import ranges
from bertsmith.core.measures import Field
from bertsmith.data.epoch_index import StageIndex, StepExamples
from bertsmith.data.example_index import Numbers, Spans
from bertsmith.data.masking import Masker, Text, stored_units
from bertsmith.packed import SHORT_LENGTH, Layout, PackedBatch, split_by_budget
from bertsmith.recipe.data_sections import Objective
from bertsmith.text.tokenizer import Inserted, Template

OF_TOKENS = ("tokens", "segments", "positions")


@dataclass(frozen=True, slots=True)
class PretrainingBatch:
    """Packed tokens, and the fields that an objective declares; filler keeps the shapes fixed."""

    inputs: PackedBatch
    end_1: Tensor
    """Row after the last token of the last example: filler begins at this row."""
    fields: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """Return a declared field."""
        return self.fields[name]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PretrainingBatch":
        """Return a copy of the batch on another device."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PretrainingBatch":
        """Return a copy in page-locked memory, so that a GPU can copy it in the background."""
        return self.mapped(Tensor.pin_memory)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "PretrainingBatch":
        """Return a batch with `change` applied to every tensor."""
        changed = {name: change(tensor) for name, tensor in self.named_tensors().items()}
        return PretrainingBatch.from_tensors(changed, longest=self.inputs.layout.longest)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch, always in the same order."""
        return list(self.named_tensors().values())

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return every shape and the longest sequence: what a recorded CUDA graph depends on."""
        return (*(tuple(tensor.shape) for tensor in self.tensors()), (self.inputs.layout.longest,))

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch by name, omitting optional ones that are None."""
        inputs = self.inputs
        found = {
            **{f"{each}_T": getattr(inputs, f"{each}_T") for each in OF_TOKENS},
            "task_types_T": inputs.task_types_T,
            "starts_S1": inputs.layout.starts_S1,
            "end_1": self.end_1,
            **self.fields,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, longest: int) -> "PretrainingBatch":
        """Build a batch from its `named_tensors`."""
        rest = dict(tensors)
        layout, types_T = Layout(rest.pop("starts_S1"), longest), rest.pop("task_types_T", None)
        tokens_T, segments_T, positions_T = (rest.pop(f"{each}_T") for each in OF_TOKENS)
        end_1 = rest.pop("end_1")
        return cls(PackedBatch(tokens_T, segments_T, positions_T, layout, types_T), end_1, rest)


def counts_of(micros: Iterable[PretrainingBatch], fields: Sequence[Field]) -> dict[str, float]:
    """Return the counts of the fields, and the numbers of tokens and sequences without filler."""
    of_micros = [
        {
            **{each.counted: micro[each.name].sum() for each in fields if each.counted},
            "tokens": micro.end_1,
            "sequences": (micro.inputs.layout.starts_S1[:-1] < micro.end_1).sum(),
        }
        for micro in micros
    ]
    return {name: sum(float(each[name]) for each in of_micros) for name in of_micros[0]}


MIN_FILLER_LENGTH = 64
"""Filler of up to this many tokens is one sequence. Fingerprints of batches depend on it."""


class Multiples(NamedTuple):
    """Multiples that a micro-batch's sizes are rounded up to: few shapes to compile or record."""

    tokens: int = 64
    predicted: int = 64
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class MicroShape:
    """Size limits for every micro-batch of a stage."""

    tokens: int
    """Maximum tokens, filler included."""
    multiples: Multiples
    length: int
    """Longest sequence of the stage, in tokens."""
    pad_id: int
    recipe_length: int
    """Longest sequence of all stages, in tokens."""

    @property
    def capacity(self) -> int:
        """Maximum tokens of examples: at least one token is always filler."""
        return self.tokens // self.multiples.tokens * self.multiples.tokens - 1

    @property
    def filler_length(self) -> int:
        """Longest sequence of filler, in tokens."""
        return min(self.multiples.tokens, max(self.length, MIN_FILLER_LENGTH))

    @property
    def longest(self) -> int:
        """Longest sequence of the stage in tokens, filler included.

        All stages use one number, so that nothing is recompiled between them. The exception is short stages
        before longer ones: one more compilation makes all of their steps faster.
        """
        own = max(self.length, self.filler_length)
        if own <= SHORT_LENGTH:
            return max(own, min(self.recipe_length, SHORT_LENGTH))
        return max(own, self.recipe_length)


def slices_of_ranks(count: int, world: int) -> list[slice]:
    """Divide the examples of a step among ranks: contiguous slices of equal size, to within one example."""
    return [slice(count * rank // world, count * (rank + 1) // world) for rank in range(world)]


def micro_sizes(lengths_by_rank: list[Numbers], rank: int, *, capacity: int) -> list[int]:
    """Return how many examples of this rank go into each micro-batch; all ranks get as many micro-batches."""
    # Ranks meet in every backward pass (gradients are summed), so they must agree on the number of passes.
    greedy = [
        [len(group) for group in split_by_budget(lengths.tolist(), capacity)] for lengths in lengths_by_rank
    ]
    wanted = max(len(sizes) for sizes in greedy)
    # Prefer about equally many tokens in each, if all fit: a small last micro-batch would need recompiling.
    lengths = lengths_by_rank[rank]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, total * np.arange(1, wanted) / wanted, side="right")
    even: list[int] = np.diff([0, *cuts, len(lengths)]).tolist()
    tokens = np.diff([0, *np.append(0, ends)[cuts], total])
    if (tokens <= capacity).all() and all(even):
        return even
    # Otherwise use the greedy sizes and halve the largest until there are enough. Some may stay empty.
    sizes = greedy[rank]
    while len(sizes) < wanted:
        largest = int(np.argmax([*sizes, 1]))
        if largest == len(sizes) or sizes[largest] < 2:
            return sizes + [0] * (wanted - len(sizes))
        half = sizes[largest] // 2
        sizes = [*sizes[:largest], sizes[largest] - half, half, *sizes[largest + 1 :]]
    return sizes


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Sequences laid out one after the other, and the rows of their text."""

    tokens_T: Numbers
    segments_T: Numbers
    positions_T: Numbers
    starts_S1: Numbers
    text_rows_X: Numbers
    text_lengths_S: Numbers


@dataclass(frozen=True, slots=True)
class Collated:
    """The sequences of a step as the model sees them, and the sources of its batches' fields."""

    examples: StepExamples
    sequences: PackedSequences
    text: Text
    rows_P: Numbers
    """Rows of the predicted tokens, in order."""
    ids_P: Numbers
    indices_P: Numbers
    """Indices of masked tokens in the text; empty if nothing is masked."""
    masker: Masker | None


def _rows(step: Collated) -> Numbers:
    return step.rows_P


def _ids(step: Collated) -> Numbers:
    return step.ids_P


def _weights(step: Collated) -> NDArray[np.float32]:
    return np.ones(len(step.rows_P), np.float32)


def _pair_labels(step: Collated) -> Numbers:
    return np.where(step.examples.index.second_length > 0, step.examples.index.label, 0).astype(np.int64)


def _pair_weights(step: Collated) -> NDArray[np.float32]:
    return (step.examples.index.second_length > 0).astype(np.float32)


def _draws(step: Collated) -> Numbers:
    assert step.masker is not None, "samples replace masked tokens"
    return step.masker.sampling_draws(step.text, step.indices_P)


WORD_FIELDS = (
    # The encoder's views define which rows predict the tokens of these rows.
    Field("masked_rows_P", _rows, is_row=True),
    Field("masked_ids_P", _ids),
    Field("masked_weights_P", _weights, "masked"),
)
"""Predicted words; the weight of filler is 0."""
PAIR_FIELDS = (
    # 0: B follows A, or the pair is in order; 1: B is random, or the pair is swapped (BERT and ALBERT).
    Field("pair_labels_S", _pair_labels, "pairs_of_label_1"),
    Field("pair_weights_S", _pair_weights, "pairs"),
)
"""Sentence pairs; the weight of a sequence that is not a pair is 0."""
DRAWS = Field("draws_P", _draws)
"""Random numbers below 2**SAMPLING_BITS, which sample a generator's tokens."""


@dataclass(frozen=True)
class Collator:
    """Lays out the sequences of a stage, and masks tokens if any are predicted."""

    index: StageIndex
    masker: Masker | None
    """None for objectives without masks."""
    predicts: bool = True
    """True if tokens are predicted: masked ones, or without a masker all with a neighbour."""

    def collate(self, examples: StepExamples, *, progress: float, rate: float | None = None) -> Collated:
        """Return the sequences of these examples as the model sees them, with their predicted tokens."""
        sequences, text = self.lay_out(examples)
        rows_P = ids_P = indices_P = np.zeros(0, np.int64)
        if self.masker is not None:
            masks = self.masker.masks(text, progress=progress, rate=rate)
            indices_P = masks.indices_P
            rows_P, ids_P = sequences.text_rows_X[indices_P], text.tokens_X[indices_P]
            sequences.tokens_T[rows_P] = masks.shown_P
        elif self.predicts:
            rows_P, ids_P = neighbours(sequences, self.index.source.recipe.examples.objective)
        return Collated(examples, sequences, text, rows_P, ids_P, indices_P, self.masker)

    def lay_out(self, examples: StepExamples) -> tuple[PackedSequences, Text]:
        """Return the sequences of these examples before masking, and their text without special tokens."""
        source, store = self.index.source, self.index.source.store
        spans = source.spans(examples.epoch, examples.numbers, examples.index)
        text_X = store.gather(spans.starts_N, spans.lengths_N)
        sequences = lay_out(text_X, spans, source.template)
        if source.recipe.model.segments < 2:  # RoBERTa, DistilBERT: always one segment
            sequences.segments_T[:] = 0
        codes_X, next_codes_N = None, None
        if self.masker is not None and stored_units(self.masker.masking):
            codes_X = store.gather_units(spans.starts_N, spans.lengths_N)
            # If truncation has cut the unit at a span's end, the unit continues in the token after the span.
            # After the store's last token there is nothing.
            behind_N = spans.starts_N + spans.lengths_N
            exists_N = (behind_N < store.tokens).astype(np.int64)
            next_codes_N = np.zeros(len(behind_N), np.uint8)
            next_codes_N[exists_N == 1] = store.gather_units(behind_N, exists_N)
        text = Text(
            tokens_X=text_X,
            span_lengths_N=spans.lengths_N,
            lengths_S=sequences.text_lengths_S,
            whole_lengths_S=np.diff(sequences.starts_S1),
            keys_S=source.keys("mask", examples.epoch, examples.numbers),
            codes_X=codes_X,
            next_codes_N=next_codes_N,
        )
        return sequences, text


def lay_out(text_X: Numbers, spans: Spans, template: Template) -> PackedSequences:
    """Add special tokens, segments and positions to the text, and return the packed sequences."""
    # All at once, without a loop over sequences: the special tokens before each span are a gap of known size,
    # so running sums of gaps and lengths give the row at which each span begins.
    last_S = np.cumsum(spans.counts_S) - 1
    first_S = last_S - spans.counts_S + 1
    is_first_N = np.zeros(len(spans.starts_N), np.bool_)
    is_first_N[first_S] = True
    gap_N = np.where(is_first_N, len(template.lead) + len(template.tail), len(template.between))
    gap_N[:1] = len(template.lead)
    begin_N = np.cumsum(gap_N) + np.cumsum(spans.lengths_N) - spans.lengths_N
    end_S = begin_N[last_S] + spans.lengths_N[last_S] + len(template.tail)
    starts_S1 = np.concatenate([[0], end_S])
    total = int(starts_S1[-1])
    sequences = PackedSequences(
        tokens_T=np.empty(total, np.int64),
        segments_T=np.empty(total, np.int64),
        positions_T=np.arange(total) - np.repeat(starts_S1[:-1], np.diff(starts_S1)),
        starts_S1=starts_S1,
        text_rows_X=ranges(begin_N, spans.lengths_N),
        text_lengths_S=np.add.reduceat(spans.lengths_N, first_S),
    )
    segment_N = np.where(is_first_N, *template.text_segments)
    sequences.tokens_T[sequences.text_rows_X] = text_X
    sequences.segments_T[sequences.text_rows_X] = np.repeat(segment_N, spans.lengths_N)
    _insert(sequences, template.lead, starts_S1[:-1])
    _insert(sequences, template.between, begin_N[~is_first_N] - len(template.between))
    _insert(sequences, template.tail, end_S - len(template.tail))
    # The template may be for pairs: the tail of a single segment then belongs to that segment.
    single_S = end_S[spans.counts_S == 1]
    for offset in range(len(template.tail)):
        sequences.segments_T[single_S - 1 - offset] = template.text_segments[0]
    return sequences


def _insert(sequences: PackedSequences, inserted: Inserted, at: Numbers) -> None:
    for offset, (token, segment) in enumerate(zip(inserted.ids, inserted.segments, strict=True)):
        sequences.tokens_T[at + offset] = token
        sequences.segments_T[at + offset] = segment


def neighbours(sequences: PackedSequences, objective: Objective) -> tuple[Numbers, Numbers]:
    """Return the rows with every neighbour that predicts them, and their ids."""
    assert objective in ("left-to-right", "right-to-left", "two-directions"), "others mask what is predicted"
    has_neighbours_T = np.ones(len(sequences.tokens_T), np.bool_)
    if objective != "right-to-left":
        has_neighbours_T[sequences.starts_S1[:-1]] = False
    if objective != "left-to-right":
        has_neighbours_T[sequences.starts_S1[1:] - 1] = False
    rows_P = np.flatnonzero(has_neighbours_T)
    return rows_P, sequences.tokens_T[rows_P]


def micro_batches(
    step: Collated, fields: Sequence[Field], *, sizes: list[int], shape: MicroShape
) -> Iterator[PretrainingBatch]:
    """Yield the sequences as micro-batches of these sizes with these fields, each ending in filler."""
    sequences, values = step.sequences, [(each, each.make(step)) for each in fields]
    ends = np.cumsum(sizes).tolist()
    for first, last in pairwise([0, *ends]):
        begin, end = sequences.starts_S1[[first, last]].tolist()
        # At least one token of filler, so that every batch has a filler sequence: one shape fewer.
        total = _rounded_up(end - begin + 1, shape.multiples.tokens)
        filler = total - (end - begin)
        rows = slice(begin, end)
        # Empty sequences after the filler round up the number of sequences.
        of_filler = np.arange(end - begin, total, shape.filler_length)
        starts_S = np.append(sequences.starts_S1[first:last] - begin, of_filler)
        empty = _rounded_up(len(starts_S), shape.multiples.sequences) - len(starts_S)
        starts_S1 = np.append(starts_S, np.full(empty + 1, total))
        fillers = len(starts_S1) - 1 - (last - first)
        inputs = PackedBatch(
            tokens_T=_filled(sequences.tokens_T[rows], np.full(filler, shape.pad_id)),
            segments_T=_filled(sequences.segments_T[rows], np.zeros(filler, np.int64)),
            # Filler may be longer than the position table, so its positions start again at 0.
            positions_T=_filled(sequences.positions_T[rows], np.arange(filler) % shape.length),
            layout=Layout(torch.from_numpy(starts_S1.astype(np.int32)), shape.longest),
        )
        # Predicted tokens are in the order of their rows, so a micro-batch's are contiguous.
        predicted = slice(*np.searchsorted(step.rows_P, [begin, end]).tolist())
        count = predicted.stop - predicted.start
        unused = _rounded_up(max(count, 1), shape.multiples.predicted) - count
        parts = {"T": (rows, filler), "S": (slice(first, last), fillers), "P": (predicted, unused)}
        cut: dict[str, Tensor] = {}
        for field, of_step in values:
            part, missing = parts[field.per]
            own = of_step[part] - begin if field.is_row else of_step[part]
            cut[field.name] = _filled(own, np.full(missing, field.filler, own.dtype))
        yield PretrainingBatch(inputs, torch.tensor([end - begin]), cut)


def _filled(values: NDArray[Any], filler: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([values, filler]))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
