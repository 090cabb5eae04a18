"""The sums behind a line of training metrics."""

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.core.measures import Declaration
from bertsmith.data.data_loader import StepBatches
from bertsmith.pretraining.held_out import over_all_ranks, pretraining_objective
from bertsmith.training.distributed import World
from bertsmith.training.trainer import StepReport, Trainer


@dataclass
class MetricsWindow:
    """Sums since the last line of metrics, saved in checkpoints so that a resume does not change a line.

    The fields are keys of state.json in checkpoints.
    """

    sums: dict[str, float]
    """Sums of this rank, over steps that were not skipped, like the counts."""
    counts: dict[str, float]
    tokens: int = 0
    """Tokens over all ranks, including skipped steps."""
    sequences: int = 0
    waited: float = 0.0
    since: float = 0.0
    """Seconds of the run at the last line."""

    @classmethod
    def empty(cls, declared: Declaration, *, since: float = 0.0) -> "MetricsWindow":
        """Return an empty window for an objective."""
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
        """Return the line of metrics over all ranks."""
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
        """Return the window for a checkpoint, with sums and counts over all ranks; the rest is unchanged."""
        return replace(self, sums=over_all_ranks(self.sums, world), counts=over_all_ranks(self.counts, world))
