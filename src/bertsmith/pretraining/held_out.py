"""How well a network does on documents it is never trained on, and how well mere frequencies would do."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.objectives.pretraining_objective import Counts, PretrainingObjective
from bertsmith.training.distributed import World, unwrapped
from bertsmith.training.trainer import Trainer, autocast

METRICS = (
    *("loss", "mlm_loss", "mlm_accuracy", "pair_loss", "pair_accuracy"),
    *("replaced_loss", "replaced_accuracy", "replaced_precision", "replaced_recall", "replaced_majority"),
    *("soft_loss", "cosine_loss", "hidden_loss", "attention_loss", "relation_loss"),
    *("teacher_mlm_accuracy", "teacher_agreement"),
    *("pair_majority", "sequences"),
    *("fixed_mlm_loss", "fixed_mlm_accuracy", "fixed_bits_per_character", "fixed_sequences"),
)
"""What `evaluate` can return, and the fixed evaluation (`fixed_evaluation.py`)."""


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """What a stage is evaluated on: the same sequences every time."""

    batches: StepBatches
    """This rank's part of them."""
    sequences: int
    """Over all ranks."""
    pair_majority: float | None
    """The pair accuracy of always giving the commoner answer."""


def held_out_set(dataset: PretrainingDataset, stage: int, world: World) -> HeldOutSet:
    """The first held-out step of a stage: it holds all sequences to evaluate (`held_out_recipe`)."""
    return _set_of(dataset[StepIndex(stage, 0, 0.0)], world)


def _set_of(batches: StepBatches, world: World) -> HeldOutSet:
    marked = sum(float((micro.pair_labels_S * micro.pair_weights_S).sum()) for micro in batches.micros)
    sequences, pairs, ones = world.sum([batches.sequences, batches.pairs, marked])
    return HeldOutSet(batches, int(sequences), max(ones, pairs - ones) / pairs if pairs else None)


def first_passes(held_out: HeldOutSet, passes: int, world: World) -> HeldOutSet:
    """The set with only its first forward passes, of which each rank has as many."""
    micros = held_out.batches.micros[:passes]
    fewer = replace(
        held_out.batches,
        micros=micros,
        masked=sum(float(micro.masked_weights_P.sum()) for micro in micros),
        pairs=sum(float(micro.pair_weights_S.sum()) for micro in micros),
        tokens=sum(int(micro.end_1) for micro in micros),
        sequences=sum(int((micro.inputs.layout.starts_S1[:-1] < micro.end_1).sum()) for micro in micros),
    )
    return _set_of(fewer, world)


def evaluate(
    trainer: Trainer,
    held_out: HeldOutSet,
    *,
    stopping: Callable[[], bool] = lambda: False,
    max_seconds: float = math.inf,
) -> tuple[dict[str, float], HeldOutSet] | None:
    """Losses and accuracies on a held-out set over all ranks, without dropout, and what was evaluated.

    None where somebody asked to stop meanwhile. Where another forward pass would take longer than allowed,
    the set ends there: whoever goes on with it compares like with like.
    """
    world, objective = trainer.world, trainer.objective
    totals = torch.zeros(len(pretraining_objective(trainer).sums), dtype=torch.float64)
    # The losses are not used, only the sums.
    loss_scales = torch.ones(len(Counts._fields), device=world.device)
    started, micros = time.monotonic(), held_out.batches.micros
    objective.eval()
    try:
        with torch.no_grad(), autocast(world.device, trainer.precision):
            for passes, micro in enumerate(micros, start=1):
                totals += objective(micro.to(world.device), loss_scales)[1].double().cpu()
                next_ends = (time.monotonic() - started) * (passes + 1) / passes
                # All ranks break off after the same pass: the main process's clock decides for all.
                late = world.main and next_ends > max_seconds
                stopped, ended = world.sum([float(stopping()), float(late)])
                if stopped:
                    return None
                if ended and passes < len(micros):
                    held_out = first_passes(held_out, passes, world)
                    break
    finally:
        objective.train()
    means = means_of(trainer, totals.tolist(), Counts.of(held_out.batches))
    majority = {} if held_out.pair_majority is None else {"pair_majority": held_out.pair_majority}
    return {**means, **majority, "sequences": held_out.sequences}, held_out


def means_of(trainer: Trainer, sums: Sequence[float], counts: Counts) -> dict[str, float]:
    """Sums and counts of this rank as losses and accuracies over all ranks."""
    summed = trainer.world.sum([*sums, *counts])
    return pretraining_objective(trainer).means(summed[: len(sums)], Counts(*summed[len(sums) :]))


def pretraining_objective(trainer: Trainer) -> PretrainingObjective:
    """What the trainer trains, without what shares it between processes."""
    objective = unwrapped(trainer.objective)
    assert isinstance(objective, PretrainingObjective)
    return objective


def unigram_entropy(token_counts: NDArray[np.int64], smoothing: float) -> float:
    """The loss, in nats, of a model that knows nothing but how often each token is predicted.

    A token of count n is chosen with the weight n^-smoothing (masking.smoothing), so n^(1 - smoothing) times.
    """
    predicted = token_counts[token_counts > 0].astype(np.float64) ** (1 - smoothing)
    frequencies = predicted / predicted.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
