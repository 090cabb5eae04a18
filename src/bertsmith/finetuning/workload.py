"""The work of a fine-tuning run, its steps and evaluations, and how much of it remains."""

from dataclasses import dataclass

from bertsmith.finetuning.evaluation import parts_of_first
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.finetuning.run_warnings import total_steps

FORWARD_AND_BACKWARD = 3
"""Cost of a training token relative to an evaluated one: the backward pass takes twice as long."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a run in evaluated tokens, so that the time of its end can be predicted."""

    steps: int
    one_step: float
    evaluation_steps: frozenset[int]
    """Steps after which the development set is evaluated, except the last step."""
    one_evaluation: int
    end: int
    """Tokens in all evaluations after the last step."""

    def remaining_after(self, step: int) -> float:
        """Return the work that remains after a step, including its evaluation, as a multiple of that done."""
        evaluations = sum(number < step for number in self.evaluation_steps)
        done = step * self.one_step + evaluations * self.one_evaluation
        in_between = len(self.evaluation_steps) * self.one_evaluation
        return (self.steps * self.one_step + in_between + self.end - done) / done


def workload_of(run: Run) -> Workload:
    """Compute the work of a run."""
    steps, times = total_steps(run.batches, run.recipe), run.recipe.run.evaluations
    parts = parts_of_first(run.model.config.kind, run.evaluation_splits)
    tokens = [
        len(split.encoded.tokens_T) for name, split in run.evaluation_splits.items() if name not in parts
    ]
    return Workload(
        steps=steps,
        one_step=FORWARD_AND_BACKWARD * len(run.batches.encoded.tokens_T) / run.batches.steps_per_epoch,
        evaluation_steps=frozenset(round(steps * number / times) for number in range(1, times)),
        one_evaluation=tokens[0] if tokens else 0,
        end=sum(tokens),
    )
