"""The pre-training job: from a recipe, a store and a folder to a model, across interruptions.

`training/job.py` runs the loop. This file has, in this order, the additions of pre-training: the command and
its result, the request that builds a job (set up in `run_setup`, with the parts in `pretraining_parts`), its
batches with their budget, and its results.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Literal

import torch

from bertsmith.core.measures import Declaration
from bertsmith.core.wording import counted
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.data_loader import reporting_dead_workers
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.hardware import kept_for_each_weight, product_flops
from bertsmith.pretraining.initial_model import with_true_model
from bertsmith.pretraining.pretrained_model import (
    RunFacts,
    check_held_out_is_finite,
    check_weights_are_finite,
    whole_networks,
    write_results,
)
from bertsmith.pretraining.pretraining_parts import (
    HeldOutEvaluation,
    LearningJudge,
    MetricsWindow,
    StepLoader,
    max_evaluation_seconds,
    plot_curves,
)
from bertsmith.pretraining.run_setup import Run, begin_folder, begun_with, run_folder, set_up
from bertsmith.recipe.idle_keys import PRETRAINING_KEYS, free_at_resume
from bertsmith.recipe.load import Difference, preset_names
from bertsmith.recipe.schema import Recipe
from bertsmith.training.budget import Minutes
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.distributed import World, in_world
from bertsmith.training.early_stopping import NEVER_EARLY, EarlyStopping
from bertsmith.training.job import Cadence, Ending, Facts, Job, NextStep, Start, run_job
from bertsmith.training.journal import RunJournal, read_metrics
from bertsmith.training.run_folder import OTHER_RUN, RunFolder
from bertsmith.training.trainer import Clock, Progress

MIN_USEFUL_STEPS = 100
"""Steps before which a model has hardly learned word frequencies."""
STEPS_TO_LEARN, USUAL_UTILISATION = 1_000, 0.4
"""Steps that the published recipes need to learn more than frequencies (bert-tiny after 205: 5 % of masked
words right), and the usual speed of training as a fraction of the speed of matrix products.
"""
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
    declared: Declaration = field(repr=False)
    """Declaration of the run's metrics."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)
    unigram_entropy: float = 0.0
    """Loss of a model that only knows token frequencies."""
    saved_step: int = 0
    """Step that the same command would resume from, or 0."""
    main_process: bool = True
    held_out_before: dict[str, float] = field(default_factory=dict)
    """Metrics of the initial model on the same sequences; empty for a run from scratch."""
    early_end: str = ""
    """Reason why a run was ended early (`EarlyStopping`), or ""."""
    failure: str = ""
    """Reason why a run of several has no result, or ""."""

    @property
    def finished(self) -> bool:
        """True if the run has come to its end, which may have been early."""
        return self.state == "finished"


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
        opened, folder = TokenStore.open(store), run_folder(out)
        request = PretrainingRequest(with_true_model(recipe), opened, folder, early_stopping)
        ending = run_job(request, world, callback, clock=clock)
        if ending.before and world.main:
            onward = f"`start.model={folder.model}` and a new `out`"
            callback.on_message(f"to continue from its model: {onward}")
        return _result_of(request, ending)

    return in_world(recipe.run.device, in_processes, recipe.run.patience_seconds)


def _result_of(request: "PretrainingRequest", ending: Ending) -> PretrainingResult:
    found, stopped = ending.result, ending.kind == "stopped"
    return PretrainingResult(
        folder=request.folder.path,
        state="stopped" if stopped else "finished",
        steps=found["steps"],
        tokens=found["tokens"],
        seconds=found["seconds"],
        declared=declaration(request.recipe),
        held_out=found["metrics"]["held-out"],
        unigram_entropy=found["unigram_entropy"],
        saved_step=ending.saved_step,
        main_process=ending.main,
        held_out_before=found["metrics"].get("held-out before", {}),
        early_end=found["reason"],
    )


def check_same_run(folder: RunFolder, recipe: Recipe, store: TokenStore) -> None:
    """Raise if the folder contains a run with another recipe or store, or anything but a run."""

    def remedy(changed: Sequence[Difference]) -> str:
        if not folder.finished or not {each.key for each in changed} <= BUDGET_KEYS:
            return OTHER_RUN
        onward = f"`start.model={folder.model}` and a new `out`"
        return f"its learning rate has decayed; continue from its model: {onward}"

    asked = {"recipe": recipe.model_dump(), "store": store.hash}
    folder.check_same_run(asked, lambda: begun_with(folder), free=FREE_KEYS, remedy=remedy)


