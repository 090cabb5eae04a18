"""The loop of a run, the same for every kind of training; a job file has the additions of its kind.

In this order: the parts that a kind of training provides, from the command to the result, the loop over the
steps, the work after a step, and the end.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from bertsmith.core.errors import Diverged
from bertsmith.core.files import read_json, write_json
from bertsmith.training.background_saving import BackgroundSaving
from bertsmith.training.best_weights import remove_best_weights
from bertsmith.training.budget import Budget
from bertsmith.training.callbacks import ProgressCallback, SilentCallback, StopRequested
from bertsmith.training.checkpoint import SavedState, TrainingState, latest_state, load_checkpoint
from bertsmith.training.distributed import World
from bertsmith.training.early_stopping import NEVER, EndKind, Judge
from bertsmith.training.journal import RunJournal, machine, package_hash
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import (
    Clock,
    Due,
    Progress,
    StepInput,
    StepReport,
    Trainer,
    same_bits,
    skip_message,
    training_steps,
)

NextStep = Callable[[Progress], StepInput | None]
"""Returns the input of the next step, or None after the last one."""
Facts = dict[str, Any]
"""A job's own part of result.json."""


# ---- the parts that a kind of training provides


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run; a run may need several."""

    world: World
    callback: ProgressCallback
    """Callback of the user in the main process, a silent one in the others."""
    clock: Clock
    stop: StopRequested
    saved: SavedState | None
    """State to resume the run from; None if it begins."""

    @property
    def resumes(self) -> bool:
        """True if an earlier start has taken steps that were saved."""
        return self.saved is not None and self.saved.state.step > 0


class Request(Protocol):
    """Request of a job, without tensors."""

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""

    @property
    def keeps_state(self) -> bool:
        """True if the last state stays in the folder of a finished run."""

    def check_same_run(self) -> None:
        """Raise if the folder contains another run, or anything but a run; asked again under the lock."""

    def goes_on(self) -> bool:
        """True if a finished run is to take more steps."""

    def build(self, start: Start) -> "Job":
        """Return the job, new or as saved except for tensors and scalars, without making the folder a run."""


class Remembered(Protocol):
    """A part of a job with values that a resume needs."""

    def scalars(self) -> dict[str, Any]:
        """Return the values as JSON; their files are on the disk. Every process must call it."""

    def restore(self, saved: SavedState) -> None:
        """Restore the values of a saved state."""


class Window(Remembered, Protocol):
    """The sums behind a line of metrics."""

    def add(self, report: StepReport) -> None:
        """Add a step."""

    def line(self, report: StepReport) -> dict[str, Any]:
        """Return a line of metrics, and begin the next one."""


class Evaluation(Remembered, Protocol):
    """The evaluation of a run."""

    due: bool
    """True if the next step must wait for an evaluation: of a new run, or an interrupted one."""

    def is_due_after(self, at: Progress) -> bool:
        """True if an evaluation is due; all processes call it once after each step, with the same result."""

    def evaluate(self, at: Progress, journal: RunJournal, *, last: bool) -> Facts | None:
        """Evaluate and return the values to show the user; None if the user's stop interrupted it.

        The last evaluation comes after all steps; if an earlier start has made it, it is not repeated.
        """


class Results(Protocol):
    """The files that a run leaves."""

    def finish(self, at: Progress, seconds: float, journal: RunJournal, /) -> Facts:
        """Write the model and its descriptions. Every process calls it; the main one's facts count."""

    def stop(self, at: Progress, reason: str, journal: RunJournal, /) -> Facts:
        """Note the progress of a run that the user or, with a reason, the judge has stopped."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Numbers that decide how often a run reports and saves."""

    log_every_steps: int
    save_every_seconds: float
    save_every_steps: float = inf
    keep_last: int = 1
    """Number of saved states to keep."""
    keep_at: tuple[int, ...] = ()
    """Steps with states that are saved and kept."""
    rollback_after: float = inf
    """Number of skipped steps in a row after which the last saved weights are loaded again."""

    def saves_after(self, step: int) -> bool:
        """True for a step after which a state is saved regardless of the clock."""
        return step % self.save_every_steps == 0 or step in self.keep_at


