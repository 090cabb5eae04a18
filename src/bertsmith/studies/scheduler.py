"""The scheduler of cells: one process each, inputs first, several at once if the memory allows it.

A separate process receives signals in its main thread, and its crash ends one cell. Nothing that decides bits
depends on the neighbours: threads and the share of the memory are set before a cell begins.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from bertsmith.core.errors import Diverged, DoesNotFit, UserError, in_file
from bertsmith.core.files import locked
from bertsmith.studies.cells import (
    FAILURE,
    LOCK,
    LOG,
    RUN,
    Cells,
    Failure,
    Outcome,
    Result,
    Stage,
    Work,
)
from bertsmith.training.callbacks import ProgressCallback, SilentCallback, StopRequested
from bertsmith.training.memory_share import MEMORY_SHARE

STOPPED, TOO_LARGE = 75, 76
"""Exit status of a cell that was asked to stop, and of one that did not fit next to others."""
MAX_ENDS = 5
"""Times that a cell's process may end without a result or a failure; then the study skips it."""
HEADROOM = 1.2
"""Factor of a cell's measured peak of memory that must be free for another cell of its shape."""
OF_THE_MACHINE = ("run.device",)
"""Keys that are part of a cell, but about which errors depend on the machine and its state."""
WAIT_SECONDS, GRACE_SECONDS = 0.5, 60.0
"""Seconds between two checks for a stop, and for cells to save before they are killed."""
State = Literal["waiting", "running", "done", "failed"]


class Stopped(Exception):
    """The study was asked to stop, and nothing runs any more; a name says where that was."""


@dataclass(frozen=True, slots=True)
class Places:
    """The devices of a study, and the number of cells that share each."""

    devices: tuple[str, ...] = ("",)
    """Values of CUDA_VISIBLE_DEVICES, one for each place; an empty one is the CPU."""
    together: int = 1
    """Maximum cells at once in one place."""
    threads: int = 1
    """Threads of each cell, which affect its bits."""

    @property
    def most(self) -> int:
        """Return the number of cells that can run at once."""
        return len(self.devices) * self.together


@dataclass
class CellProcess:
    """A cell that is running."""

    stage: Stage
    process: BaseProcess
    pipe: "connection.Connection[Any, Any]"
    device: str
    alone: bool
    """True if other cells may not begin while it runs."""
    log_start: int
    """Size of its log in bytes before it began."""
    fraction: float = 0.0
    talks: bool = True
    """False once its process has closed the pipe."""


