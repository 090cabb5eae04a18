"""Batches taken apart again: single sequences to look at, and the shares that a recipe's draws came to."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.examples.batch import PretrainingBatch
from bertsmith.examples.feed import Feed, StepBatches
from bertsmith.examples.masking import coded_units
from bertsmith.examples.masking_units import uncut_units
from bertsmith.examples.pairs import Numbers
from bertsmith.recipe.schema import Unit
from bertsmith.text.word_borders import Flags


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """One sequence as the model sees it, and what it must say about it."""

    tokens: list[int]
    segments: list[int]
    positions: list[int]
    targets: dict[int, int]
    """The right id at each place where one is asked for."""
    pair_label: int | None


@dataclass(frozen=True, slots=True)
class Shares:
    """What was counted over some sequences."""

    lengths: Numbers
    predicted: int
    as_mask: int
    as_random: int
    unchanged: int
    pairs: int
    negatives: int
    """Pairs of label 1: random or swapped."""

    @property
    def sequences(self) -> int:
        """How many sequences were counted."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many tokens they have, special ones included."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class UnitShares:
    """What became of the phrases or entities that truncation has not cut."""

    found: int
    whole: int
    """All their tokens are to be predicted."""
    in_part: int
    """Some of their tokens are."""


def sequences_of(step: StepBatches) -> Iterator[ShownSequence]:
    """The sequences of a step in their order, without fillers."""
    for micro in step.micros:
        bounds = list(micro.inputs.layout.bounds())[:-1]
        for number, (start, end) in enumerate(bounds):
            yield _sequence(micro, number, slice(start, end))


def measure(steps: Iterable[StepBatches], *, mask_id: int) -> Shares:
    """The shares over all sequences of these steps."""
    micros = [micro for step in steps for micro in step.micros]
    counts = np.sum([_fates(micro, mask_id) for micro in micros], axis=0)
    labels, weights = _joined(micros, "pair_labels_S"), _joined(micros, "pair_weights_S")
    starts = (micro.inputs.layout.starts_S1.numpy().astype(np.int64) for micro in micros)
    return Shares(
        lengths=np.concatenate([np.diff(each)[:-1] for each in starts]),
        predicted=int(counts.sum()),
        as_mask=int(counts[0]),
        as_random=int(counts[1]),
        unchanged=int(counts[2]),
        pairs=int(weights.sum()),
        negatives=int((labels * weights).sum()),
    )


def measure_units(feed: Feed, steps: Sequence[StepBatches]) -> dict[Unit, UnitShares]:
    """What became of each kind that masking takes whole and only the store knows, in steps of this feed."""
    if feed.recipe.examples.objective != "masked":
        return {}
    return {unit: _unit_shares(feed, steps, unit) for unit in coded_units(feed.recipe.masking)}


def _unit_shares(feed: Feed, steps: Sequence[StepBatches], unit: Unit) -> UnitShares:
    share_U = np.concatenate([_predicted_shares(feed, step, unit) for step in steps])
    is_whole_U, is_touched_U = share_U == 1, share_U > 0
    return UnitShares(len(share_U), int(is_whole_U.sum()), int((is_touched_U & ~is_whole_U).sum()))


def _predicted_shares(feed: Feed, step: StepBatches, unit: Unit) -> NDArray[np.float64]:
    """The share of the tokens to predict in each uncut unit of a step."""
    assembly = feed.assembly(step.address.stage)
    assert assembly.masker is not None
    rows, text = assembly.lay_out(assembly.plan.examples(assembly.plan.step(step.address.step)))
    starts_U, ends_U = uncut_units(text, unit, borders=assembly.masker.vocabulary.borders)
    before_X1 = np.append(0, np.cumsum(_is_predicted(step)[rows.text_rows_X]))
    counts_U: Numbers = before_X1[ends_U] - before_X1[starts_U]
    return counts_U / (ends_U - starts_U)


def _is_predicted(step: StepBatches) -> Flags:
    """Whether each token of the step's sequences is to be predicted."""
    flags = []
    for micro in step.micros:
        flags_T = np.zeros(len(micro.inputs.tokens_T), np.bool_)
        flags_T[micro.masked_rows_P[micro.masked_weights_P > 0].numpy()] = True
        flags.append(flags_T[: int(micro.inputs.layout.starts_S1[-2])])
    return np.concatenate(flags)


def _sequence(micro: PretrainingBatch, number: int, rows: slice) -> ShownSequence:
    inputs = micro.inputs
    here = (
        (micro.masked_rows_P >= rows.start) & (micro.masked_rows_P < rows.stop) & (micro.masked_weights_P > 0)
    )
    places = (micro.masked_rows_P[here] - rows.start).tolist()
    label = int(micro.pair_labels_S[number]) if micro.pair_weights_S[number] > 0 else None
    return ShownSequence(
        tokens=inputs.tokens_T[rows].tolist(),
        segments=inputs.segments_T[rows].tolist(),
        positions=inputs.positions_T[rows].tolist(),
        targets=dict(zip(places, micro.masked_ids_P[here].tolist(), strict=True)),
        pair_label=label,
    )


def _fates(micro: PretrainingBatch, mask_id: int) -> Numbers:
    """How many predicted tokens are shown as the mask, as another token, and as they are."""
    is_asked = micro.masked_weights_P > 0
    shown = micro.inputs.tokens_T[micro.masked_rows_P[is_asked]]
    is_mask, is_same = shown == mask_id, shown == micro.masked_ids_P[is_asked]
    parts: tuple[Tensor, ...] = (is_mask, ~is_mask & ~is_same, ~is_mask & is_same)
    return np.array([int(part.sum()) for part in parts], np.int64)


def _joined(micros: list[PretrainingBatch], name: str) -> NDArray[np.float64]:
    return np.concatenate([getattr(micro, name).numpy() for micro in micros]).astype(np.float64)