# ---- the request


@dataclass(frozen=True, slots=True)
class PretrainingRequest:
    """A run that is asked for."""

    recipe: Recipe
    """Recipe with the true architecture of the initial model."""
    store: TokenStore
    folder: RunFolder
    early_stopping: EarlyStopping = NEVER_EARLY
    keeps_state: bool = True

    def check_same_run(self) -> None:
        """Raise if the folder contains a run with another recipe or store, or anything but a run."""
        check_same_run(self.folder, self.recipe, self.store)

    def goes_on(self) -> bool:
        """Return False: a finished run has had its budget."""
        return False

    def build(self, start: Start) -> Job:
        """Return the job, new or to be restored."""
        run = set_up(self.recipe, self.store, self.folder, start)
        settings, window, evaluation = self.recipe.run, MetricsWindow(run), HeldOutEvaluation(run)
        judge = LearningJudge(run, self.early_stopping)
        if isinstance(run.budget, Minutes):
            seconds = 60 * run.budget.minutes
            start.callback.on_deadline(max(0.0, seconds - start.clock()), seconds)
        return Job(
            run.trainer,
            run.budget,
            Cadence(
                settings.log_every_steps,
                save_every_seconds=60 * settings.save_every_minutes,
                save_every_steps=settings.save_every_steps,
                keep_last=settings.keep_last,
                keep_at=settings.keep_at,
                rollback_after=settings.rollback_after,
            ),
            partial(_batches, run, window, evaluation, judge),
            window,
            evaluation,
            PretrainingResults(run, evaluation),
            begin=lambda: begin_folder(run),
            judge=judge,
            after_launch=(run.average_weights, partial(_tell_steps_that_fit, run)),
            notes=run.notes if start.resumes else (*run.notes, *_warn_of_small_budget(run)),
            deterministic=run.machine.deterministic,
        )


# ---- the batches and their budget


@contextmanager
def _batches(
    run: Run, window: MetricsWindow, evaluation: HeldOutEvaluation, judge: LearningJudge, at: Progress
) -> Iterator[NextStep]:
    """Open the batches of a run, with the budget's times that are known before the first step."""
    judge.watch.read(read_metrics(run.folder.path))
    budget, clock, world = run.budget, run.start.clock, run.world
    if isinstance(budget, Minutes):
        # Draw the nearly empty curves once: this loads matplotlib and measures the seconds for curves.
        began = clock()
        plot_curves(run)
        seconds = _ending_seconds(run, evaluation) + clock() - began
        budget.ending_seconds = world.broadcast(seconds)
    ready = world.broadcast(clock())
    if isinstance(budget, Minutes):
        budget.ready_seconds = None if run.machine.compiled else ready
    window.sums.since += ready - at.seconds  # metrics do not include the set-up
    with reporting_dead_workers(), closing(StepLoader(run)) as next_step:
        yield next_step


def _ending_seconds(run: Run, evaluation: HeldOutEvaluation) -> float:
    """Estimate the seconds for the end of a run without its curves: evaluation, checkpoint and model."""
    weights = sum(each.numel() for each in run.trainer.parameters())
    written = 4 * weights * (2 + kept_for_each_weight(run.recipe))  # plus the model
    limit = max_evaluation_seconds(run)
    both = limit * (1 + len(run.fixed_sets))
    evaluated = evaluation.seconds or (both if isfinite(both) else 0.0)
    return evaluated + written / BYTES_WRITTEN_A_SECOND + SECONDS_FOR_FILES


def _tell_steps_that_fit(run: Run, progress: Progress) -> None:
    """Report early how many steps fit into a budget in minutes, and the remedies if there are too few."""
    budget, minutes = run.budget, run.recipe.run.minutes
    if not isinstance(budget, Minutes) or progress.step != (2 if run.machine.compiled else 1):
        return
    steps, each = budget.steps_that_fit(progress), budget.step_seconds(progress)
    if steps is None:
        return
    text = f"about {counted(steps, 'step')} of {each:.2g} seconds fit into {counted(minutes, 'minute')}"
    if steps < MIN_USEFUL_STEPS:
        text += (
            ", too few to learn much: allow more `run.minutes`, or use a smaller batch (`batch.sequences`), "
            "shorter sequences (`examples.stages`) or a smaller model (bertsmith recipe list)"
        )
    run.start.callback.on_message(text)


