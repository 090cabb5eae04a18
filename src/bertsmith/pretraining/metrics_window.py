"""What a line of training metrics is made of."""

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.core.measures import Declaration
from bertsmith.data.data_loader import StepBatches
from bertsmith.pretraining.held_out import over_all_ranks, pretraining_objective
from bertsmith.training.distributed import World
from bertsmith.training.trainer import StepReport, Trainer


@dataclass
class MetricsWindow:
    """What was seen since the last line of metrics; saved too, so that a resume changes no line.

    Its fields are keys of state.json in saved checkpoints.
    """

    sums: dict[str, float]
    """This rank's, of steps that were not skipped, as are the counts."""
    counts: dict[str, float]
    tokens: int = 0
    """Over all ranks, those of skipped steps too."""
    sequences: int = 0
    waited: float = 0.0
    since: float = 0.0
    """The run's seconds at the last line."""

    @classmethod
    def empty(cls, declared: Declaration, *, since: float = 0.0) -> "MetricsWindow":
        """One in which nothing was seen of this objective yet."""
        return cls(dict.fromkeys(declared.sums, 0.0), dict.fromkeys(declared.counts, 0.0), since=since)

    def add(self, report: StepReport) -> None:
        """Add one step."""
        batches: StepBatches = report.step.batches
        if not report.skipped:
            for name, new in zip(self.sums, report.sums.tolist(), strict=True):
                self.sums[name] += new
            for name in self.counts:
                self.counts[name] += batches.counts[name]
        self.tokens += report.step.tokens
        self.sequences += int(batches.counts["sequences"])
        self.waited += report.step.waited_seconds

    def metrics(self, trainer: Trainer, report: StepReport) -> dict[str, Any]:
        """The line of metrics over all ranks."""
        declared = pretraining_objective(trainer).declared
        passed = max(report.progress.seconds - self.since, 1e-9)
        return {
            **declared.means(over_all_ranks(self.sums | self.counts, trainer.world)),
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
        return replace(self, sums=over_all_ranks(self.sums, world), counts=over_all_ranks(self.counts, world))