@dataclass(frozen=True, slots=True)
class Job:
    """The parts that differ between the kinds of training."""

    trainer: Trainer
    budget: Budget
    cadence: Cadence
    batches: Callable[[Progress], AbstractContextManager[NextStep]]
    """Opens the data for the steps from this progress on; the weights are in place by then."""
    window: Window
    evaluation: Evaluation
    results: Results
    begin: Callable[[], None]
    """Writes the request into the folder, the config file last; called in the main process."""
    judge: Judge = NEVER
    after_launch: tuple[Callable[[Progress], None], ...] = ()
    """Called after each launched step: on a GPU, their work is queued after the step's."""
    after_saving: tuple[Callable[[], None], ...] = ()
    """Called when a state is on the disk."""
    notes: tuple[str, ...] = ()
    """Messages to the user before the first step of this start."""
    first: Progress = Progress()
    """Progress at which a new run begins."""
    deterministic: bool | None = None
    """True for equal bits in each run; None to leave torch's settings alone."""


# ---- from the command to the result


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one start of a run."""

    kind: EndKind
    result: dict[str, Any]
    """Contents of result.json; of a stopped run, the contents that it would have."""
    saved_step: int
    """Step that the same command would resume from, or 0."""
    main: bool = True
    """True in the process that prints messages."""
    before: bool = False
    """True if the run had finished before this start."""


def run_job(
    request: Request, world: World, callback: ProgressCallback, *, clock: Clock | None = None
) -> Ending:
    """Begin the requested run, resume it, or report that it is finished; every process calls it.

    The clock begins when the folder is locked, unless a clock that began earlier is given.
    """
    heard, folder = callback if world.main else SilentCallback(), request.folder
    if ended := _finished_before(request, world, heard, goes_on=_goes_on(request, world)):
        return ended
    with folder.locked(world), StopRequested(heard.on_signal) as stop:
        goes_on = _goes_on(request, world)  # another process may have ended it just now
        if ended := _finished_before(request, world, heard, goes_on=goes_on):
            return ended
        saved = latest_state(folder.checkpoints, world)
        clock = replace(clock or Clock(), before=saved.state.progress.seconds if saved else 0.0)
        start = Start(world, heard, clock, stop, saved)
        job = request.build(start)
        at = job.first if saved is None else _load(job, saved)
        world.barrier()  # all processes have read the files that the main process now changes
        if not goes_on and (said := world.on_main(folder.put_damaged_model_aside)):
            heard.on_message(said)
        world.on_main(job.begin)
        for note in job.notes:
            heard.on_message(note)
        if start.resumes:
            heard.on_message(f"resumes from step {at.step:,}")
        elif any(folder.checkpoints.glob("step-*.damaged")):
            heard.on_message("all saved states are damaged: the run starts again at step 0")
        bits = nullcontext() if job.deterministic is None else same_bits(job.deterministic)
        with bits, RunJournal(folder.path, world, resume_step=at.step if saved else 0) as journal:
            return _OneStart(request, job, start, journal, at, saved_step=at.step if saved else -1).run()


def _finished_before(
    request: Request, world: World, callback: ProgressCallback, *, goes_on: bool
) -> Ending | None:
    """Return the end of a run that has finished, or None if there is work left."""
    folder = request.folder
    if goes_on or not folder.ended_whole(world):
        return None
    callback.on_message(f"{folder.path} is already finished: there is nothing to do")
    if not request.keeps_state:
        world.on_main(lambda: remove_states(folder))  # a process may have been killed before it could
    result = read_json(folder.result, remedy="remove the folder and run again")
    return Ending(result["ending"], result, saved_step=result["steps"], main=world.main, before=True)


def _goes_on(request: Request, world: World) -> bool:
    """Check the folder; return True, in every process, if a finished run is to take more steps."""
    world.on_main(request.check_same_run)
    return world.broadcast(float(request.goes_on())) > 0


def _load(job: Job, saved: SavedState) -> Progress:
    """Load a saved state into the parts of a job; return its progress."""
    load_checkpoint(saved, job.trainer)
    for part in (job.window, job.evaluation):
        part.restore(saved)
    return saved.state.progress


def remove_states(folder: RunFolder) -> None:
    """Remove the resumable states and best weights of a finished run."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    remove_best_weights(folder.path)


