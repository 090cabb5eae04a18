"""Inspect built batches: single sequences to print, and statistics of what the recipe sampled."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.collate import PretrainingBatch
from bertsmith.data.data_loader import PretrainingDataset, StepBatches
from bertsmith.data.example_index import Numbers
from bertsmith.data.masking import stored_units, uncut_units
from bertsmith.recipe.data_sections import Unit


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """One sequence as the model sees it, with its targets."""

    tokens: list[int]
    segments: list[int]
    positions: list[int]
    targets: dict[int, int]
    """Id to predict, by position."""
    pair_label: int | None


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Counts over the sequences of some steps."""

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
        """Number of sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens, special tokens included."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class UnitStatistics:
    """Masking counts of the phrases or entities that truncation has not cut."""

    found: int
    whole: int
    """Units with all tokens masked for prediction."""
    in_part: int
    """Units with some, but not all, tokens masked for prediction."""


def sequences_of(step: StepBatches) -> Iterator[ShownSequence]:
    """Yield the sequences of a step in order, without filler."""
    for micro in step.micros:
        inputs = micro.inputs
        bounds = [each for each in inputs.layout.bounds() if each[0] < micro.end_1]
        rows_P, ids_P = (each.tolist() for each in _predicted(micro))
        for number, (start, end) in enumerate(bounds):
            is_pair = "pair_weights_S" in micro.fields and micro["pair_weights_S"][number] > 0
            yield ShownSequence(
                tokens=inputs.tokens_T[start:end].tolist(),
                segments=inputs.segments_T[start:end].tolist(),
                positions=inputs.positions_T[start:end].tolist(),
                targets={
                    row - start: token for row, token in zip(rows_P, ids_P, strict=True) if start <= row < end
                },
                pair_label=int(micro["pair_labels_S"][number]) if is_pair else None,
            )


def _predicted(micro: PretrainingBatch) -> tuple[Tensor, Tensor]:
    """Return the rows and ids of the predicted tokens, without filler; empty if none are predicted."""
    if "masked_rows_P" not in micro.fields:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    is_real_P = micro["masked_weights_P"] > 0
    return micro["masked_rows_P"][is_real_P], micro["masked_ids_P"][is_real_P]


def batch_statistics(steps: Iterable[StepBatches], *, mask_id: int) -> BatchStatistics:
    """Count sequences, tokens, predictions and pairs over all sequences of these steps."""
    lengths, predicted, as_mask, unchanged = [], 0, 0, 0
    steps = list(steps)
    for micro in (micro for step in steps for micro in step.micros):
        starts_S1 = micro.inputs.layout.starts_S1.numpy().astype(np.int64)
        lengths.append(np.diff(starts_S1)[starts_S1[:-1] < int(micro.end_1)])
        rows_P, ids_P = _predicted(micro)
        shown = micro.inputs.tokens_T[rows_P]
        is_mask = shown == mask_id
        predicted += len(shown)
        as_mask += int(is_mask.sum())
        # A random token can happen to be the token it replaces. It counts as unchanged, because the model
        # sees no change.
        unchanged += int((~is_mask & (shown == ids_P)).sum())
    pairs, negatives = (
        int(sum(step.counts.get(name, 0.0) for step in steps)) for name in ("pairs", "pairs_of_label_1")
    )
    as_random = predicted - as_mask - unchanged
    return BatchStatistics(
        np.concatenate(lengths), predicted, as_mask, as_random, unchanged, pairs, negatives
    )


def unit_statistics(dataset: PretrainingDataset, steps: Sequence[StepBatches]) -> dict[Unit, UnitStatistics]:
    """Count the found and masked units in these steps, for each kind that only the store knows."""
    if not (dataset.predicts and dataset.recipe.examples.masks_tokens):
        return {}
    statistics = {}
    for unit in stored_units(dataset.recipe.masking):
        fraction_U = np.concatenate([_predicted_fractions(dataset, step, unit) for step in steps])
        whole, touched = int((fraction_U == 1).sum()), int((fraction_U > 0).sum())
        statistics[unit] = UnitStatistics(len(fraction_U), whole, in_part=touched - whole)
    return statistics


def _predicted_fractions(dataset: PretrainingDataset, step: StepBatches, unit: Unit) -> NDArray[np.float64]:
    """Return the fraction of predicted tokens in each uncut unit of a step."""
    collator = dataset.collator(step.index.stage)
    assert collator.masker is not None
    # A batch does not keep its units, so lay out the step's examples again: this yields the same rows.
    sequences, text = collator.lay_out(collator.index.examples(step.index.step))
    starts_U, ends_U = uncut_units(text, unit, boundaries=collator.masker.vocabulary.boundaries)
    is_predicted = []
    for micro in step.micros:
        is_predicted_T = np.zeros(len(micro.inputs.tokens_T), np.bool_)
        is_predicted_T[_predicted(micro)[0].numpy()] = True
        is_predicted.append(is_predicted_T[: int(micro.end_1)])
    before_X1 = np.append(0, np.cumsum(np.concatenate(is_predicted)[sequences.text_rows_X]))
    counts_U: Numbers = before_X1[ends_U] - before_X1[starts_U]
    return counts_U / (ends_U - starts_U)
