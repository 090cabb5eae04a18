"""The pre-training job: from a recipe, a store and a folder to a model, through any interruptions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from bertsmith.corpus.store import TokenStore
from bertsmith.ground.errors import UserError
from bertsmith.pretraining.card import RunFacts
from bertsmith.pretraining.course import Position
from bertsmith.pretraining.evaluation import MEASURES, evaluate, held_out_exam, unigram_entropy
from bertsmith.pretraining.loop import Due, StepReport, Window, training_steps
from bertsmith.pretraining.results import refuse_broken, whole_network, write_results
from bertsmith.pretraining.run_folder import RunFolder, give_up_folder, refuse_other_run
from bertsmith.pretraining.setup import Request, Run, Standing, scalars_of, set_up
from bertsmith.pretraining.speed import flops_per_step, peak_of
from bertsmith.pretraining.start import with_true_model
from bertsmith.recipe.schema import Recipe
from bertsmith.training.checkpoint import TrainingState, latest_state, load_state, prune, save_state
from bertsmith.training.claims import claim
from bertsmith.training.curves import draw_curves
from bertsmith.training.determinism import same_bits
from bertsmith.training.journal import METRICS_FILE, Journal, read_metrics
from bertsmith.training.parallel import World, start_world, stop_world
from bertsmith.training.signals import StopRequested
from bertsmith.training.watch import Watch

EVALUATIONS = 10
"""How often an "auto" run looks at the held-out documents between its two ends."""

SECONDS_BETWEEN_PICTURES = 60.0


@dataclass(frozen=True, slots=True)
class PretrainingResult:
    """How a run ended."""

    folder: Path
    state: Literal["finished", "stopped"]
    steps: int
    tokens: int
    seconds: float
    held_out: dict[str, float]
    saved_step: int
    """Where the same command would go on, or 0."""
    main_process: bool


def pretrain(recipe: Recipe, *, store: Path, out: Path, watch: Watch) -> PretrainingResult:
    """Pre-train as the recipe says; a run found in `out` goes on where it was saved last."""
    world, folder = start_world(recipe.run.device), RunFolder(out)
    try:
        true_recipe, opened = with_true_model(recipe), TokenStore.open(store)
        world.lead(lambda: refuse_other_run(folder, true_recipe, opened))
        if folder.finished:
            return _finished_before(out, world, watch)
        with _alone_in(folder, world):
            return _go_on(Request(recipe, store, out), world, watch)
    finally:
        stop_world(world)


@contextmanager
def _alone_in(folder: RunFolder, world: World) -> Iterator[None]:
    """While it is open, no other run can work in the folder."""
    held = world.lead(partial(claim, folder.path))
    try:
        yield
    finally:
        if held is not None:
            give_up_folder(folder, held)


def _go_on(request: Request, world: World, watch: Watch) -> PretrainingResult:
    with StopRequested(watch.alert if world.main else lambda _: None) as stop:
        run, standing = set_up(request, world, watch)
        with same_bits(run.machine.deterministic), _Records(run, standing) as records:
            state = _train(run, standing, records, stop)
            _finish(run, standing, records, state)
    position = standing.position
    return PretrainingResult(
        folder=request.out,
        state=state,
        steps=position.step,
        tokens=position.tokens,
        seconds=position.seconds,
        held_out=standing.held_out,
        saved_step=standing.saved_step,
        main_process=world.main,
    )


def _finished_before(folder: Path, world: World, watch: Watch) -> PretrainingResult:
    """What a finished run came to; nothing is done."""
    lines = read_metrics(folder)
    newest = {line["kind"]: line for line in lines}
    if not newest.keys() >= {"train", "held-out"}:
        remedy = "restore it from model/, or train anew in another folder"
        raise UserError(
            "is gone or empty, though the run is finished", where=str(folder / METRICS_FILE), remedy=remedy
        )
    last, held_out = newest["train"], newest["held-out"]
    if world.main:
        watch.note(f"{folder} is finished already: nothing is left to do")
    return PretrainingResult(
        folder=folder,
        state="finished",
        steps=last["step"],
        tokens=last["tokens"],
        seconds=last["seconds"],
        held_out={name: held_out[name] for name in MEASURES if name in held_out},
        saved_step=last["step"],
        main_process=world.main,
    )


class _Records:
    """The journal of the main process; the others keep none, but all end where it cannot be written."""

    def __init__(self, run: Run, standing: Standing) -> None:
        self.world = run.world
        step = standing.position.step
        self.journal = self.world.lead(lambda: Journal.open(run.folder.path, resume_step=step))

    def __enter__(self) -> "_Records":
        return self

    def __exit__(self, *_: object) -> None:
        if self.journal is not None:
            self.journal.close()

    def write(
        self, kind: Literal["train", "held-out", "event"], step: int, values: Mapping[str, Any]
    ) -> None:
        """Write a line, in the main process; all call it."""
        journal = self.journal
        self.world.lead(lambda: journal.write(kind, step, values) if journal is not None else None)


def _train(
    run: Run, standing: Standing, records: _Records, stop: StopRequested
) -> Literal["finished", "stopped"]:
    if standing.position.step == 0:
        _look_at_held_out(run, standing, records)
    calendar = _Calendar(run, standing, stop)
    for report in training_steps(run.lesson, standing.position, calendar.due_at):
        standing.position = report.position
        standing.window.add(report)
        if report.outcome.skipped:
            _tell_of_a_skipped_step(run, standing, records, report)
        arrived = run.lesson.course.arrived(report.position)
        if report.position.step % run.recipe.run.log_every_steps == 0 or arrived:
            _write_metrics(run, standing, records, report)
        if report.due.evaluation:
            _look_at_held_out(run, standing, records)
        if report.due.saving:
            _save(run, standing)
        if report.due.stopping:
            return "stopped"
    return "finished"


class _Calendar:
    """Says what is due after a step."""

    def __init__(self, run: Run, standing: Standing, stop: StopRequested) -> None:
        self.run, self.standing, self.stop = run, standing, stop
        self.progress = run.lesson.course.progress(standing.position)

    def due_at(self, position: Position) -> Due:
        """What is due after the step that led here; asked once for each step."""
        before, self.progress = self.progress, self.run.lesson.course.progress(position)
        arrived = self.progress >= 1
        stopping = self.stop.anywhere(self.run.world) and not arrived
        evaluation = _evaluation_due(self.run, position.step, (before, self.progress))
        saving = arrived or stopping or _save_due(self.run, self.standing, position)
        return Due(evaluation, saving, stopping)


def _write_metrics(run: Run, standing: Standing, records: _Records, report: StepReport) -> None:
    values = standing.window.values(run.world, report)
    values |= _speed(run, standing.window, values)
    standing.window = Window(since=report.position.seconds)
    records.write("train", report.position.step, values)
    if run.world.main:
        course, step = run.lesson.course, report.position.step
        left = course.seconds_left(report.position)
        run.watch.step(course.progress(report.position), {"step": step, "eta_seconds": left, **values})


def _speed(run: Run, window: Window, values: Mapping[str, Any]) -> dict[str, float]:
    """The share of the GPU's arithmetic that is used, where its peak is known."""
    peak = peak_of(run.world.device)
    if peak is None or not window.tokens:
        return {}
    size = run.world.size
    work = flops_per_step(
        run.network,
        tokens=window.tokens,
        sequences=window.sequences * size,
        predicted=int(window.masked * size),
    )
    seconds = window.tokens / values["tokens_per_second"]
    return {"mfu": round(work / seconds / (peak * size), 4)}