@dataclass
class Scheduler:
    """The cells of a study, running and waiting."""

    cells: Cells
    places: Places
    stages: dict[str, Stage]
    """All stages by key, inputs first."""
    callback: ProgressCallback
    on_change: Callable[["Scheduler"], None]
    """Called after each change, to write the progress of the study."""
    keeps_models: bool = False
    """False to remove each model as soon as the study does not need it any more."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: dict[str, CellProcess] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    """Times that the process of a cell was killed or stopped."""
    must_be_alone: set[str] = field(default_factory=set)
    """Keys of cells that ran out of memory next to others."""

    def __post_init__(self) -> None:
        for key, stage in self.stages.items():
            outcome = self.cells.outcome(stage)
            if outcome.is_final:
                self.outcomes[key] = outcome
        self.ranks = _ranks(self.stages)

    def run(self) -> None:
        """Make all cells that are possible; if asked to stop, raise Stopped once all have ended."""
        self._remove_models()
        with StopRequested(self.callback.on_signal) as stop:
            try:
                while self.waiting or self.running:
                    if stop.here:
                        break
                    self._begin_what_fits()
                    self._wait()
            finally:
                self._end_all()
        if stop.here and self.waiting:
            raise Stopped

    @property
    def waiting(self) -> list[Stage]:
        """Return the waiting stages, the most urgent first."""
        left = [key for key in self.stages if key not in self.outcomes and key not in self.running]
        return [self.stages[key] for key in sorted(left, key=lambda key: -self.ranks[key])]

    def state_of(self, stage: Stage) -> State:
        """Return the state of a stage."""
        outcome = self.outcomes.get(stage.key)
        if outcome is None:
            return "running" if stage.key in self.running else "waiting"
        return "failed" if outcome.failure is not None else "done"

    # ---- beginning

    def _begin_what_fits(self) -> None:
        for stage in self.waiting:
            for each in stage.stages_before:
                if self.cells.lacks_model(each):  # of an earlier study, or a concurrent one
                    self.outcomes.pop(each.key, None)
            before = [self.outcomes.get(each.key) for each in stage.stages_before]
            if (failed := next((each for each in before if each and each.failure), None)) is not None:
                self._ended(Outcome(stage, failure=failed.failure))
            elif all(before):
                device = next((each for each in self.places.devices if self._fits(stage, each)), None)
                if device is not None:
                    self._begin(stage, device)

    def _fits(self, stage: Stage, device: str) -> bool:
        """True if the stage may begin on a device now."""
        beside = [each for each in self.running.values() if each.device == device]
        if not beside:
            return True
        if len(beside) >= self.places.together or any(each.alone for each in beside):
            return False
        if stage.key in self.must_be_alone:
            return False
        if not device:
            return True
        known = self._peaks()
        peaks = [known.get(each.shape, (0, 0)) for each in (stage, *(cell.stage for cell in beside))]
        room = min(each[1] for each in peaks)
        return all(peak for peak, _ in peaks) and HEADROOM * sum(peak for peak, _ in peaks) <= room

    def _peaks(self) -> dict[str, tuple[int, int]]:
        """Return the measured peak and room of memory for cells of each shape."""
        results = [(each.stage.shape, each.result) for each in self.outcomes.values() if each.result]
        return {shape: (each.peak_bytes, each.room_bytes) for shape, each in results}

    def _begin(self, stage: Stage, device: str) -> None:
        # On a GPU, the first cell of a shape measures the memory for the others.
        measures = bool(device) and self.places.together > 1 and stage.shape not in self._peaks()
        has_all = stage.key in self.must_be_alone or self.places.together == 1
        threads = self.cells.begin(stage, threads=self.places.threads)
        context = get_context("spawn")
        pipe, theirs = context.Pipe(duplex=False)
        log = self.cells.folder(stage) / LOG
        log.touch()  # a process that dies early does not
        arguments = (stage, self.cells, _inputs(stage, self.cells), theirs, has_all)
        process = context.Process(target=run_cell, args=arguments, name=stage.name)
        settings = {
            "OMP_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": device,
            MEMORY_SHARE: repr(1.0 if has_all else 1 / self.places.together),
        }
        resource_tracker.ensure_running()  # its start would unblock the signals
        # Ctrl-C reaches the whole group of processes: cells ignore it, and the study asks them to stop.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _environment(settings):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        alone, log_start = measures or has_all, log.stat().st_size
        self.running[stage.key] = CellProcess(stage, process, pipe, device, alone, log_start)
        self._tell(stage, "begins")

    # ---- ending

    def _wait(self) -> None:
        """Wait a moment for messages of the running cells."""
        pipes = [each.pipe for each in self.running.values() if each.talks]
        connection.wait([*pipes, *(each.process.sentinel for each in self.running.values())], WAIT_SECONDS)
        for cell in list(self.running.values()):
            before = cell.fraction
            while cell.talks and cell.pipe.poll():
                try:
                    cell.fraction = cell.pipe.recv()
                except EOFError:
                    cell.talks = False
            if cell.process.exitcode is not None:
                self._collect(cell)
            elif cell.fraction != before:
                self.on_change(self)

    def _collect(self, cell: CellProcess) -> None:
        """Handle the end of a process."""
        cell.process.join()
        cell.pipe.close()
        del self.running[cell.stage.key]
        status, stage = cell.process.exitcode or 0, cell.stage
        outcome = self.cells.outcome(stage)
        if status == TOO_LARGE:
            self.must_be_alone.add(stage.key)
        elif status == 0:
            self._ended(outcome)
        elif status == STOPPED or status < 0:  # asked to stop or killed: it continues from its last state
            self.ends[stage.key] = self.ends.get(stage.key, 0) + 1
            if self.ends[stage.key] >= MAX_ENDS:
                how = f"its process was ended {MAX_ENDS} times by a signal"
                self._ended(Outcome(stage, failure=Failure(how, where=stage.name)))
        else:
            how = f"its process failed: {self._last_line(cell)}"
            self._ended(Outcome(stage, failure=Failure(how, where=stage.name)))

    def _last_line(self, cell: CellProcess) -> str:
        """Return the last line in the log of a cell's process."""
        try:
            said = (self.cells.folder(cell.stage) / LOG).read_bytes()[cell.log_start :]
        except FileNotFoundError:
            said = b""
        lines = said.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it did not print anything")

    def _ended(self, outcome: Outcome) -> None:
        self.outcomes[outcome.stage.key] = outcome
        if outcome.result is not None:
            self._tell(outcome.stage, f"is done after {outcome.result.seconds:.0f} s")
            self._remove_models()
        elif outcome.failure is not None:
            self._tell(outcome.stage, f"failed: {outcome.failure.reason}")

    def _remove_models(self) -> None:
        """Keep all models, or remove unneeded ones; a stage that would be tried again needs its inputs."""
        open_stages = [
            stage
            for key, stage in self.stages.items()
            if not (key in self.outcomes and self.outcomes[key].is_final)
        ]
        needed = {each.key for stage in open_stages for each in stage.stages_before}
        for key, outcome in self.outcomes.items():
            if outcome.result is None or self.cells.lacks_model(outcome.stage):
                continue
            if self.keeps_models:
                self.cells.keep_model(outcome.stage)
            elif key not in needed:
                self.cells.remove_model(outcome.stage)

    def _end_all(self) -> None:
        """Ask all running cells to stop, and kill the ones that have not saved in time."""
        for cell in self.running.values():
            cell.process.terminate()
        for cell in list(self.running.values()):
            cell.process.join(GRACE_SECONDS)
            if cell.process.exitcode is None:
                cell.process.kill()  # it continues from its last state
            self._collect(cell)

    def _tell(self, stage: Stage, what: str) -> None:
        self.callback.on_message(f"[{len(self.outcomes)}/{len(self.stages)}] {stage.name} {what}")
        self.on_change(self)


