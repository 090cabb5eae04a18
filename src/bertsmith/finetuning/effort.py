"""How the work of a run is spread over its steps and examinations, so that its end can be told beforehand."""

from dataclasses import dataclass

from bertsmith.finetuning.examining import parts_of_first
from bertsmith.finetuning.loop import steps_of
from bertsmith.finetuning.setup import Run

FORWARD_AND_BACK = 3
"""A token that is learned from costs as much as so many that are only looked at: back takes twice as long."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The work of a run, in tokens that are looked at."""

    steps: int
    one_step: float
    exam_steps: frozenset[int]
    """After which steps the development set is looked at, the end aside."""
    one_exam: int
    end: int
    """All exams after the last step."""

    def left_after(self, step: int) -> float:
        """What is left to do after a step, its own exam included, as a multiple of what was done."""
        exams = sum(number < step for number in self.exam_steps)
        done = step * self.one_step + exams * self.one_exam
        whole = self.steps * self.one_step + len(self.exam_steps) * self.one_exam + self.end
        return (whole - done) / done


def effort_of(run: Run) -> Effort:
    """The work of a run."""
    steps, times = steps_of(run.batches, run.recipe), run.recipe.run.evaluations
    parts = parts_of_first(run.exams)
    tokens = [len(sheet.encoded.tokens_T) for name, sheet in run.exams.items() if name not in parts]
    return Effort(
        steps=steps,
        one_step=FORWARD_AND_BACK * len(run.batches.encoded.tokens_T) / run.batches.steps_per_epoch,
        exam_steps=frozenset(round(steps * number / times) for number in range(1, times)),
        one_exam=tokens[0] if tokens else 0,
        end=sum(tokens),
    )