def _evaluation_due(run: Run, step: int, progress: tuple[float, float]) -> bool:
    every = run.recipe.run.evaluate_every_steps
    if progress[1] >= 1:
        return True
    if every == "auto":
        return int(progress[1] * EVALUATIONS) > int(progress[0] * EVALUATIONS)
    return step % every == 0


def _look_at_held_out(run: Run, standing: Standing, records: _Records) -> None:
    position = standing.position
    if position.stage not in run.exams:
        run.exams[position.stage] = held_out_exam(run.exam_feed, position.stage, run.world)
    standing.held_out = evaluate(run.lesson.learner, run.exams[position.stage])
    numbers = {"stage": position.stage, "tokens": position.tokens, "seconds": round(position.seconds, 3)}
    records.write("held-out", position.step, {**standing.held_out, **numbers})
    if position.step and _picture_due(run, standing):
        _draw(run, standing)


def _draw(run: Run, standing: Standing) -> None:
    entropy = unigram_entropy(run.store.token_counts)
    run.world.lead(lambda: draw_curves(run.folder.path, unigram_entropy=entropy))
    standing.drawn_seconds = standing.position.seconds


def _picture_due(run: Run, standing: Standing) -> bool:
    waited = standing.position.seconds - standing.drawn_seconds
    # The main process's clock decides for all.
    due = waited >= SECONDS_BETWEEN_PICTURES or run.lesson.course.arrived(standing.position)
    return run.world.broadcast(float(due)) > 0


