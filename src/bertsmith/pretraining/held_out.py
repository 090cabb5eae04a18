"""How well a network does on documents it is never trained on, and how well mere frequencies would do."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
        sequences=sum(micro.inputs.layout.sequences - 1 for micro in micros),  # less the filler sequence
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
    totals = torch.zeros(4, dtype=torch.float64)
    loss_scales = torch.ones(2, device=world.device)  # the losses are not used, only the sums
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
    means = means_of(world, totals.tolist(), Counts(held_out.batches.masked, held_out.batches.pairs))
    majority = {} if held_out.pair_majority is None else {"pair_majority": held_out.pair_majority}
    return {**means, **majority, "sequences": held_out.sequences}, held_out


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
