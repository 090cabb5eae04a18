"""The fine-tuning job: from a trained encoder and a task's files to a model that does the task."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from bertsmith.finetuning.effort import Effort, effort_of
from bertsmith.finetuning.examining import Examination, examine, tuning_report
from bertsmith.finetuning.folder import (
    Assignment,
    TuningFolder,
    alone_in,
    begin_folder,
    clear_states,
    hashes_of,
    refuse_other_examples,
    refuse_other_run,
)
from bertsmith.finetuning.loop import Due, TuningStep, tuning_steps
from bertsmith.finetuning.material import Material, Sheet, read_material
from bertsmith.finetuning.results import Finished, write_results
from bertsmith.finetuning.setup import Run, set_up
from bertsmith.finetuning.standing import Standing, remember_best, save, take_up
from bertsmith.ground.files import write_json
from bertsmith.tasks.judging import deciding
from bertsmith.training.journal import Journal
from bertsmith.training.signals import StopRequested
from bertsmith.training.watch import Watch

LOGGED_LINES = 200
"""About so many lines of metrics in a run."""


@dataclass(frozen=True, slots=True)
class FinetuningResult:
    """How a run ended."""

    folder: Path
    finished: bool
    measures: dict[str, dict[str, float]]
    """For each split that it was judged on."""
    seconds: float
    steps: int
    examples: int
    """Training examples, each counted once."""


def finetune(assignment: Assignment, watch: Watch) -> FinetuningResult:
    """Fine-tune as the assignment says; a run found in its folder goes on or, if finished, is reported."""
    folder = TuningFolder(assignment.out)
    refuse_other_run(folder, assignment)
    material = read_material(assignment.task, assignment.data, skip_bad=assignment.skip_bad)
    if folder.finished:
        refuse_other_examples(folder, hashes_of(material.splits))
        return _finished_before(folder, watch)
    return finetune_on(material, assignment, watch)


def finetune_on(material: Material, assignment: Assignment, watch: Watch) -> FinetuningResult:
    """Fine-tune on examples that were read before."""
    folder = TuningFolder(assignment.out)
    examples = hashes_of(material.splits)
    with alone_in(folder, assignment), StopRequested(watch.alert) as stop:
        refuse_other_examples(folder, examples)
        if folder.finished:
            return _finished_before(folder, watch)
        standing = Standing()
        _tell(material, watch)
        run = set_up(assignment, material)
        for remark in run.notes:
            watch.note(remark)
        begin_folder(folder, assignment, examples)
        take_up(run, standing)
        if standing.step:
            watch.note(f"goes on from step {standing.step:,}")
        with Journal.open(folder.path, resume_step=standing.step) as journal:
            return _Course(run, effort_of(run), standing, journal, watch).pursue(stop)


def _tell(material: Material, watch: Watch) -> None:
    for name, examples in material.splits.items():
        watch.note(f"{name}: {len(examples):,} examples")
    if material.skipped:
        first = material.skipped[0].where
        watch.note(f"{len(material.skipped):,} bad lines were skipped, the first at {first}")


def _finished_before(folder: TuningFolder, watch: Watch) -> FinetuningResult:
    watch.note(f"{folder.path} is finished already: nothing is left to do")
    clear_states(folder)  # a process may have been killed between its result and this
    return _result_of(folder)


def _result_of(folder: TuningFolder) -> FinetuningResult:
    result = folder.result()
    return FinetuningResult(
        folder.path, True, result["measures"], result["seconds"], result["steps"], result["examples"]
    )


@dataclass(frozen=True, slots=True)
class _Course:
    """A run in progress, and who is told of it."""

    run: Run
    effort: Effort
    standing: Standing
    journal: Journal
    watch: Watch

    def pursue(self, stop: StopRequested) -> FinetuningResult:
        """Take the steps that are left, and write the results if the end was reached."""
        if self._reached_the_end(stop):
            return self._finish()
        run, standing = self.run, self.standing
        return FinetuningResult(run.folder.path, False, {}, standing.seconds, standing.step, run.examples)

    def _reached_the_end(self, stop: StopRequested) -> bool:
        run, standing = self.run, self.standing
        total, exams = self.effort.steps, self.effort.exam_steps
        deciding_exam = dict(islice(run.exams.items(), 1))

        def due_after(number: int) -> Due:
            if number == total:
                return Due()
            stopping = stop.here  # read once: a signal may come at any moment, and a stop must be saved
            return Due(number in exams, saving=stopping or standing.state_is_due, stopping=stopping)

        for step in tuning_steps(
            run.learner, run.batches, run.recipe, first=standing.step, due_after=due_after
        ):
            self._take_note_of(step, total)
            if step.due.exam:
                self._examine(deciding_exam)
            if step.due.saving:
                save(run, standing)
            if step.due.stopping:
                return False
        return True

    def _take_note_of(self, step: TuningStep, total: int) -> None:
        standing = self.standing
        standing.step = step.number
        if step.outcome.skipped:
            self.watch.note(f"step {step.number} was left out: its gradient is {step.outcome.skipped}")
        else:
            standing.loss_sum += float(step.outcome.sums[0])
            standing.loss_count += step.items.count
        if step.number % max(1, total // LOGGED_LINES) == 0 or step.number == total:
            self._log(step, total)

    def _log(self, step: TuningStep, total: int) -> None:
        standing, seconds = self.standing, self.standing.seconds
        values = {
            "loss": standing.loss_sum / max(standing.loss_count, 1e-9),
            "learning_rate": step.learning_rate,
            "gradient_norm": step.outcome.gradient_norm,
            "epoch": step.number / self.run.batches.steps_per_epoch,
            "seconds": round(seconds, 3),
        }
        standing.loss_sum = standing.loss_count = 0.0
        self.journal.write("train", step.number, values)
        left = seconds * self.effort.left_after(step.number)
        self.watch.step(step.number / total, {"step": step.number, "eta_seconds": left, **values})

    def _examine(self, exams: Mapping[str, Sheet]) -> Examination:
        """What the model says now; the weights are remembered if they are the best and are to be kept."""
        run, standing = self.run, self.standing
        found = examine(run.model, exams, scale=run.scale)
        if found.measures:
            self.journal.write("held-out", standing.step, found.deciding)
            if run.recipe.run.keep == "best":
                remember_best(run, standing, deciding(found.note, found.deciding))
        return found

    def _finish(self) -> FinetuningResult:
        run, standing = self.run, self.standing
        found, notes = self._examine(run.exams), run.notes
        if standing.best is not None and standing.best.step != standing.step:
            run.learner.objective.load_state_dict(standing.best.weights)
            found = examine(run.model, run.exams, scale=run.scale)
            notes = (*notes, f"the weights of step {standing.best.step:,} did best and were kept")
        if found.note != run.model.note:
            write_json(run.folder.path / "thresholds.json", tuning_report(run.model, run.exams, found))
        if run.scale is not None:
            run.scale.fold_into(run.model.objective.scorer)
        finished = Finished(
            assignment=run.assignment,
            model=replace(run.model, note=found.note),
            notes=notes,
            exams=run.exams,
            found=found,
            steps=standing.step,
            seconds=standing.seconds,
            examples=run.examples,
        )
        write_results(run.folder, finished)
        clear_states(run.folder)
        return _result_of(run.folder)
