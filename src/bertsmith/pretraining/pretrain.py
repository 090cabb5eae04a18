"""The pre-training job: from a recipe, a store and a folder to a model, across interruptions.

In this order: the command and its result, the loop over the steps of a run, the work after a step (metrics,
checkpoints, rollbacks), and the finished model. `run_setup.py` sets up or resumes a run, and
`run_evaluation.py` evaluates it.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch

from bertsmith.core.errors import Diverged, UserError
from bertsmith.core.files import read_json
from bertsmith.core.measures import Declaration
from bertsmith.core.wording import counted
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.data_loader import reporting_dead_workers
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.hardware import (
    MAX_EVALUATION_FRACTION,
    affordable_evaluations,
    kept_for_each_weight,
    peak_of,
    product_flops,
)
from bertsmith.pretraining.held_out import unigram_entropy
from bertsmith.pretraining.initial_model import with_true_model
from bertsmith.pretraining.learning_watch import WHAT_TO_TRY, constant_prediction
from bertsmith.pretraining.metrics_window import MetricsWindow
from bertsmith.pretraining.pretrained_model import (
    RunFacts,
    check_held_out_is_finite,
    check_weights_are_finite,
    whole_networks,
    write_results,
)
from bertsmith.pretraining.run_evaluation import (
    evaluate_later_stages,
    evaluate_run,
    max_evaluation_seconds,
    plot_curves,
)
from bertsmith.pretraining.run_setup import (
    NEVER_EARLY,
    STORE_FILE,
    EarlyStopping,
    Request,
    Run,
    RunState,
    StepLoader,
    run_folder,
    set_up,
)
from bertsmith.recipe.idle_keys import PRETRAINING_KEYS, free_at_resume
from bertsmith.recipe.load import differences, load_recipe, preset_names
from bertsmith.recipe.schema import Recipe
from bertsmith.training.background_saving import BackgroundSaving
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.checkpoint import TrainingState, latest_state, load_checkpoint
from bertsmith.training.distributed import World, in_world
from bertsmith.training.journal import METRICS_FILE, RunJournal, read_metrics
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import (
    Cadence,
    Clock,
    Due,
    Progress,
    StepReport,
    same_bits,
    skip_message,
    training_steps,
)

EVALUATIONS = 10
"""Maximum number of evaluations during a run if run.evaluate_every_steps is "auto"."""
MIN_USEFUL_STEPS = 100
"""Steps before which a model has hardly learned word frequencies."""
STEPS_TO_LEARN, USUAL_UTILISATION = 1_000, 0.4
"""Steps below which the published recipes learn hardly more than frequencies (bert-tiny after 205: 5 % of
masked words right), and the usual speed of training as a fraction of that of matrix products."""
BYTES_WRITTEN_A_SECOND, SECONDS_FOR_FILES = 2e8, 4.0
"""Bytes per second to an ordinary disk with checksums, and seconds for a small checkpoint, model and
tokenizer."""
FREE_KEYS = free_at_resume(PRETRAINING_KEYS)
"""Keys that may change when a run resumes: beyond rounding, they do not affect the trained model."""
BUDGET_KEYS = {f"run.{key}" for key in ("budget", "steps", "tokens", "minutes")}


# ---- from the command to the result


@dataclass(frozen=True, slots=True)
class PretrainingResult:
    """The end of a run: its state, progress and metrics."""

    folder: Path
    state: Literal["finished", "stopped"]
    steps: int
    tokens: int
    seconds: float
    declared: Declaration = field(repr=False)
    """Declaration of the run's metrics."""
    held_out: dict[str, float]
    unigram_entropy: float
    """Loss of a model that only knows token frequencies."""
    saved_step: int
    """Step from which the same command would resume, or 0."""
    main_process: bool
    held_out_before: dict[str, float] = field(default_factory=dict)
    """Metrics of the initial model on the same sequences; empty for a run from scratch."""
    early_end: str = ""
    """Reason why a stopped run was ended early (`EarlyStopping`)."""


def pretrain(  # noqa: PLR0913 - what a command was told, and when
    recipe: Recipe,
    *,
    store: Path,
    out: Path,
    callback: ProgressCallback,
    early_stopping: EarlyStopping = NEVER_EARLY,
    started: float | None = None,
) -> PretrainingResult:
    """Pre-train by a recipe; a run in `out` resumes from its last checkpoint.

    A budget in minutes includes the set-up: it begins at this call, or at `started` by time.monotonic().
    """
    clock = Clock() if started is None else Clock(started=started)

    def in_processes(world: World) -> PretrainingResult:
        folder, true_recipe, opened = run_folder(out), with_true_model(recipe), TokenStore.open(store)
        world.on_main(lambda: check_same_run(folder, true_recipe, opened))
        if folder.ended_whole(world):
            return _finished_before(folder, opened, world, callback)
        return _run_to_its_end(Request(recipe, store, out, clock, early_stopping), world, callback)

    return in_world(recipe.run.device, in_processes, recipe.run.patience_seconds)


