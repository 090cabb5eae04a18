"""The parts of a fine-tuning job: the sums between lines of metrics, its evaluation, and its results."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import isfinite, nan
from typing import Any

import torch

from bertsmith.core.errors import Diverged
from bertsmith.core.files import write_json
from bertsmith.core.wording import counted
from bertsmith.finetuning.assignment import ENDED_AFTER
from bertsmith.finetuning.evaluation import (
    Evaluation,
    baselines,
    below_baseline,
    evaluate,
    tuning_report,
)
from bertsmith.finetuning.finetuned_model import Finished, references_of, write_results
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.training.best_weights import BestWeights
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.checkpoint import SavedState
from bertsmith.training.early_stopping import Patience
from bertsmith.training.job import Facts, Remembered
from bertsmith.training.journal import RunJournal
from bertsmith.training.optimizers import learning_rate, without_short_warmup
from bertsmith.training.trainer import Progress, StepReport


@dataclass
class LossWindow(Remembered):
    """The mean loss since the last line of metrics."""

    run: Run
    loss_sum: float = 0.0
    """Sum of the losses in this process."""
    count: float = 0.0
    """Divisor for the losses of all processes."""

    def add(self, report: StepReport) -> None:
        """Add a step, unless it was skipped."""
        if not report.skipped:
            self.loss_sum += float(report.sums[0])
            self.count += report.step.counts[0]

    def line(self, report: StepReport) -> dict[str, Any]:
        """Return a line of metrics, and begin the next one."""
        values = {
            # NaN if every step was skipped.
            "loss": self.run.world.sum([self.loss_sum])[0] / (self.count or nan),
            "learning_rate": report.step.learning_rate,
            "gradient_norm": report.gradient_norm,
            "epoch": report.progress.step / self.run.batches.steps_per_epoch,
            "seconds": round(report.progress.seconds, 3),
        }
        self.loss_sum = self.count = 0.0
        return values

    def scalars(self) -> dict[str, Any]:
        """Return the sums, so that a resume changes no line."""
        return {"loss": [*self.run.world.sum([self.loss_sum]), self.count]}

    def restore(self, saved: SavedState) -> None:
        """Restore the saved sums; the sum over all processes counts in the main one."""
        loss_sum, self.count = saved.state.scalars["loss"]
        self.loss_sum = loss_sum if self.run.world.main else 0.0


@dataclass
class TaskEvaluation(Remembered):
    """Evaluation on the deciding split, at the end on all splits; the best weights are kept."""

    run: Run
    best: BestWeights | None
    """Best weights so far, if the run keeps them."""
    ends: "Ends"
    found: Evaluation | None = None
    """The last evaluation of all splits, in the main process."""
    evaluated_step: int = -1
    """Step of the last evaluation of the deciding split; -1 before the first."""
    seconds: float = 0.0
    """Seconds of the run at its last evaluation."""

    def __post_init__(self) -> None:
        self.due = self.run.solution is not None and self.run.tunes
        self.ended_after = self.ends.ended_after

    def is_due_after(self, at: Progress) -> bool:
        """True after the steps of the plan; with run.minutes, by the clock."""
        settings = self.run.recipe.run
        if settings.minutes == "off":
            return at.step in self.run.budget.work.evaluation_steps
        due = at.seconds - self.seconds >= 60 * settings.minutes / settings.evaluations
        self.seconds = at.seconds if due else self.seconds
        return due

    def evaluate(self, at: Progress, journal: RunJournal, *, last: bool) -> Facts:
        """Evaluate in the main process, and keep the weights if they are best; return what is shown."""
        run, shown = self.run, {}
        splits = run.evaluation_splits if last else dict(islice(run.evaluation_splits.items(), 1))
        found = run.world.on_main(lambda: evaluate(run.model, splits, scaler=run.scaler))
        # The final evaluation may be of weights that were evaluated before.
        if splits and self.evaluated_step != at.step:
            self.evaluated_step = at.step
            metric = run.model.config.deciding_metric.name
            values = {} if found is None else {**found.deciding, "loss": found.loss}
            journal.write("held-out", at.step, values)
            if found is not None:
                shown = {"development": {metric: found.deciding[metric]}}
                if self.best is not None:
                    self.best.offer(found.deciding[metric], found.loss, step=at.step)
        if self.due and run.solution is not None:  # that was the probe: tuning may fail to improve on it
            run.solution.start_tuning(run.model, run.world)
            self.due = False
        if last:
            self.found, self.ended_after = found, run.recipe.run.epochs
        return shown

    def scalars(self) -> dict[str, Any]:
        """Return the step of the last evaluation, the ends of the run, and its best weights so far."""
        own = {"evaluated_step": self.evaluated_step, ENDED_AFTER: self.ended_after}
        best = {} if self.best is None else self.best.scalars()
        return {**own, "lengthened": self.ends.lengthened, **best}

    def restore(self, saved: SavedState) -> None:
        """Restore the saved values; a lengthened run gets its full patience again."""
        scalars = saved.state.scalars
        self.evaluated_step, self.seconds = scalars["evaluated_step"], saved.state.progress.seconds
        if self.best is not None:
            self.best.restore(saved)
            if scalars[ENDED_AFTER] != self.ended_after:
                self.best.wait_anew()


@dataclass
class TaskResults:
    """The model of a run and the files that describe it."""

    run: Run
    evaluation: TaskEvaluation
    judge: Patience
    callback: ProgressCallback

    def stop(self, *_: object) -> Facts:
        """Return the number of training examples."""
        return {"examples": self.run.examples}

    def finish(self, at: Progress, seconds: float, *_: object) -> Facts:
        """Write the results in the main process: of the best weights if they are kept, else of the last."""
        return self.run.world.on_main(lambda: self._write(at, seconds)) or {}

    def _write(self, at: Progress, seconds: float) -> Facts:
        run, found, best = self.run, self.evaluation.found, self.evaluation.best
        assert found is not None, "the main process has evaluated"
        steps, best_step = run.budget.steps, -1
        notes = (*run.notes, *self.evaluation.ends.notes(run))
        if at.step < steps and run.budget.spent(at):
            ended = f"run.minutes ended the run after step {at.step:,} of {steps:,}"
            self.callback.on_message(ended)
            notes = (*notes, ended)
        if best is not None and best.best is not None:
            best_step = best.best.step
            if best_step != at.step:
                run.model.objective.load_state_dict(best.best.weights)
                found = evaluate(run.model, run.evaluation_splits, scaler=run.scaler)
                notes = (*notes, f"the weights of step {best_step:,} did best and were kept")
        check_learned(run, at, found)
        if found.config.answers.null_threshold != run.model.config.answers.null_threshold:
            report = tuning_report(run.model, run.evaluation_splits, found)
            write_json(run.folder.path / "thresholds.json", report)
        if run.scaler is not None:
            run.scaler.fold_into(run.model.scorer)
        constant = baselines(found.config, run.evaluation_splits)
        references, more_notes = references_of(run, found, best_step=best_step)
        for note in more_notes:
            self.callback.on_message(note)
        notes = (*notes, *more_notes)
        metric = found.config.deciding_metric
        for name, metrics in found.metrics.items():
            notes = (*notes, *below_baseline(metric, metrics, constant.get(name, {}), split=name))
        model = replace(run.model, config=found.config)
        finished = Finished(run, model, notes, found, at.step, seconds, constant, references)
        facts = write_results(run.folder, finished)
        early_end = self.judge.early_end
        return {**facts, "early_end": None if early_end is None else asdict(early_end)}


def check_learned(run: Run, at: Progress, found: Evaluation) -> None:
    """Raise, before a model is written, if every step was skipped or the loss or a weight is not finite."""
    what, weights = "", run.model.objective.state_dict().values()
    if at.step and at.skipped == at.step:
        what = f"each of the {at.step:,} steps was skipped: no gradient was a number"
    elif not (isfinite(found.loss) and all(bool(torch.isfinite(each).all()) for each in weights)):
        what = "the run diverged: its loss or its weights are not numbers"
    if what:
        remedy = (
            "no model is written; lower `optim.peak_lr`, set `run.precision=fp32`, or look for odd numbers"
        )
        raise Diverged(what, where=str(run.folder.path), remedy=remedy)


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of a run: one, unless it was lengthened."""

    ended_after: float | None = None
    """Epochs of the run if it has taken its last step, else None."""
    lengthened: tuple[tuple[float, int], ...] = ()
    """Epochs and last step of each end after which the run was lengthened."""

    @classmethod
    def of(cls, saved: SavedState | None, epochs: float) -> "Ends":
        """Return the ends of a saved run that is to have this many epochs."""
        if saved is None:
            return cls()
        ended, before = (saved.state.scalars[key] for key in (ENDED_AFTER, "lengthened"))
        lengthened = tuple((epochs, step) for epochs, step in before)
        if ended is None or ended == epochs:
            return cls(ended, lengthened)
        return cls(None, (*lengthened, (ended, saved.state.step)))

    def notes(self, run: Run) -> Iterator[str]:
        """Yield a note for each time the run was lengthened; the last one gives the new learning rates."""
        steps = run.budget.steps
        schedule = without_short_warmup(run.recipe.optim, steps=steps)
        for epochs, end in self.lengthened[:-1]:
            yield f"the run was lengthened after {counted(epochs, 'epoch')} ({counted(end, 'step')})"
        for epochs, end in self.lengthened[-1:]:
            first, last = (learning_rate(step / steps, schedule) for step in (end, steps - 1))
            longer = f"{counted(run.recipe.run.epochs, 'epoch')} ({steps:,} steps)"
            yield (
                f"the run of {counted(epochs, 'epoch')}, which ended after step {end:,}, is lengthened to "
                f"{longer}: the learning rate continues as in a run of the new length "
                f"({run.recipe.optim.schedule}), from {first:.3g} to {last:.3g}"
            )