def _save_due(run: Run, standing: Standing, position: Position) -> bool:
    settings = run.recipe.run
    by_clock = position.seconds - standing.saved_seconds >= 60 * settings.save_every_minutes
    # The main process's clock decides for all.
    return (
        position.step % settings.save_every_steps == 0
        or position.step in settings.keep_at
        or run.world.broadcast(float(by_clock)) > 0
    )


def _save(run: Run, standing: Standing) -> None:
    position, learner = standing.position, run.lesson.learner
    # Amid skipped steps the weights may be what is wrong: the state from before them stays the latest.
    if standing.saved_step == position.step or position.skipped_in_a_row:
        return
    state = TrainingState(position.step, position.tokens, position.seconds, scalars_of(run, standing))
    save_state(
        run.folder.checkpoints, state, module=learner.objective, optimizer=learner.optimizer, world=run.world
    )
    standing.saved_step, standing.saved_seconds = position.step, position.seconds
    settings = run.recipe.run
    run.world.lead(
        lambda: prune(run.folder.checkpoints, keep_last=settings.keep_last, keep_at=settings.keep_at)
    )


def _tell_of_a_skipped_step(run: Run, standing: Standing, records: _Records, report: StepReport) -> None:
    """The stated rule: a bad step is left out; after several in a row the last saved weights are taken again.

    The data goes on: the same batches would only lead to the same place.
    """
    step, row = standing.position.step, standing.position.skipped_in_a_row
    records.write("event", step, {"skipped": report.outcome.skipped, "norm": report.outcome.gradient_norm})
    if report.outcome.skipped == "taken back":
        run.say(f"step {step} was taken back with the weights: it had begun already")
        return
    run.say(f"step {step} was skipped: its gradient is {report.outcome.skipped}")
    if row % run.recipe.run.rollback_after == 0:
        _take_saved_weights(run, standing, records)


def _take_saved_weights(run: Run, standing: Standing, records: _Records) -> None:
    step, row = standing.position.step, standing.position.skipped_in_a_row
    saved = latest_state(run.folder.checkpoints, run.world)
    if saved is None or saved.state.step == standing.rolled_back_to:
        what = f"{row} steps in a row had no usable gradient, and there is no other state to go back to"
        raise UserError(what, where=f"step {step}", remedy="lower optim.peak_lr or raise run.spike_factor")
    standing.rolled_back_to = saved.state.step
    learner = run.lesson.learner
    load_state(saved, learner.objective, optimizer=learner.optimizer, world=run.world)
    learner.caution.retakes += 1
    records.write("event", step, {"rolled_back_to": saved.state.step})
    run.say(f"the weights of step {saved.state.step} were taken again; the data goes on")


def _finish(run: Run, standing: Standing, records: _Records, state: str) -> None:
    if state != "finished":
        records.write("event", standing.position.step, {"state": state})
        _draw(run, standing)
        return
    network = whole_network(run.lesson.learner.objective, run.network)
    run.world.lead(lambda: refuse_broken(network, where=str(run.folder.path)))
    records.write("event", standing.position.step, {"state": state})
    results = partial(write_results, run.folder.path, run.recipe, network)
    run.world.lead(lambda: results(run.store.tokenizer(), _facts(run, standing)))


def _facts(run: Run, standing: Standing) -> RunFacts:
    position, device = standing.position, run.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    manifest = run.store.manifest
    return RunFacts(
        steps=position.step,
        tokens=position.tokens,
        seconds=position.seconds,
        skipped=position.skipped,
        device=f"{run.world.size} x {name}",
        corpus={key: getattr(manifest, key) for key in ("documents", "sentences", "tokens")},
        held_out=standing.held_out,
        unigram_entropy=unigram_entropy(run.store.token_counts),
        notes=run.notes,
    )
