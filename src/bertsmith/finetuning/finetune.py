"""The fine-tuning job: from a trained encoder and a task's files to a model for the task.

`training/job.py` runs the loop. This file has, in this order, the additions of fine-tuning: the command and
its result, the request that builds a job (set up in `finetuning_setup`, with the parts in `tuning_parts`),
and the input of a step.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted
from bertsmith.finetuning.assignment import (
    EXAMPLES,
    Assignment,
    check_same_run,
    finetuning_folder,
    hashes_of,
    lengthens_a_run,
    with_begun_micro_tokens,
    write_assignment,
)
from bertsmith.finetuning.finetuning_setup import Run, set_up
from bertsmith.finetuning.sparse_training import SparseTraining, rewinding_step
from bertsmith.finetuning.splits import TaskSplits, check_new_labels, read_splits
from bertsmith.finetuning.tuning_parts import Ends, LossWindow, TaskEvaluation, TaskResults
from bertsmith.recipe.finetuning_schema import FinetuningRecipe, SparseSection
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.tasks.metrics import ClassScores, Metric
from bertsmith.training.best_weights import BestWeights
from bertsmith.training.budget import Epochs
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.distributed import ALONE, World, in_world
from bertsmith.training.early_stopping import EarlyEnd, Patience, StoppingRule
from bertsmith.training.job import (
    Cadence,
    Ending,
    Job,
    NextStep,
    Start,
    run_job,
)
from bertsmith.training.optimizers import learning_rate, without_short_warmup
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import Progress, StepInput

LOGGED_LINES = 200
"""Approximate number of lines of metrics in a run."""
MAX_STEPS_BETWEEN_LINES = 10
"""Maximum steps between lines in runs with run.minutes: their number of steps is not known in advance."""
SECONDS_BETWEEN_STATES = 300.0


# ---- from the command to the result


@dataclass(frozen=True, slots=True)
class FinetuningResult:
    """Outcome of one start of a run, whether it finished or was stopped."""

    folder: Path
    finished: bool
    metrics: dict[str, dict[str, float]]
    """Metrics for each split that the model was evaluated on."""
    seconds: float
    steps: int
    examples: int
    """Training examples, each counted once."""
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of the constant answer on each split."""
    references: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Metrics of simpler models by name and split: the linear probe, TF-IDF, a dictionary."""
    classes: dict[str, dict[str, ClassScores]] = field(default_factory=dict)
    """Precision, recall and F1 of each class on each split; empty for tasks without classes."""
    early_end: EarlyEnd | None = None
    """Early end of a trial that the stopping rule ended, else None."""
    layer_weights: dict[str, float] = field(default_factory=dict)
    """Learned weights of a weighted sum of frozen layers: the fraction of each, and the scale of all."""
    main_process: bool = True
    """True in the process that prints messages."""
    failure: str = ""
    """Reason why a run of several has no result, or ""."""

    @property
    def deciding(self) -> tuple[Metric, float] | None:
        """Return the deciding metric and its value on the deciding split, or None without such a split."""
        for metrics in self.metrics.values():
            name = next(iter(metrics))  # a kind evaluates the deciding one first
            return metric_named(name), metrics[name]
        return None


def finetune(
    assignment: Assignment, callback: ProgressCallback, *, stopping: StoppingRule | None = None
) -> FinetuningResult:
    """Fine-tune by an assignment; resume an unfinished run in its folder, or report a finished one.

    With more epochs than before, a finished run continues. A stopping rule may end a run of one process.
    """

    def in_processes(world: World) -> FinetuningResult:
        world.on_main(lambda: check_same_run(assignment))  # before data are read, which may take minutes
        begun = with_begun_micro_tokens(assignment)
        splits = world.main_first(lambda: read_splits(begun.task, begun.data, skip_bad=begun.skip_bad))
        if not finetuning_folder(begun.out).begun:
            world.on_main(lambda: check_new_labels(splits))
        splits = splits.limited(begun.recipe.run.limit)
        request = FinetuningRequest(assignment, splits, stopping)
        return result_of(request.folder.path, run_job(request, world, callback))

    settings = assignment.recipe.run
    return in_world(settings.device, in_processes, settings.patience_seconds)


def result_of(folder: Path, ending: Ending) -> FinetuningResult:
    """Return the result of a start by its ending."""
    found = ending.result
    classes = {
        split: {label: ClassScores(**scores) for label, scores in of_split.items()}
        for split, of_split in found.get("classes", {}).items()
    }
    return FinetuningResult(
        folder,
        finished=ending.kind != "stopped",
        metrics=found.get("metrics", {}),
        seconds=found["seconds"],
        steps=found["steps"],
        examples=found["examples"],
        baselines=found.get("baselines", {}),
        references=found.get("references", {}),
        classes=classes,
        early_end=EarlyEnd(**found["early_end"]) if found.get("early_end") else None,
        layer_weights=found.get("layer_weights", {}),
        main_process=ending.main,
    )


# ---- the request


@dataclass(frozen=True)
class FinetuningRequest:
    """A run that is asked for, with the examples that were read for it."""

    assignment: Assignment
    splits: TaskSplits
    stopping: StoppingRule | None = None

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""
        return finetuning_folder(self.assignment.out)

    @property
    def keeps_state(self) -> bool:
        """True if the last state stays, so that the run can be lengthened."""
        return self.assignment.recipe.run.keep_state

    def check_same_run(self) -> None:
        """Raise if the folder contains another run, one on other examples, or anything but a run."""
        check_same_run(self.assignment)
        self.folder.check_same_run({EXAMPLES: self._hashes})

    def goes_on(self) -> bool:
        """True if a finished run has more epochs now."""
        return lengthens_a_run(self.assignment)

    def build(self, start: Start) -> Job:
        """Return the job, new or to be restored."""
        self._report_splits(start.callback)
        ends = Ends.of(start.saved, self.assignment.recipe.run.epochs)
        # Under the lock, since another process may have begun the run just now.
        assignment = with_begun_micro_tokens(self.assignment)
        start.world.on_main(lambda: self._check_state(ends))
        run = set_up(assignment, self.splits, start.world, resumes=start.saved is not None)
        recipe, settings = run.recipe, run.recipe.run
        budget, metric = run.budget, run.model.config.deciding_metric
        best = BestWeights(run.folder.path, run.model.objective, metric, run.world)
        evaluation = TaskEvaluation(run, best if settings.keep == "best" else None, ends)
        judge = Patience(evaluation.best, settings.patience, metric, run.folder.path, self.stopping)

        sparse = SparseTraining(run) if recipe.sparse != SparseSection() else None

        def batches(at: Progress) -> AbstractContextManager[NextStep]:
            if sparse is not None:
                sparse.begin(at)
            if evaluation.ended_after is not None or not run.tunes:
                return nullcontext(lambda _: None)
            return nullcontext(partial(next_step, run.batches, recipe, budget, world=run.world))

        log_every = max(1, budget.steps // LOGGED_LINES)
        if budget.by_clock:
            log_every = min(log_every, MAX_STEPS_BETWEEN_LINES)
        return Job(
            run.trainer,
            budget,
            Cadence(log_every, SECONDS_BETWEEN_STATES),
            batches,
            LossWindow(run),
            evaluation,
            TaskResults(run, evaluation, judge, start.callback),
            begin=lambda: self._begin(run),
            judge=judge,
            after_launch=() if sparse is None else (sparse.after_launch,),
            after_saving=() if evaluation.best is None else (evaluation.best.saved,),
            # Notes on the start of a run are outdated when it resumes: its head has learned since.
            notes=tuple(ends.notes(run)) if start.resumes else run.notes,
            first=Progress(step=rewinding_step(recipe.sparse.begin_at, budget.steps)),
        )

    def _begin(self, run: Run) -> None:
        """Write the assignment."""
        # A lengthened run is not finished; its model is kept until one that was trained longer replaces it.
        self.folder.result.unlink(missing_ok=True)
        write_assignment(self.folder, run.assignment, self._hashes)

    def _check_state(self, ends: "Ends") -> None:
        """Raise if a run cannot be lengthened because its last state is damaged."""
        if self.goes_on() and not ends.lengthened:
            remedy = f"continue from its model: `model={self.folder.path}` `out=NEW` `run.epochs=MORE`"
            raise UserError("its last state is damaged", where=str(self.folder.checkpoints), remedy=remedy)

    def _report_splits(self, callback: ProgressCallback) -> None:
        for name, examples in self.splits.splits.items():
            callback.on_message(f"{name}: {counted(len(examples), 'example')}")
        if skipped := self.splits.skipped:
            text = f"skipped {counted(len(skipped), 'bad line')}, the first at {skipped[0].where}"
            callback.on_message(text)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return hashes_of(self.splits.splits)


# ---- the input of a step


def next_step(
    batches: ShuffledBatches,
    recipe: FinetuningRecipe,
    budget: Epochs,
    progress: Progress,
    *,
    world: World = ALONE,
) -> StepInput | None:
    """Return the input of the next step, or None after the last.

    Its examples are a pure function of seed, step and rank; with run.minutes its rate depends on the clock.
    """
    done = budget.fraction(progress)
    if done >= 1:
        return None
    items = batches.step(progress.step)
    count, tokens = world.sum([items.count, items.tokens])
    rate = learning_rate(done, without_short_warmup(recipe.optim, steps=budget.steps))
    return StepInput(items.micros, (count,), rate, progress, int(tokens))
