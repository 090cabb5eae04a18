"""How well a network does on documents it is never trained on, and how well mere frequencies would do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.examples.feed import Feed, StepAddress, StepBatches
from bertsmith.objectives.pretraining import Counts
from bertsmith.training.parallel import World
from bertsmith.training.steps import Learner, autocast

MEASURES = ("loss", "mlm_loss", "mlm_accuracy", "pair_loss", "pair_accuracy", "pair_majority", "sequences")
"""What `evaluate` can say."""


@dataclass(frozen=True, slots=True)
class Exam:
    """What a stage is judged by: the same sequences at every look."""

    batches: StepBatches
    """This rank's part of them."""
    sequences: int
    """Over all ranks."""
    pair_majority: float | None
    """The share of pairs that one would guess right by always giving the commoner answer."""


def held_out_exam(feed: Feed, stage: int, world: World) -> Exam:
    """The first held-out step of a stage, which holds all that is to be looked at (`exam_recipe`)."""
    batches = feed.build(StepAddress(stage, 0, 0.0))
    marked = sum(float((micro.pair_labels_S * micro.pair_weights_S).sum()) for micro in batches.micros)
    sequences, pairs, ones = world.sum([batches.sequences, batches.pairs, marked])
    return Exam(batches, int(sequences), max(ones, pairs - ones) / pairs if pairs else None)


def evaluate(learner: Learner, exam: Exam) -> dict[str, float]:
    """Losses and accuracies over an exam, without dropout, over all ranks, and what the exam is."""
    world, objective = learner.world, learner.objective
    totals = torch.zeros(4, dtype=torch.float64)
    shares = torch.ones(2, device=world.device)
    objective.eval()
    with torch.no_grad(), autocast(world.device, learner.precision):
        for micro in exam.batches.micros:
            totals += objective(micro.to(world.device), shares)[1].double().cpu()
    objective.train()
    means = means_of(world, totals.tolist(), Counts(exam.batches.masked, exam.batches.pairs))
    majority = {} if exam.pair_majority is None else {"pair_majority": exam.pair_majority}
    return {**means, **majority, "sequences": exam.sequences}


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
