"""Early warnings if a run does not learn: plateaus at the unigram line, a dead decoder, exploding gradients.

The loss of a model that only knows word frequencies is the unigram entropy. All runs fall to that line within
their first steps. Runs with too high a learning rate stay there for hours, often with one word as every
prediction.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.core.measures import Metric
from bertsmith.pretraining.held_out import HeldOutSet, pretraining_objective
from bertsmith.training.trainer import Trainer, autocast

MIN_LINES = 12
"""Minimum lines of metrics; before, the loss falls too fast to detect a plateau."""
NEAR, FALLING = 0.02, 0.01
"""Fractions of the unigram entropy: a loss further below it than NEAR has left the line; a loss that fell by
more than FALLING since the second quarter of the run is still falling."""
EXPLOSION = 30.0
"""Multiple of the usual gradient norm that is an explosion; healthy norms change by a small factor."""
CONSTANT = 0.99
"""Minimum fraction of equal predictions of a dead decoder."""
WHAT_TO_TRY = "try a lower optim.peak_lr, a longer optim.warmup_fraction, or a pre-norm model (modernbert)"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run, by its kind and in words."""

    kind: str
    text: str


@dataclass
class LearningWatch:
    """The losses and gradient norms of a run, and the problems that they show."""

    unigram_entropy: float
    warmup_fraction: float
    watched: Metric
    """Metric whose plateau is reported."""
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    """Kinds of findings that the journal has already."""

    def read(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Read a journal, for a run that resumes."""
        for entry in entries:
            if entry["kind"] == "train":
                self.add(entry["step"], entry)
            if "warning" in entry:
                self.told.add(entry["warning"])

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line of metrics."""
        loss, norm = values.get(self.watched.name), values.get("gradient_norm")
        if loss is not None and norm is not None and isfinite(loss) and isfinite(norm):
            self.steps.append(step)
            self.losses.append(loss)
            self.norms.append(norm)

    def plateau(self, fraction: float) -> Finding | None:
        """Return a finding if the loss was at or above the unigram line for half of the run so far."""
        quarter = len(self.losses) // 4
        if len(self.losses) < MIN_LINES or fraction < self.warmup_fraction:
            return None
        before = statistics.fmean(self.losses[quarter : 2 * quarter])
        now = statistics.fmean(self.losses[-quarter:])
        line = self.unigram_entropy
        falls = before - now > FALLING * line and now < self.losses[0]  # not a return from an earlier rise
        if now < (1 - NEAR) * line or falls:
            return None
        stays = f"the {self.watched.label} stays near {now:.2f} since step {self.steps[quarter]:,}"
        since = f"step {self.steps[-1]:,}: {stays}"
        return Finding("plateau", f"{since}; {above_frequencies(now, line)}")

    def explosion(self) -> Finding | None:
        """Return a finding if the gradient norms are many times larger than before."""
        newest = max(2, len(self.norms) // 8)
        if len(self.norms) < MIN_LINES:
            return None
        before, now = statistics.median(self.norms[:-newest]), statistics.median(self.norms[-newest:])
        if now <= EXPLOSION * before:
            return None
        text = f"step {self.steps[-1]:,}: the gradient norm rose from {before:.3g} to {now:.3g}: it explodes"
        return Finding("explosion", f"{text}; {WHAT_TO_TRY}, or set run.spike_factor")


def above_frequencies(loss: float, unigram_entropy: float) -> str:
    """Explain a loss at the unigram line."""
    compared = "is not below" if loss >= unigram_entropy else "is hardly below"
    return (
        f"{loss:.2f} {compared} {unigram_entropy:.2f}, the loss of mere word frequencies (the unigram line): "
        "the model learns nothing from context"
    )


def constant_prediction(trainer: Trainer, held_out: HeldOutSet) -> int | None:
    """Return the token that the decoder predicts everywhere, or None if its predictions differ."""
    objective = pretraining_objective(trainer)
    networks = objective.networks().values()
    (head,) = [network.heads["mlm"] for network in networks if "mlm" in network.heads]
    predicted: list[Tensor] = []

    def keep(_: nn.Module, __: Any, scores_PV: Tensor) -> None:
        predicted.append(scores_PV.argmax(-1))

    micro = held_out.batches.micros[0].to(trainer.world.device)
    loss_scales = torch.ones(len(objective.declared.counts), device=trainer.world.device)
    # A hook on the head: the objective returns only sums, and sharded weights are whole only in its forward.
    hook = head.register_forward_hook(keep)
    trainer.objective.eval()
    try:
        with torch.no_grad(), autocast(trainer.world.device, trainer.precision):
            trainer.objective(micro, loss_scales)
    finally:
        hook.remove()
        trainer.objective.train()
    ids_P = predicted[0]
    if len(ids_P) != len(micro["masked_rows_P"]):  # a student is compared with its teacher at every token
        ids_P = ids_P[micro["masked_rows_P"]]
    ids_P = ids_P[micro["masked_weights_P"] > 0]
    commonest = int(ids_P.mode().values) if len(ids_P) else 0
    is_constant = len(ids_P) > 1 and float((ids_P == commonest).float().mean()) >= CONSTANT
    return commonest if is_constant else None
