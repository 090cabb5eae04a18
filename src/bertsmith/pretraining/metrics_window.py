"""What a line of training metrics is made of."""

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.data.data_loader import StepBatches
from bertsmith.objectives.pretraining_objective import Counts, PretrainingObjective
from bertsmith.pretraining.held_out import means_of
from bertsmith.training.distributed import World
from bertsmith.training.trainer import StepReport, Trainer


@dataclass
class MetricsWindow:
    """What was seen since the last line of metrics; saved too, so that a resume changes no line.

    Its fields are keys of state.json in saved checkpoints.
    """

    sums: list[float]
    masked: float = 0.0
    pairs: float = 0.0
    tokens: int = 0
    """Over all ranks, those of skipped steps too."""
    sequences: int = 0
    waited: float = 0.0
    since: float = 0.0
    """The run's seconds at the last line."""
    counted_tokens: float = 0.0
    """This rank's, of steps that were not skipped."""

    @classmethod
    def empty(cls, objective: PretrainingObjective, *, since: float = 0.0) -> "MetricsWindow":
        """One in which nothing was seen of this objective yet."""
        return cls([0.0] * len(objective.sums), since=since)

    def add(self, report: StepReport) -> None:
        """Add one step."""
        batches: StepBatches = report.step.batches
        if not report.skipped:
            pairs = zip(self.sums, report.sums.tolist(), strict=True)
            self.sums = [old + new for old, new in pairs]
            self.masked += batches.masked
            self.pairs += batches.pairs
            self.counted_tokens += batches.tokens
        self.tokens += report.step.tokens
        self.sequences += batches.sequences
        self.waited += report.step.waited_seconds

    def metrics(self, trainer: Trainer, report: StepReport) -> dict[str, Any]:
        """The line of metrics over all ranks."""
        counts = Counts(self.masked, self.pairs, self.counted_tokens)
        passed = max(report.progress.seconds - self.since, 1e-9)
        return {
            **means_of(trainer, self.sums, counts),
            "learning_rate": report.step.learning_rate,
            "gradient_norm": report.gradient_norm,
            "tokens": report.progress.tokens,
            "seconds": round(report.progress.seconds, 3),
            "tokens_per_second": round(self.tokens / passed, 1),
            "input_wait": round(self.waited / passed, 5),
            "skipped": report.progress.skipped,
        }

    def over_all_ranks(self, world: World) -> "MetricsWindow":
        """What all ranks together have seen, for a checkpoint; sequences and waiting stay this rank's."""
        *sums, masked, pairs, tokens = world.sum([*self.sums, self.masked, self.pairs, self.counted_tokens])
        return replace(self, sums=sums, masked=masked, pairs=pairs, counted_tokens=tokens)