def _run_to_its_end(request: Request, world: World, callback: ProgressCallback) -> PretrainingResult:
    folder, on_signal = run_folder(request.out), callback.on_signal if world.main else lambda _: None
    with folder.locked(world), StopRequested(on_signal) as stop:
        run, state = set_up(request, world, callback)
        if said := world.on_main(folder.put_damaged_model_aside):
            callback.on_message(said)
        if world.main and run.recipe.run.budget == "minutes":
            seconds = 60 * run.recipe.run.minutes
            callback.on_deadline(max(0.0, seconds - run.clock()), seconds)
        with (
            same_bits(run.machine.deterministic),
            RunJournal(folder.path, world, resume_step=state.progress.step) as journal,
            reporting_dead_workers(),
        ):
            state.watch.read(read_metrics(folder.path))
            if not state.progress.step:
                _warn_of_small_budget(run)
            ending = _train(run, state, journal, stop)
            seconds = _finish(run, state, journal, ending)
    progress = state.progress
    return PretrainingResult(
        folder=folder.path,
        state=ending,
        steps=progress.step,
        tokens=progress.tokens,
        seconds=seconds,
        declared=run.objective.declared,
        held_out=state.held_out,
        unigram_entropy=unigram_entropy(run.store.token_counts, run.recipe.masking.smoothing),
        saved_step=state.saved_step,
        main_process=world.main,
        held_out_before=_held_out_before(folder, run.recipe, progress.stage) if world.main else {},
        early_end=state.early_end if ending == "stopped" else "",
    )


def check_same_run(folder: RunFolder, recipe: Recipe, store: TokenStore) -> None:
    """Raise if the folder contains a run with another recipe or store, or anything but a run."""
    folder.check_no_unknown_files()
    if not folder.begun:
        return
    found = differences(load_recipe(folder.config).model_dump(), recipe.model_dump())
    if changed := [each for each in found if each.key not in FREE_KEYS]:
        if folder.finished and {each.key for each in changed} <= BUDGET_KEYS:
            what = f"the run there is finished, and its learning rate has gone to its end: {changed[-1]}"
            remedy = f"train on from its model: {_start_option(recipe)} {folder.model} and a new --out"
            raise UserError(what, where=str(folder.config), remedy=remedy)
        what = f"the run there has another recipe: {'; '.join(map(str, changed))}"
        remedy = "give --out a new folder, or take the change back"
        raise UserError(what, where=str(folder.config), remedy=remedy)
    store_file = folder.path / STORE_FILE
    if read_json(store_file, remedy="start the run anew in another folder").get("hash") != store.hash:
        what = "the run there was started with another store"
        remedy = f"give --store the same folder as before, not {store.folder}"
        raise UserError(what, where=str(store_file), remedy=remedy)


def _finished_before(
    folder: RunFolder, store: TokenStore, world: World, callback: ProgressCallback
) -> PretrainingResult:
    """Return the result of a finished run without further work."""
    newest = {line["kind"]: line for line in read_metrics(folder.path)}
    if not newest.keys() >= {"train", "held-out"}:
        remedy = "restore it from model/, or train anew in another folder"
        where = str(folder.path / METRICS_FILE)
        raise UserError("is gone or empty, though the run is finished", where=where, remedy=remedy)
    last, held_out, recipe = newest["train"], newest["held-out"], load_recipe(folder.config)
    if world.main:
        callback.on_message(f"{folder.path} is finished already: nothing is left to do")
        onward = f"{_start_option(recipe)} {folder.model} and a new --out"
        callback.on_message(f"to train on from its model: {onward}")
    return PretrainingResult(
        folder=folder.path,
        state="finished",
        steps=last["step"],
        tokens=last["tokens"],
        seconds=newest.get("event", last)["seconds"],
        declared=declaration(recipe),
        held_out=_reported(held_out, recipe),
        unigram_entropy=unigram_entropy(store.token_counts, recipe.masking.smoothing),
        saved_step=last["step"],
        main_process=world.main,
        held_out_before=_held_out_before(folder, recipe, held_out.get("stage", 0)),
    )


def _start_option(recipe: Recipe) -> str:
    """Return the option that names the initial model: `distill` has another one."""
    return "--student" if recipe.examples.objective == "distilled" else "--from"