# ---- the loop


@dataclass
class _OneStart:
    """One start of a run, from its first step to its end or to a stop."""

    request: Request
    job: Job
    start: Start
    journal: RunJournal
    at: Progress
    saved_step: int
    """Step of the newest saved state, or -1."""
    rolled_back_to: int = -1
    """Step of the state that was loaded at the last rollback, or -1."""
    reason: str = ""
    """Reason of the judge to end the run early, or ""."""
    shown: dict[str, Any] = field(default_factory=dict)
    """Values that were shown to the user last."""

    def __post_init__(self) -> None:
        cadence, folder = self.job.cadence, self.request.folder.checkpoints
        self.saving = BackgroundSaving(folder, self.job.trainer, cadence.keep_last, cadence.keep_at)
        self.saved_seconds = self.at.seconds

    def run(self) -> Ending:
        """Take the remaining steps and write the results, or stop if the user asks to."""
        with self.saving:
            ended = self._train() and self._evaluate(last=True)
            if self.request.keeps_state if ended else self.at.step > 0:
                self._save()
        return self._finish() if ended else self._stop()

    def _train(self) -> bool:
        """Take steps until the budget is spent; return False if stopped before."""
        job, world = self.job, self.start.world
        if job.evaluation.due and not self._evaluate():
            return False

        def seconds() -> float:
            # Ranks must agree on when a budget in minutes ends.
            return world.broadcast(self.start.clock()) if job.budget.by_clock else self.start.clock()

        with job.batches(self.at) as next_step:
            for report in training_steps(
                job.trainer, next_step, self.at, clock=seconds, due_after=self._due_after
            ):
                self.saving.check()
                self.at = report.progress
                job.window.add(report)
                self.start.callback.on_progress(job.budget.shown(self.at))
                if report.skipped:
                    self._handle_skipped_step(report)
                if self.at.step % job.cadence.log_every_steps == 0 or job.budget.spent(self.at):
                    self._write_line(report)
                if report.due.evaluation and not self._evaluate():
                    return False
                if self.reason and job.judge.ending != "stopped":
                    text = f"step {self.at.step:,}: the run ends early: {self.reason}"
                    self.start.callback.on_message(text)
                    return True
                if report.due.saving:
                    self._save()
                if report.due.stopping:
                    return False
        return True

    def _due_after(self, at: Progress) -> Due:
        """Return the actions due after the step just launched; `run` handles the end of the last one."""
        job, world = self.job, self.start.world
        for follow in job.after_launch:
            follow(at)
        if job.budget.spent(at):
            return Due()
        # Read once: a signal may arrive at any moment, and a run must save before it stops. The judge's
        # reason stops the run after one more step, which may be launched already.
        stopping = world.any(self.start.stop.here or bool(self.reason))
        late = at.seconds - self.saved_seconds >= job.cadence.save_every_seconds
        late = world.broadcast(float(late)) > 0  # the main process's clock decides for all
        saving = stopping or late or job.cadence.saves_after(at.step)
        return Due(job.evaluation.is_due_after(at), saving, stopping)

    # ---- after a step

    def _write_line(self, report: StepReport) -> None:
        """Write a line of metrics, and let the judge decide if the run is worth more steps."""
        job, step = self.job, self.at.step
        values = job.window.line(report)
        self.journal.write("train", step, values)
        self.shown |= {"step": step, "eta_seconds": job.budget.seconds_left(self.at), **values}
        self.start.callback.on_step(job.budget.shown(self.at), dict(self.shown))
        self.reason = job.judge.after_line(self.at, values, self.journal) or self.reason

    def _evaluate(self, *, last: bool = False) -> bool:
        """Evaluate, and ask the judge; return False if the user asked to stop meanwhile."""
        found = self.job.evaluation.evaluate(self.at, self.journal, last=last)
        if found is None:
            return False
        self.shown |= found
        if self.at.step and not last:
            self.reason = self.reason or self.job.judge.after_evaluation() or ""
        return True

    def _save(self) -> None:
        # A run that can roll back keeps the state before its skipped steps as the latest.
        amid_skipped = self.at.skipped_in_a_row and self.job.cadence.rollback_after < inf
        if self.saved_step == self.at.step or amid_skipped:
            return
        self.saving.wait()
        job = self.job
        parts = (job.window, job.evaluation)
        scalars = {name: value for part in parts for name, value in part.scalars().items()}
        state = TrainingState.at(replace(self.at, seconds=self.start.clock()), scalars)
        self.saving.save(state, then=job.after_saving)
        self.saved_step, self.saved_seconds = self.at.step, state.seconds

    def _handle_skipped_step(self, report: StepReport) -> None:
        """Report a skipped step; after several in a row, load the last saved weights."""
        row = self.at.skipped_in_a_row
        self.journal.write("event", self.at.step, {"skipped": report.skipped, "norm": report.gradient_norm})
        self.start.callback.on_message(skip_message(report, self.job.trainer))
        if report.skipped not in ("taken back", "overflow") and row % self.job.cadence.rollback_after == 0:
            self.saving.wait()
            self._roll_back()

    def _roll_back(self) -> None:
        """Load the last saved weights, but continue with new data: the same batches would fail again."""
        step, row, trainer = self.at.step, self.at.skipped_in_a_row, self.job.trainer
        saved = latest_state(self.request.folder.checkpoints, self.start.world)
        if saved is None or saved.state.step == self.rolled_back_to:
            what = f"{row} steps in a row had an unusable gradient, and there is no other state to restore"
            remedy = "lower `optim.peak_lr` or raise `run.spike_factor`"
            raise Diverged(what, where=f"step {step}", remedy=remedy)
        self.rolled_back_to = saved.state.step
        load_checkpoint(saved, trainer)
        trainer.guard.rollbacks += 1  # a pending step used the old weights
        self.journal.write("event", step, {"rolled_back_to": saved.state.step})
        text = f"the weights of step {saved.state.step} were loaded again; the data continue"
        self.start.callback.on_message(text)

    # ---- the end

    def _finish(self) -> Ending:
        """Write the results, the result file last."""
        world, folder, keeps_state = self.start.world, self.request.folder, self.request.keeps_state
        if self.job.judge.ending == "stopped":
            self.reason = ""  # it was found at the last step
        kind: EndKind = self.job.judge.ending if self.reason else "finished"
        seconds = round(self.start.clock(), 3)
        facts = self.job.results.finish(self.at, seconds, self.journal)
        world.on_main(lambda: write_json(folder.result, self._result(kind, seconds, facts)))
        if not keeps_state:
            world.on_main(lambda: remove_states(folder))
        if "step" in self.shown and self.job.budget.shown(self.at) < 1:
            self.start.callback.on_step(1.0, {**self.shown, "eta_seconds": 0.0})
        result = read_json(folder.result, remedy="remove the folder and run again")
        return Ending(kind, result, max(0, self.saved_step), world.main)

    def _stop(self) -> Ending:
        """Note the progress of the run."""
        facts = self.job.results.stop(self.at, self.reason, self.journal)
        result = self._result("stopped", round(self.start.clock(), 3), facts)
        return Ending("stopped", result, max(0, self.saved_step), self.start.world.main)

    def _result(self, kind: EndKind, seconds: float, facts: Facts) -> Facts:
        """Return the contents of result.json."""
        own = {"ending": kind, "reason": self.reason, "steps": self.at.step, "tokens": self.at.tokens}
        return {**own, "seconds": seconds, **facts, "source": package_hash(), "machine": machine()}
