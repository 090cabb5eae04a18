"""Evaluation on held-out documents, and the loss of a model that knows only token frequencies."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.measures import Declaration
from bertsmith.data.collate import counts_of
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex
from bertsmith.objectives.pretraining_objective import PretrainingObjective, StepObjective
from bertsmith.training.distributed import World, unwrapped
from bertsmith.training.trainer import Trainer, autocast


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """The sequences that a stage is evaluated on, the same every time."""

    batches: StepBatches
    """This rank's part of the sequences."""
    totals: Mapping[str, float]
    """Totals over all ranks that depend only on the data, as input of metrics."""
    block: int = 0
    """Rows that are compared with each other if the loss is over a step; 0: all."""

    @property
    def sequences(self) -> int:
        """Number of sequences over all ranks."""
        return int(self.totals["sequences"])


def held_out_set(dataset: PretrainingDataset, stage: int, world: World, *, block: int = 0) -> HeldOutSet:
    """Return the first held-out step of a stage, which has all sequences to evaluate (`held_out_recipe`)."""
    return replace(_set_of(dataset[StepIndex(stage, 0, 0.0)], world), block=block)


def _set_of(batches: StepBatches, world: World) -> HeldOutSet:
    totals = over_all_ranks(batches.counts, world)
    return HeldOutSet(batches, {**totals, "sequences": int(totals["sequences"])})


def first_passes(held_out: HeldOutSet, passes: int, declared: Declaration, world: World) -> HeldOutSet:
    """Return the set with only its first forward passes on each rank."""
    micros = held_out.batches.micros[:passes]
    fewer = replace(held_out.batches, micros=micros, counts=counts_of(micros, declared.fields))
    known = _set_of(fewer, world)
    return replace(held_out, batches=fewer, totals={**held_out.totals, **known.totals})


def evaluate(
    trainer: Trainer,
    held_out: HeldOutSet,
    *,
    stopping: Callable[[], bool] = lambda: False,
    max_seconds: float = math.inf,
) -> tuple[dict[str, float], HeldOutSet] | None:
    """Return losses and accuracies on a held-out set over all ranks, without dropout, and the evaluated set.

    Returns None if `stopping` meanwhile. If another forward pass would exceed `max_seconds`, the evaluation
    ends and the returned set is shorter; later evaluations on that set are comparable.
    """
    world, objective, bare = trainer.world, trainer.objective, pretraining_objective(trainer)
    declared, rows = bare.declared, list[Tensor]()
    sums = torch.zeros(len(declared.sums), dtype=torch.float64)
    # The losses are not used, only the sums.
    loss_scales = torch.ones(len(declared.counts), device=world.device)
    started, micros = time.monotonic(), held_out.batches.micros
    objective.eval()
    try:
        with torch.no_grad(), autocast(world.device, trainer.precision):
            for passes, micro in enumerate(micros, start=1):
                if isinstance(bare, StepObjective):
                    rows_S, is_real_S = objective(micro.to(world.device), loss_scales)
                    rows.append(rows_S[is_real_S])
                else:
                    sums += objective(micro.to(world.device), loss_scales)[1].double().cpu()
                next_ends = (time.monotonic() - started) * (passes + 1) / passes
                # All ranks end after the same pass, by the clock of the main process.
                late = world.main and next_ends > max_seconds
                stopped, ended = world.sum([float(stopping()), float(late)])
                if stopped:
                    return None
                if ended and passes < len(micros):
                    held_out = first_passes(held_out, passes, declared, world)
                    break
    finally:
        objective.train()
    counts, totals = {name: held_out.batches.counts[name] for name in declared.counts}, held_out.totals
    if isinstance(bare, StepObjective):
        every_Z, _ = world.gathered(torch.cat(rows))
        block = min(held_out.block or len(every_Z), len(every_Z))
        sums, judged = sums_in_blocks(bare, every_Z if world.main else every_Z[:0], block)
        counts, totals = dict.fromkeys(counts, judged), {**totals, "candidates": block}
    own = dict(zip(declared.sums, sums.tolist(), strict=True))
    return declared.means({**totals, **over_all_ranks(own | counts, world)}), held_out


def sums_in_blocks(objective: StepObjective, rows_Z: Tensor, block: int) -> tuple[Tensor, float]:
    """Return the sums over the rows, which are compared in blocks of this size, and the number of rows."""
    # An incomplete block is left out: its rows would be compared with fewer others.
    judged = len(rows_Z) // block * block if block else 0
    scales = torch.ones(len(objective.declared.counts), device=rows_Z.device)
    sums = torch.zeros(len(objective.declared.sums), dtype=torch.float64)
    with torch.no_grad():
        for first in range(0, judged, block or 1):  # none on the ranks without rows
            sums += objective.of_step(rows_Z[first : first + block], scales)[1].double().sum(0).cpu()
    return sums, float(judged)


def over_all_ranks(totals: Mapping[str, float], world: World) -> dict[str, float]:
    """Add up sums and counts over all ranks."""
    return dict(zip(totals, world.sum(list(totals.values())), strict=True))


def pretraining_objective(trainer: Trainer) -> PretrainingObjective:
    """Return the trainer's objective without the wrapper that shares it between processes."""
    objective = unwrapped(trainer.objective)
    assert isinstance(objective, PretrainingObjective)
    return objective


def unigram_entropy(token_counts: NDArray[np.int64], smoothing: float) -> float:
    """Return the loss, in nats, of a model that only knows how often each token is predicted.

    A token of count n is chosen with the weight n^-smoothing (masking.smoothing), so its frequency is
    proportional to n^(1 - smoothing).
    """
    predicted = token_counts[token_counts > 0].astype(np.float64) ** (1 - smoothing)
    frequencies = predicted / predicted.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