def _held_out_before(folder: RunFolder, recipe: Recipe, stage: int) -> dict[str, float]:
    """Return the initial model's metrics on a stage's sequences, from the journal."""
    if recipe.start.model == "scratch":
        return {}
    lines = [line for line in read_metrics(folder.path) if line["kind"] == "held-out" and not line["step"]]
    before = next((line for line in lines if line.get("stage", 0) == stage), {})
    return _reported(before, recipe)


def _reported(line: Mapping[str, Any], recipe: Recipe) -> dict[str, float]:
    """Return the metrics of a held-out line of the journal."""
    return {name: value for name, value in line.items() if name in declaration(recipe).reported}


# ---- the loop


def _train(
    run: Run, state: RunState, journal: RunJournal, stop: StopRequested
) -> Literal["finished", "stopped"]:
    """Take the remaining steps of the budget, or fewer if the user asks to stop."""
    if state.evaluation_due and not (
        evaluate_later_stages(run, state, journal, stop) and evaluate_run(run, state, journal, stop)
    ):
        return "stopped"
    clock = _start_budget(run, state)
    cadence = _cadence(run, state, stop)
    due_after = _averaging(run, cadence)
    with closing(StepLoader(run)) as next_step, _saving(run) as saving:
        steps = training_steps(run.trainer, next_step, state.progress, clock=clock, due_after=due_after)
        for report in steps:
            saving.check()
            state.progress = report.progress
            state.window.add(report)
            run.show_progress(state.progress)
            _tell_steps_that_fit(run, state.progress)
            if report.skipped:
                _handle_skipped_step(run, state, journal, report, saving)
            if state.progress.step % run.recipe.run.log_every_steps == 0 or run.budget.spent(state.progress):
                _log(run, state, journal, report)
                _watch_learning(run, state, journal)
            broken_off = report.due.evaluation and not evaluate_run(run, state, journal, stop)
            if state.early_end:
                stop.here = True  # after one more step, which may be launched already
            if report.due.saving or broken_off:
                _save(run, state, cadence, saving)
            if report.due.stopping or broken_off:
                return "stopped"
    return "finished"


def _start_budget(run: Run, state: RunState) -> Callable[[], float]:
    """Set the budget's times that are known before the first step; return the clock of the steps."""
    by_time = run.recipe.run.budget == "minutes"
    # Ranks must agree on when a budget in minutes ends.
    clock: Callable[[], float] = (lambda: run.world.broadcast(run.clock())) if by_time else run.clock
    if by_time:
        # Draw the nearly empty curves once: this loads matplotlib and measures the seconds for curves.
        began = run.clock()
        plot_curves(run, state)
        run.budget.ending_seconds = run.world.broadcast(_ending_seconds(run, state) + run.clock() - began)
    ready = clock()
    run.budget.ready_seconds = None if run.machine.compiled else ready
    state.window.since += ready - state.progress.seconds  # metrics do not include the set-up
    return clock


def _ending_seconds(run: Run, state: RunState) -> float:
    """Estimate the seconds for the end of a run without its curves: evaluation, checkpoint and model."""
    weights = sum(each.numel() for each in run.trainer.parameters())
    written = 4 * weights * (2 + kept_for_each_weight(run.recipe))  # plus the model
    limit = max_evaluation_seconds(run)
    both = limit * (1 + len(run.fixed_sets))
    evaluation = state.evaluation_seconds or (both if isfinite(both) else 0.0)
    return evaluation + written / BYTES_WRITTEN_A_SECOND + SECONDS_FOR_FILES


def _tell_steps_that_fit(run: Run, progress: Progress) -> None:
    """Report early how many steps fit into a budget in minutes, and the remedies if there are too few."""
    steps, minutes = run.budget.steps_that_fit(progress), run.recipe.run.minutes
    if steps is None or progress.step != (2 if run.machine.compiled else 1):
        return
    each = run.budget.step_seconds(progress)
    text = f"about {counted(steps, 'step')} of {each:.2g} seconds fit into {counted(minutes, 'minute')}"
    if steps < MIN_USEFUL_STEPS:
        text += (
            ", too few to learn much: allow more (--minutes), or take a smaller batch (--batch), "
            "shorter sequences (--max-length) or a smaller model (bertsmith recipe list)"
        )
    run.report(text)


