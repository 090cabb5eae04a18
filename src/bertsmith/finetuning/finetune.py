"""The fine-tuning job: from a trained encoder and a task's files to a model for the task.

Read from top to bottom: the assignment, the loop over the steps of a run (set up in `finetuning_setup`),
the work after a step (metrics, evaluation, checkpoints), and the finished model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from math import inf, isfinite, nan
from pathlib import Path

import torch

from bertsmith.core.errors import Diverged, UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.core.wording import counted
from bertsmith.finetuning.assignment import (
    RESULT,
    Assignment,
    check_same_examples,
    check_same_run,
    finetuning_folder,
    hashes_of,
    lengthens_a_run,
    with_begun_micro_tokens,
    write_assignment,
)
from bertsmith.finetuning.evaluation import (
    Evaluation,
    baselines,
    below_baseline,
    evaluate,
    tuning_report,
)
from bertsmith.finetuning.finetuned_model import Finished, references_of, write_results
from bertsmith.finetuning.finetuning_setup import Run, set_up
from bertsmith.finetuning.finetuning_state import (
    EarlyEnd,
    RunState,
    remember_best,
    remove_states,
    restore,
    save,
)
from bertsmith.finetuning.run_warnings import total_steps
from bertsmith.finetuning.splits import EncodedSplit, TaskSplits, check_new_labels, read_splits
from bertsmith.finetuning.workload import Workload, workload_of
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches
from bertsmith.tasks.kinds.registry import metric_named
from bertsmith.tasks.metrics import ClassScores, Metric
from bertsmith.training.callbacks import ProgressCallback, SilentCallback, StopRequested
from bertsmith.training.distributed import ALONE, World, in_world
from bertsmith.training.journal import RunJournal, read_metrics
from bertsmith.training.optimizers import (
    learning_rate,
    without_short_warmup,
)
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import (
    Cadence,
    Clock,
    Progress,
    StepInput,
    StepReport,
    skip_message,
    training_steps,
)

LOGGED_LINES = 200
"""Approximate number of lines of metrics in a run."""
MAX_STEPS_BETWEEN_LINES = 10
"""Applies to runs with run.minutes, whose number of steps is not known in advance."""
SECONDS_BETWEEN_STATES = 300.0


# ---- from the command to the result


StoppingRule = Callable[[Sequence[float]], EarlyEnd | None]
"""Maps the values of the deciding metric so far to the early end of the run, or None if it continues."""
Preparation = Callable[[Run, RunState], None]
"""A study's hook, called with the weights in place before the first step of a run or before it resumes. It
may watch the optimiser, and may let a new run begin at a later step of its schedule."""


@dataclass(frozen=True, slots=True)
class StudyRules:
    """Hooks of a study in the runs that belong to it."""

    stopping: StoppingRule | None = None
    preparation: Preparation | None = None


NO_STUDY = StudyRules()


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
    """Precision, recall and F1 of each class on each split; empty if the task has no classes."""
    early_end: EarlyEnd | None = None
    """Early end of a trial that the stopping rule ended, else None."""
    layer_weights: dict[str, float] = field(default_factory=dict)
    """Learned weights of a weighted sum of frozen layers: the fraction of each, and the scale of all."""
    main_process: bool = True
    """True if this process is the one that prints messages."""

    @property
    def deciding(self) -> tuple[Metric, float] | None:
        """Return the deciding metric and its value on the deciding split, or None without such a split."""
        for metrics in self.metrics.values():
            name = next(iter(metrics))  # a kind evaluates the deciding one first
            return metric_named(name), metrics[name]
        return None


def finetune(
    assignment: Assignment,
    callback: ProgressCallback,
    *,
    stopping: StoppingRule | None = None,
    preparation: Preparation | None = None,
) -> FinetuningResult:
    """Fine-tune as the assignment says; resume an unfinished run in its folder, or report a finished one.

    With more epochs than before, a finished run continues. A stopping rule may end a run of one process.
    """

    def in_processes(world: World) -> FinetuningResult:
        world.on_main(lambda: check_same_run(assignment))
        begun = with_begun_micro_tokens(assignment)
        splits = world.main_first(lambda: read_splits(begun.task, begun.data, skip_bad=begun.skip_bad))
        if not finetuning_folder(begun.out).begun:
            world.on_main(lambda: check_new_labels(splits))
        splits = splits.limited(begun.recipe.run.limit)
        heard = callback if world.main else SilentCallback()
        return finetune_on(splits, begun, world, heard, study=StudyRules(stopping, preparation))

    settings = assignment.recipe.run
    return in_world(settings.device, in_processes, settings.patience_seconds)


def finetune_on(
    splits: TaskSplits,
    assignment: Assignment,
    world: World,
    callback: ProgressCallback,
    *,
    study: StudyRules = NO_STUDY,
) -> FinetuningResult:
    """Fine-tune on examples that have been read already; every process must call it."""
    folder, hashes = finetuning_folder(assignment.out), hashes_of(splits.splits)
    world.on_main(lambda: check_same_run(assignment))
    if not lengthens_a_run(assignment) and folder.ended_whole(world):
        world.on_main(lambda: check_same_examples(folder, hashes))
        return _finished_before(assignment, world, callback)
    with folder.locked(world), StopRequested(callback.on_signal) as stop:
        world.on_main(lambda: check_same_examples(folder, hashes))
        lengthens = lengthens_a_run(assignment)
        # Another process may have ended it just now.
        if not lengthens and folder.ended_whole(world):
            return _finished_before(assignment, world, callback)
        clock = Clock()  # loading and encoding count as time spent
        _report_splits(splits, callback)
        # Checked again here: another process may have begun the run just now.
        run = set_up(with_begun_micro_tokens(assignment), splits, world)
        if study.preparation is not None:
            # A CUDA graph would not contain the study's work after each step.
            run = replace(run, trainer=replace(run.trainer, graphs=None))
        state = restore(run)
        resumes = state.progress.step > 0
        if study.preparation is not None:
            study.preparation(run, state)
        world.barrier()  # all processes have read the files that the main process now changes
        if not lengthens and (said := world.on_main(folder.put_damaged_model_aside)):
            callback.on_message(said)
        world.on_main(lambda: _begin(run, state, hashes, lengthens=lengthens))
        # Notes on the start of a run are outdated when it resumes: its head has learned since.
        for note in run.notes if not resumes else lengthening_notes(run, state):
            callback.on_message(note)
        if resumes:
            callback.on_message(f"resumes from step {state.progress.step:,}")
            clock = replace(clock, before=state.progress.seconds)
        with RunJournal(folder.path, world, resume_step=state.progress.step) as journal:
            loop = _TrainingLoop(run, state, journal, callback, clock, study.stopping)
            # The state of the end exists if a process was killed after the last step.
            if state.ended_after is None and run.tunes and not loop.train(stop):
                return FinetuningResult(
                    folder.path,
                    finished=False,
                    metrics={},
                    seconds=clock(),
                    steps=state.progress.step,
                    examples=run.examples,
                    main_process=world.main,
                )
            loop.finish()
    return _result_of(folder, world)


def _begin(run: Run, state: RunState, hashes: Mapping[str, str], *, lengthens: bool) -> None:
    """Write the assignment; raise if a run cannot be lengthened because its last state is damaged."""
    folder = run.folder
    if lengthens and not state.lengthened:
        remedy = f"train its model further: --model {folder.path} --out NEW --epochs MORE"
        raise UserError("its last state is damaged", where=str(folder.checkpoints), remedy=remedy)
    # A lengthened run is not finished; its model is kept until one that was trained longer replaces it.
    (folder.path / RESULT).unlink(missing_ok=True)
    write_assignment(folder, run.assignment, hashes)


def _report_splits(splits: TaskSplits, callback: ProgressCallback) -> None:
    for name, examples in splits.splits.items():
        callback.on_message(f"{name}: {counted(len(examples), 'example')}")
    if splits.skipped:
        first = splits.skipped[0].where
        callback.on_message(f"skipped {counted(len(splits.skipped), 'bad line')}, the first at {first}")


def _finished_before(assignment: Assignment, world: World, callback: ProgressCallback) -> FinetuningResult:
    folder = finetuning_folder(assignment.out)
    callback.on_message(f"{folder.path} is finished already: nothing is left to do")
    if world.main and not assignment.recipe.run.keep_state:
        remove_states(folder)  # a process may have been killed between its result and this
    return _result_of(folder, world)


def _result_of(folder: RunFolder, world: World) -> FinetuningResult:
    result = read_json(folder.path / RESULT, remedy="remove the folder and run again")
    classes = {
        split: {label: ClassScores(**scores) for label, scores in of_split.items()}
        for split, of_split in result.get("classes", {}).items()
    }
    return FinetuningResult(
        folder.path,
        finished=True,
        metrics=result["measures"],
        seconds=result["seconds"],
        steps=result["steps"],
        examples=result["examples"],
        baselines=result.get("baselines", {}),
        references=result.get("references", {}),
        classes=classes,
        early_end=EarlyEnd(**result["early_end"]) if result.get("early_end") else None,
        layer_weights=result.get("layer_weights", {}),
        main_process=world.main,
    )


# ---- the loop


@dataclass(frozen=True, slots=True)
class _TrainingLoop:
    """One start of a run: its state, and the journal and callback that report on it."""

    run: Run
    state: RunState
    journal: RunJournal
    callback: ProgressCallback
    clock: Clock
    stopping: StoppingRule | None = None

    def train(self, stop: StopRequested) -> bool:
        """Take the remaining steps; return False if stopped by a signal before the last one."""
        run, state = self.run, self.state
        workload = workload_of(run)
        log_every = max(1, workload.steps // LOGGED_LINES)
        if run.recipe.run.minutes != "off":
            log_every = min(log_every, MAX_STEPS_BETWEEN_LINES)
        deciding_split = dict(islice(run.evaluation_splits.items(), 1))
        if run.solution is not None:
            self._evaluate(deciding_split)  # the probe: tuning may fail to improve on it
            run.solution.start_tuning(run.model, run.world)
        cadence = Cadence(
            stop,
            run.world,
            # Nothing is due at the end: `finish` evaluates all splits and writes the model.
            ends=lambda progress: self._done(progress) >= 1,
            evaluates=self._evaluates(workload),
            save_every_seconds=SECONDS_BETWEEN_STATES,
            saved_seconds=self.clock.before,
        )
        steps = training_steps(
            run.trainer,
            partial(next_step, run.batches, run.recipe, world=run.world),
            state.progress,
            clock=self.clock,
            due_after=cadence.due_after,
        )
        for report in steps:
            state.progress = report.progress
            if report.skipped:
                self.callback.on_message(skip_message(report, run.trainer))
            else:
                state.loss_sum += float(report.sums[0])
                state.loss_count += report.step.counts[0]
            if state.progress.step % log_every == 0 or self._done(state.progress) >= 1:
                self._log(report, workload)
            if report.due.evaluation:
                self._evaluate(deciding_split)
                if reason := self._reason_to_end_early():
                    self.callback.on_message(
                        f"step {state.progress.step:,}: the run ends early, since {reason}"
                    )
                    return True
            if report.due.saving:
                save(run, state, seconds=self.clock())
                cadence.saved_seconds = self.clock()
            if report.due.stopping:
                return False
        return True

    def _done(self, progress: Progress) -> float:
        """Return the fraction of the run that is done, from 0 to 1."""
        recipe, steps = self.run.recipe, total_steps(self.run.batches, self.run.recipe)
        return fraction_done(progress, recipe, steps=steps, world=self.run.world)

    def _evaluates(self, workload: Workload) -> Callable[[Progress], bool]:
        """Return a function that is true if an evaluation is due; run.minutes makes it go by the clock."""
        settings, world = self.run.recipe.run, self.run.world
        if settings.minutes == "off":
            return lambda progress: progress.step in workload.evaluation_steps
        seconds = 60 * settings.minutes / settings.evaluations
        before = [self.state.progress.seconds]

        def is_due(progress: Progress) -> bool:
            late = world.broadcast(float(progress.seconds - before[-1] >= seconds)) > 0
            if late:
                before.append(progress.seconds)
            return late

        return is_due

    def _reason_to_end_early(self) -> str:
        """Return the reason to end the run after an evaluation, or "" to continue."""
        run, best, patience = self.run, self.state.best, self.run.recipe.run.patience
        # Only the main process has the best weights.
        if run.world.broadcast(float(best is not None and best.has_run_out(patience))) > 0:
            return "no evaluation has been better for run.patience of them"
        metric = run.model.config.deciding_metric
        end = None if self.stopping is None else self.stopping(evaluated_values(run.folder.path, metric))
        self.state.early_end = end
        if end is None:
            return ""
        return (
            f"its best {metric.name.replace('_', ' ')} in {end.evaluation} of {run.recipe.run.evaluations} "
            f"evaluations is {metric.text(end.best)}, and the median of others {metric.text(end.median)}"
        )

    def _log(self, report: StepReport, workload: Workload) -> None:
        """Write a line of metrics and reset the sums."""
        state, step, seconds = self.state, report.progress.step, report.progress.seconds
        values = {
            # NaN if every step was skipped.
            "loss": self.run.world.sum([state.loss_sum])[0] / (state.loss_count or nan),
            "learning_rate": report.step.learning_rate,
            "gradient_norm": report.gradient_norm,
            "epoch": step / self.run.batches.steps_per_epoch,
            "seconds": round(seconds, 3),
        }
        state.loss_sum = state.loss_count = 0.0
        self.journal.write("train", step, values)
        # The evaluations after the last step are part of the work: 100 % means that nothing remains.
        remaining = workload.remaining_after(step)
        if self.run.recipe.run.minutes != "off":
            by_clock = max(0.0, 60 * self.run.recipe.run.minutes / seconds - 1)
            remaining = min(remaining, by_clock + workload.end / (step * workload.one_step))
        state.shown |= {"step": step, "eta_seconds": seconds * remaining, **values}
        self.callback.on_step(1 / (1 + remaining), dict(state.shown))

    def _evaluate(self, splits: Mapping[str, EncodedSplit]) -> Evaluation | None:
        """Evaluate in the main process, which keeps the weights if they are best; others get None."""
        run, state = self.run, self.state
        found = run.world.on_main(lambda: evaluate(run.model, splits, scaler=run.scaler))
        # The final evaluation may be of weights that were evaluated before.
        if splits and state.evaluated_step != state.progress.step:
            state.evaluated_step = state.progress.step
            metric = run.model.config.deciding_metric.name
            if found is not None:
                state.shown["development"] = {metric: found.deciding[metric]}
            values = {} if found is None else {**found.deciding, "loss": found.loss}
            self.journal.write("held-out", state.progress.step, values)
            if found is not None and run.recipe.run.keep == "best":
                remember_best(run, state, found)
        return found

    def finish(self) -> None:
        """Evaluate on all splits, keep the state of the end, and let the main process write the results."""
        run, state = self.run, self.state
        found = self._evaluate(run.evaluation_splits)
        if run.recipe.run.keep_state:  # now, because the weights may be replaced by the best ones below
            state.ended_after = run.recipe.run.epochs
            save(run, state, seconds=self.clock())
        run.world.on_main(lambda: self._write_results(found))
        if "step" in state.shown:  # this start took steps and reported them
            self.callback.on_step(1.0, {**state.shown, "eta_seconds": 0.0})

    def _write_results(self, found: Evaluation | None) -> None:
        """Write the results: of the best weights if these are kept, else of the last."""
        run, state = self.run, self.state
        assert found is not None, "the main process has evaluated"
        notes = (*run.notes, *lengthening_notes(run, state))
        steps = total_steps(run.batches, run.recipe)
        if state.progress.step < steps <= fraction_done(state.progress, run.recipe, steps=steps) * steps:
            ended = f"run.minutes ended the run after step {state.progress.step:,} of {steps:,}"
            self.callback.on_message(ended)
            notes = (*notes, ended)
        if state.best is not None and state.best.step != state.progress.step:
            run.model.objective.load_state_dict(state.best.weights)
            found = evaluate(run.model, run.evaluation_splits, scaler=run.scaler)
            notes = (*notes, f"the weights of step {state.best.step:,} did best and were kept")
        check_learned(run, state, found)
        if found.config.answers.null_threshold != run.model.config.answers.null_threshold:
            report = tuning_report(run.model, run.evaluation_splits, found)
            write_json(run.folder.path / "thresholds.json", report)
        if run.scaler is not None:
            run.scaler.fold_into(run.model.objective.scorer)
        constant = baselines(found.config, run.evaluation_splits)
        references, more_notes = references_of(run, found, best_step=state.best.step if state.best else -1)
        for note in more_notes:
            self.callback.on_message(note)
        notes = (*notes, *more_notes)
        metric = found.config.deciding_metric
        for name, metrics in found.metrics.items():
            notes = (*notes, *below_baseline(metric, metrics, constant.get(name, {}), split=name))
        finished = Finished(
            assignment=run.assignment,
            model=replace(run.model, config=found.config),
            notes=notes,
            splits=run.evaluation_splits,
            found=found,
            steps=state.progress.step,
            epochs=min(run.recipe.run.epochs, round(state.progress.step / run.batches.steps_per_epoch, 2)),
            seconds=self.clock(),
            examples=run.examples,
            baselines=constant,
            references=references,
            early_end=None if state.early_end is None else asdict(state.early_end),
        )
        write_results(run.folder, finished)
        if not run.recipe.run.keep_state:
            remove_states(run.folder)


def check_learned(run: Run, state: RunState, found: Evaluation) -> None:
    """Raise, before a model is written, if every step was skipped or the loss or a weight is not finite."""
    steps, what = state.progress.step, ""
    weights = run.model.objective.state_dict().values()
    if steps and state.progress.skipped == steps:
        what = f"each of the {steps:,} steps was skipped: no gradient was a number"
    elif not (isfinite(found.loss) and all(bool(torch.isfinite(each).all()) for each in weights)):
        what = "the run diverged: its loss or its weights are no numbers any more"
    if what:
        remedy = "no model is written; lower optim.peak_lr, take run.precision=fp32, or look for odd numbers"
        raise Diverged(what, where=str(run.folder.path), remedy=remedy)


def evaluated_values(folder: Path, metric: Metric) -> list[float]:
    """Return the deciding metric at each evaluation after a step; NaN counts as the worst value."""
    worst = -inf if metric.larger_is_better else inf
    lines = [line for line in read_metrics(folder) if line["kind"] == "held-out" and line["step"]]
    return [worst if line[metric.name] is None else line[metric.name] for line in lines]


def next_step(
    batches: ShuffledBatches, recipe: FinetuningRecipe, progress: Progress, *, world: World = ALONE
) -> StepInput | None:
    """Return the input of the next step, or None after the last.

    Its examples are a pure function of seed, step and rank; with run.minutes its rate depends on the clock.
    """
    steps = total_steps(batches, recipe)
    done = fraction_done(progress, recipe, steps=steps, world=world)
    if done >= 1:
        return None
    items = batches.step(progress.step)
    (count,) = world.sum([items.count])
    rate = learning_rate(done, without_short_warmup(recipe.optim, steps=steps))
    return StepInput(items.micros, (count,), rate, progress)


def fraction_done(progress: Progress, recipe: FinetuningRecipe, *, steps: int, world: World = ALONE) -> float:
    """Return the fraction of a run that is done, by its steps or by run.minutes, whichever is further."""
    by_steps = progress.step / steps
    if recipe.run.minutes == "off":
        return by_steps
    # The schedule begins after the setup and the first step, which may compile.
    end, first = 60 * recipe.run.minutes, progress.first_step_seconds
    by_clock = (progress.seconds - first) / (end - first) if first < end else 1.0
    done = max(by_steps, by_clock if progress.step else 0.0)
    return world.broadcast(done)  # all ranks use the clock of the main process


def rate_of_step(step: int, recipe: FinetuningRecipe, *, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of this many steps."""
    return learning_rate(step / steps, without_short_warmup(recipe.optim, steps=steps))


def lengthening_notes(run: Run, state: RunState) -> Iterator[str]:
    """Yield a note for each time the run was lengthened; the last one gives the new learning rates."""
    steps = total_steps(run.batches, run.recipe)
    for epochs, end in state.lengthened[:-1]:
        yield f"the run was lengthened after {counted(epochs, 'epoch')} ({counted(end, 'step')})"
    for epochs, end in state.lengthened[-1:]:
        first, last = (rate_of_step(step, run.recipe, steps=steps) for step in (end, steps - 1))
        yield (
            f"the run of {counted(epochs, 'epoch')}, which ended after step {end:,}, is lengthened to "
            f"{counted(run.recipe.run.epochs, 'epoch')} ({steps:,} steps): the learning rate continues as "
            f"that of a run of the new length ({run.recipe.optim.schedule}), from {first:.3g} to {last:.3g}"
        )