def _warn_of_small_budget(run: Run) -> Iterator[str]:
    """Warn if a preset gets too few tokens to learn from context, and suggest auto."""
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
    yield (
        f"{recipe.name} needs about {wanted / 1e6:,.3g} M tokens ({STEPS_TO_LEARN:,} steps of {step:,}) "
        f"before it learns from context, and about {affordable / 1e6:,.2g} M fit into {budget}: "
        "`bertsmith pretrain auto` chooses a recipe for such a budget"
    )


def affordable_tokens(run: Run, step_tokens: int) -> float | None:
    """Return the tokens of a run's budget; an estimate for a budget in minutes, None for an unknown GPU."""
    settings, stage = run.recipe.run, run.recipe.examples.stages[0]
    if not isinstance(run.budget, Minutes):
        return float(settings.tokens if settings.budget == "tokens" else settings.steps * step_tokens)
    products = product_flops(run.world.device)
    if products is None:
        return None
    flops = run.objective.flops(stage.length, 1, stage.predictions) / stage.length
    return USUAL_UTILISATION * products * run.world.size / flops * run.budget.step_limit


# ---- the results


@dataclass(frozen=True, slots=True)
class PretrainingResults:
    """The model of a run, its card and its curves."""

    run: Run
    evaluation: HeldOutEvaluation

    def stop(self, at: Progress, reason: str, journal: RunJournal, /) -> Facts:
        """Draw the curves, and return the metrics so far."""
        why = {"early_end": reason} if reason else {}
        journal.write("event", at.step, {"state": "stopped", **why})
        plot_curves(self.run)
        return self._facts(at)

    def finish(self, at: Progress, seconds: float, journal: RunJournal, /) -> Facts:
        """Write the model and its card, and return the metrics of the last evaluation."""
        run, world, facts = self.run, self.run.world, self._facts(at)
        with run.averaged_weights():
            networks = whole_networks(run.trainer)
            world.on_main(lambda: check_weights_are_finite(networks.values(), where=str(run.folder.path)))
            check_held_out_is_finite(self.evaluation.held_out, where=str(run.folder.path))
            journal.write("event", at.step, {"state": "finished", "seconds": seconds})
            told, tokenizer = self._run_facts(at, facts["metrics"]), run.store.tokenizer()
            world.on_main(lambda: write_results(run.folder.path, run.recipe, networks, tokenizer, told))
            world.on_main(run.folder.write_manifest)
        return facts

    def _facts(self, at: Progress) -> Facts:
        metrics = {"held-out": self.evaluation.held_out}
        if before := self._held_out_before(at):
            metrics["held-out before"] = before
        return {"metrics": metrics, "unigram_entropy": self.run.unigram_entropy}

    def _held_out_before(self, at: Progress) -> dict[str, float]:
        """Return the initial model's metrics on the last stage's sequences, from the journal."""
        run = self.run
        if run.recipe.start.model == "scratch" or not run.world.main:
            return {}
        lines = [line for line in read_metrics(run.folder.path) if line["kind"] == "held-out"]
        before = (line for line in lines if not line["step"] and line.get("stage", 0) == at.stage)
        reported = run.objective.declared.reported
        return {name: value for name, value in next(before, {}).items() if name in reported}

    def _run_facts(self, at: Progress, metrics: dict[str, dict[str, float]]) -> RunFacts:
        run, device = self.run, self.run.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        manifest = run.store.manifest
        return RunFacts(
            steps=at.step,
            tokens=at.tokens,
            seconds=at.seconds,
            skipped=at.skipped,
            device=f"{run.world.size} x {name}",
            corpus={key: getattr(manifest, key) for key in ("documents", "sentences", "tokens")},
            held_out=metrics["held-out"],
            unigram_entropy=run.unigram_entropy,
            notes=run.notes,
            held_out_before=metrics.get("held-out before", {}),
        )