def _warn_of_small_budget(run: Run) -> None:
    """Warn before the first step if a preset gets too few tokens to learn from context, and suggest auto."""
    recipe, stage = run.recipe, run.recipe.examples.stages[0]
    if (
        recipe.name not in preset_names()
        or recipe.start.model != "scratch"
        or not recipe.examples.masks_tokens
    ):
        return
    step = recipe.batch.tokens if recipe.batch.by == "tokens" else recipe.batch.sequences * stage.length
    affordable, wanted = affordable_tokens(run, step), STEPS_TO_LEARN * step
    if affordable is None or affordable >= wanted:
        return
    budget = counted(getattr(recipe.run, recipe.run.budget), recipe.run.budget.removesuffix("s"))
    run.report(
        f"{recipe.name} wants about {wanted / 1e6:,.3g} M tokens ({STEPS_TO_LEARN:,} steps of {step:,}) "
        f"before it learns from context, and about {affordable / 1e6:,.2g} M fit into {budget}: "
        "`bertsmith pretrain auto` chooses a recipe for such a budget"
    )


def affordable_tokens(run: Run, step_tokens: int) -> float | None:
    """Return the tokens of a run's budget; an estimate for a budget in minutes, None for an unknown GPU."""
    settings, stage = run.recipe.run, run.recipe.examples.stages[0]
    if settings.budget != "minutes":
        return float(settings.tokens if settings.budget == "tokens" else settings.steps * step_tokens)
    products = product_flops(run.world.device)
    if products is None:
        return None
    flops = run.objective.flops(stage.length, 1, stage.predictions) / stage.length
    return USUAL_UTILISATION * products * run.world.size / flops * run.budget.step_limit


def _cadence(run: Run, state: RunState, stop: StopRequested) -> Cadence:
    """Return the cadence: evaluation by the recipe, saving by steps and by the clock, both at the end."""
    settings, fraction = run.recipe.run, run.budget.fraction(state.progress)
    by_time, times = settings.budget == "minutes", EVALUATIONS
    if not by_time:
        fixed = sum(each.sequences for each in run.fixed_sets)
        times = min(times, affordable_evaluations(run.recipe, run.machine.evaluation_sequences + fixed))

    def evaluates(progress: Progress) -> bool:
        nonlocal fraction
        before, fraction = fraction, run.budget.fraction(progress)
        if settings.evaluate_every_steps == "auto":
            due = int(fraction * times) > int(before * times)
            # Skip an evaluation if they would take too much of the time; the main process's clock decides.
            taken = state.all_evaluations_seconds + state.evaluation_seconds
            affordable = taken <= MAX_EVALUATION_FRACTION * progress.seconds or not by_time
            return due and run.world.broadcast(float(affordable)) > 0
        return progress.step % settings.evaluate_every_steps == 0

    return Cadence(
        stop,
        run.world,
        ends=run.budget.spent,
        at_the_end=Due(evaluation=True, saving=True),
        evaluates=evaluates,
        saves=lambda after: after.step % settings.save_every_steps == 0 or after.step in settings.keep_at,
        save_every_seconds=60 * settings.save_every_minutes,
        saved_seconds=state.progress.seconds,
    )


def _averaging(run: Run, cadence: Cadence) -> Callable[[Progress], Due]:
    """Return a function that adds a step's weights to the average and returns the work due after it."""

    def due_after(progress: Progress) -> Due:
        run.average_weights(progress)  # the weights of the step that was just launched
        return cadence.due_after(progress)

    return due_after


# ---- metrics


def _log(run: Run, state: RunState, journal: RunJournal, report: StepReport) -> None:
    """Write a line of metrics and begin a new window."""
    window, progress = state.window, report.progress
    values = window.metrics(run.trainer, report)
    peak = peak_of(run.world.device)
    if peak is not None and window.tokens:
        size = run.world.size
        predicted = int(window.counts.get("masked", 0.0) * size)
        flops = run.objective.flops(window.tokens, window.sequences * size, predicted)
        seconds = window.tokens / values["tokens_per_second"]
        values["mfu"] = round(flops / seconds / (peak * size), 4)
    state.window = MetricsWindow.empty(run.objective.declared, since=progress.seconds)
    state.watch.add(progress.step, values)
    journal.write("train", progress.step, values)
    if run.world.main:
        shown = {"step": progress.step, "eta_seconds": run.budget.seconds_remaining(progress), **values}
        run.callback.on_step(run.budget.fraction(progress), shown)