def make_here(stages: Mapping[str, Stage], cells: Cells, callback: ProgressCallback) -> dict[str, Result]:
    """Make stages in this process, each listed after its inputs; return their results by name.

    An error ends it; a wish to stop raises Stopped with the name of the stage at which it was heard.
    """
    results: dict[str, Result] = {}
    with StopRequested(callback.on_signal) as stop:
        for name, stage in stages.items():
            result = cells.outcome(stage).result
            if result is None:
                callback.on_message(name)
                cells.begin(stage, threads=1)
                work = Work(stage, cells.folder(stage) / RUN, _inputs(stage, cells), callback)
                if (result := stage.kind.run(work)) is None:
                    raise Stopped(name)
                cells.end(stage, result)
            results[name] = result
            if stop.here and len(results) < len(stages):
                raise Stopped(name)
    return results


def _inputs(stage: Stage, cells: Cells) -> dict[str, Path]:
    """Return the folders of the inputs of a stage."""
    return {
        name: cells.folder(each) / RUN if isinstance(each, Stage) else each.folder
        for name, each in stage.inputs.items()
    }


def _ranks(stages: dict[str, Stage]) -> dict[str, float]:
    """Return the operations from the beginning of each stage to the end of the longest chain after it."""
    ranks: dict[str, float] = {}
    for stage in reversed(stages.values()):
        key = stage.key
        ranks[key] = stage.kind.work(stage) + ranks.get(key, 0.0)
        for before in stage.stages_before:
            ranks[before.key] = max(ranks.get(before.key, 0.0), ranks[key])
    return ranks


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start inside."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- in the process of a cell


class _CellProgress(SilentCallback):
    """Progress of a cell: messages go to its log, the fraction to the study."""

    def __init__(self, pipe: "connection.Connection[Any, Any]") -> None:
        self._pipe = pipe

    def on_message(self, text: str) -> None:
        """Print a message into the log."""
        print(text, flush=True)

    def on_step(self, progress: float, values: dict[str, Any]) -> None:  # noqa: ARG002 - a log has lines enough
        """Report the progress of the cell to the study."""
        with suppress(OSError):  # its parent has ended, and this process ends after the step
            self._pipe.send(progress)


def run_cell(
    stage: Stage,
    cells: Cells,
    inputs: Mapping[str, Path],
    pipe: "connection.Connection[Any, Any]",
    has_all: bool,
) -> None:
    """Do the work of one cell in this process, and write its result or failure.

    A cell that does not fit has failed only if it has all of the memory.
    """
    threading.Thread(target=_stop_with_the_parent, daemon=True).start()
    folder = cells.folder(stage)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A process that has outlived its study, or one of another study, may hold the lock.
    with locked(folder / LOCK):
        if cells.lacks_model(stage):
            cells.prepare_anew(stage)
        if cells.outcome(stage).is_final:
            return
        (folder / FAILURE).unlink(missing_ok=True)
        try:
            result = stage.kind.run(Work(stage, folder / RUN, inputs, _CellProgress(pipe)))
        except UserError as error:
            if isinstance(error, DoesNotFit) and not has_all:
                sys.exit(TOO_LARGE)
            # A key that is not part of the cell may have another value next time, and a GPU more memory.
            of_cell = error.key in stage.facts["recipe"] and error.key not in OF_THE_MACHINE
            repeats = isinstance(error, Diverged) or (of_cell and not isinstance(error, DoesNotFit))
            cells.end(stage, Failure(error.spelled(in_file).line(), where=stage.name, repeats=repeats))
            return
        if result is None:
            sys.exit(STOPPED)
        cells.end(stage, result)


def _stop_with_the_parent() -> None:
    """Ask this process to stop when its parent ends: a parent that was killed cannot ask it."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
