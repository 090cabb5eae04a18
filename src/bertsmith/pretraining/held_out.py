"""How well a network does on documents it is never trained on, and how well mere frequencies would do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.objectives.pretraining_objective import Counts
from bertsmith.training.distributed import World
from bertsmith.training.trainer import Trainer, autocast

METRICS = ("loss", "mlm_loss", "mlm_accuracy", "pair_loss", "pair_accuracy", "pair_majority", "sequences")
"""What `evaluate` can return."""


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
    batches = dataset[StepIndex(stage, 0, 0.0)]
    marked = sum(float((micro.pair_labels_S * micro.pair_weights_S).sum()) for micro in batches.micros)
    sequences, pairs, ones = world.sum([batches.sequences, batches.pairs, marked])
    return HeldOutSet(batches, int(sequences), max(ones, pairs - ones) / pairs if pairs else None)


def evaluate(trainer: Trainer, held_out: HeldOutSet) -> dict[str, float]:
    """Losses and accuracies on a held-out set over all ranks, without dropout, and how large the set is."""
    world, objective = trainer.world, trainer.objective
    totals = torch.zeros(4, dtype=torch.float64)
    loss_scales = torch.ones(2, device=world.device)  # the losses are not used, only the sums
    objective.eval()
    with torch.no_grad(), autocast(world.device, trainer.precision):
        for micro in held_out.batches.micros:
            totals += objective(micro.to(world.device), loss_scales)[1].double().cpu()
    objective.train()
    means = means_of(world, totals.tolist(), Counts(held_out.batches.masked, held_out.batches.pairs))
    majority = {} if held_out.pair_majority is None else {"pair_majority": held_out.pair_majority}
    return {**means, **majority, "sequences": held_out.sequences}


def means_of(world: World, sums: Sequence[float], counts: Counts) -> dict[str, float]:
    """Sums and counts of all ranks as losses and accuracies; pairs only where there are any."""
    mlm_loss, mlm_hits, pair_loss, pair_hits, masked, pairs = world.sum([*sums, *counts])
    values = {"mlm_loss": mlm_loss / masked, "mlm_accuracy": mlm_hits / masked} if masked else {}
    if pairs:
        values |= {"pair_loss": pair_loss / pairs, "pair_accuracy": pair_hits / pairs}
    losses = [values[name] for name in ("mlm_loss", "pair_loss") if name in values]
    return {"loss": sum(losses) if losses else math.nan, **values}


def unigram_entropy(token_counts: NDArray[np.int64]) -> float:
    """The loss, in nats, of a model that knows nothing but how frequent each token is."""
    frequencies = token_counts[token_counts > 0] / token_counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