def _watch_learning(run: Run, state: RunState, journal: RunJournal) -> None:
    """Warn of a run's problems as soon as they are seen; end a flat run early if that was requested."""
    watch, plateau = state.watch, None
    if run.objective.declared.baseline == "unigram":
        plateau = watch.plateau(run.budget.fraction(state.progress))
    for finding in filter(None, (watch.explosion(), plateau)):
        if finding.kind in watch.told:
            continue
        watch.told.add(finding.kind)
        text = finding.text
        if finding.kind == "plateau":
            token = constant_prediction(run.trainer, run.held_out_set(state.progress.stage))
            if token is not None:
                text += (
                    f"; the decoder is dead: it predicts {run.store.tokenizer().token(token)!r} everywhere"
                )
            text += f"; {WHAT_TO_TRY}"
        journal.write("event", state.progress.step, {"warning": finding.kind, "text": text})
        run.report(text)
    if plateau is not None and run.early_stopping.if_flat:
        state.early_end = plateau.text


# ---- checkpoints


def _saving(run: Run) -> BackgroundSaving:
    settings = run.recipe.run
    return BackgroundSaving(run.folder.checkpoints, run.trainer, settings.keep_last, settings.keep_at)


def _save(run: Run, state: RunState, cadence: Cadence, saving: BackgroundSaving) -> None:
    progress = state.progress
    # Between skipped steps the weights may be broken: keep the state before them as the latest.
    if state.saved_step == progress.step or progress.skipped_in_a_row:
        return
    scalars = {
        "window": asdict(state.window.over_all_ranks(run.world)),
        "norms": list(run.trainer.guard.norms),
        "held_out": state.held_out,
        "evaluation_due": state.evaluation_due,
        "micro_tokens": run.machine.micro_tokens,  # other micro-batches would round differently
    }
    saving.save(TrainingState.at(progress, scalars))
    state.saved_step, cadence.saved_seconds = progress.step, progress.seconds


def _handle_skipped_step(
    run: Run, state: RunState, journal: RunJournal, report: StepReport, saving: BackgroundSaving
) -> None:
    """Report a skipped step; after several in a row, load the last saved weights."""
    step, row = state.progress.step, state.progress.skipped_in_a_row
    journal.write("event", step, {"skipped": report.skipped, "norm": report.gradient_norm})
    run.report(skip_message(report, run.trainer))
    if report.skipped not in ("taken back", "overflow") and row % run.recipe.run.rollback_after == 0:
        saving.wait()
        _roll_back(run, state, journal)


def _roll_back(run: Run, state: RunState, journal: RunJournal) -> None:
    """Load the last saved weights, but continue with new data: the same batches would fail again."""
    step, row = state.progress.step, state.progress.skipped_in_a_row
    saved = latest_state(run.folder.checkpoints, run.world)
    if saved is None or saved.state.step == state.rolled_back_to:
        what = f"{row} steps in a row had no usable gradient, and there is no other state to go back to"
        raise Diverged(what, where=f"step {step}", remedy="lower optim.peak_lr or raise run.spike_factor")
    state.rolled_back_to = saved.state.step
    load_checkpoint(saved, run.trainer)
    run.trainer.guard.rollbacks += 1  # a pending step used the old weights
    journal.write("event", step, {"rolled_back_to": saved.state.step})
    run.report(f"the weights of step {saved.state.step} were loaded again; the data move on")


# ---- the end


def _finish(run: Run, state: RunState, journal: RunJournal, ending: Literal["finished", "stopped"]) -> float:
    """Write the model and its card, or the curves of a stopped run; return the run's seconds."""
    step = state.progress.step
    if ending == "stopped":
        why = {"early_end": state.early_end} if state.early_end else {}
        journal.write("event", step, {"state": ending, **why})
        plot_curves(run, state)
        return run.clock()
    with run.averaged_weights():
        networks = whole_networks(run.trainer)
        run.world.on_main(lambda: check_weights_are_finite(networks.values(), where=str(run.folder.path)))
        check_held_out_is_finite(state.held_out, where=str(run.folder.path))
        seconds = round(run.clock(), 3)
        journal.write("event", step, {"state": ending, "seconds": seconds})
        facts, tokenizer = _run_facts(run, state), run.store.tokenizer()
        run.world.on_main(lambda: write_results(run.folder.path, run.recipe, networks, tokenizer, facts))
        run.world.on_main(run.folder.write_manifest)
    return seconds


def _run_facts(run: Run, state: RunState) -> RunFacts:
    progress, device = state.progress, run.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    manifest = run.store.manifest
    return RunFacts(
        steps=progress.step,
        tokens=progress.tokens,
        seconds=progress.seconds,
        skipped=progress.skipped,
        device=f"{run.world.size} x {name}",
        corpus={key: getattr(manifest, key) for key in ("documents", "sentences", "tokens")},
        held_out=state.held_out,
        unigram_entropy=unigram_entropy(run.store.token_counts, run.recipe.masking.smoothing),
        notes=run.notes,
        held_out_before=_held_out_before(run.folder, run.recipe, progress.stage) if run.world.main else {},
    )
