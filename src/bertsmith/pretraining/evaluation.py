"""How well a network does on documents it is never trained on, and how well mere frequencies would do."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.examples.feed import Feed, StepAddress, StepBatches
from bertsmith.objectives.pretraining import Counts
from bertsmith.training.parallel import World
from bertsmith.training.steps import Learner, autocast

MEASURES = ("loss", "mlm_loss", "mlm_accuracy", "pair_loss", "pair_accuracy")
"""What `means_of` can say."""


def held_out_batches(feed: Feed, stage: int, sequences: int) -> list[StepBatches]:
    """This rank's part of the first held-out steps with at least so many sequences in all."""
    found: list[StepBatches] = []
    wanted = -(-sequences // feed.world)
    while sum(batches.sequences for batches in found) < wanted and len(found) < feed.plan(stage).steps_in(0):
        found.append(feed.build(StepAddress(stage, len(found), 0.0)))
    return found


def evaluate(learner: Learner, batches: Sequence[StepBatches]) -> dict[str, float]:
    """Losses and accuracies over these batches, without dropout, over all ranks."""
    world, objective = learner.world, learner.objective
    totals = torch.zeros(4, dtype=torch.float64)
    counts = np.zeros(2)
    shares = torch.ones(2, device=world.device)
    objective.eval()
    with torch.no_grad(), autocast(world.device, learner.precision):
        for step in batches:
            counts += (step.masked, step.pairs)
            for micro in step.micros:
                totals += objective(micro.to(world.device), shares)[1].double().cpu()
    objective.train()
    return means_of(world, totals.tolist(), Counts(*counts.tolist()))


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
    shares = token_counts[token_counts > 0] / token_counts.sum()
    return float(-(shares * np.log(shares)).sum())
