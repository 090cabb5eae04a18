"""Evaluation of a run on held-out documents: its own evaluation, the fixed one, and the curves of both."""

from dataclasses import replace
from math import inf
from typing import Any

from bertsmith.pretraining.fixed_evaluation import evaluate_fixed
from bertsmith.pretraining.hardware import MAX_EVALUATION_FRACTION
from bertsmith.pretraining.held_out import evaluate, unigram_entropy
from bertsmith.pretraining.pretrained_model import held_out_line
from bertsmith.pretraining.run_setup import Run, RunState
from bertsmith.pretraining.sample_guesses import sample_guesses
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.curves import draw_curves, panels
from bertsmith.training.journal import RunJournal, read_metrics
from bertsmith.training.trainer import Progress

SECONDS_BETWEEN_PLOTS = 60.0


def evaluate_run(run: Run, state: RunState, journal: RunJournal, stop: StopRequested) -> bool:
    """Evaluate on the held-out documents; draw the curves at most once a minute and at the end.

    Returns False if the user asked to stop meanwhile, which interrupts the evaluation.
    """
    progress, began = state.progress, run.clock()
    state.evaluation_due = True
    with run.averaged_weights():
        evaluated = _evaluate_stage(run, progress, journal, stop)
        # With several processes, each may have only a part of the weights.
        if evaluated and progress.step and run.fixed_sets and run.world.size == 1:
            for line in sample_guesses(run.trainer, run.fixed_sets[0], run.store.tokenizer()):
                run.report(line)
    if evaluated is None:
        return False
    state.held_out = evaluated
    state.evaluation_due, state.evaluation_seconds = False, run.clock() - began
    state.all_evaluations_seconds += state.evaluation_seconds
    if progress.step and run.early_stopping.rule is not None:
        name = run.objective.declared.deciding.name
        lines = (line for line in read_metrics(run.folder.path) if line["kind"] == "held-out")
        losses = [line[name] for line in lines if line["step"]]
        state.early_end = state.early_end or run.early_stopping.rule(losses)
    waited = progress.seconds - state.plotted_seconds
    due = waited >= SECONDS_BETWEEN_PLOTS or run.budget.spent(progress)
    if progress.step and run.world.broadcast(float(due)) > 0:  # the main process's clock decides for all
        plot_curves(run, state)
    return True


def evaluate_later_stages(run: Run, state: RunState, journal: RunJournal, stop: StopRequested) -> bool:
    """Evaluate a given initial model on the later stages too, so that the gain of the run is known.

    Returns False if the user asked to stop meanwhile.
    """
    if run.recipe.start.model == "scratch" or state.progress.step:
        return True
    later = (replace(state.progress, stage=stage) for stage in range(1, len(run.recipe.examples.stages)))
    return all(_evaluate_stage(run, progress, journal, stop) is not None for progress in later)


def _evaluate_stage(
    run: Run, progress: Progress, journal: RunJournal, stop: StopRequested
) -> dict[str, float] | None:
    """Evaluate on a stage's sequences and write to the journal; None if the user asked to stop meanwhile."""
    stage = progress.stage
    asked_before = stop.here  # then finish all that is due first, so that a resume changes no line
    limits: Any = {
        "stopping": lambda: stop.here and not asked_before,
        "max_seconds": max_evaluation_seconds(run),
    }
    evaluated = evaluate(run.trainer, run.held_out_set(stage), **limits)
    if evaluated is None:
        return None
    metrics, run.held_out_sets[stage] = evaluated
    for number, fixed in enumerate(run.fixed_sets):
        compared = evaluate_fixed(run.trainer, fixed, **limits)
        if compared is None:
            return None
        metrics |= compared[0]
        run.fixed_sets[number] = compared[1]
    numbers = {"stage": stage, "tokens": progress.tokens, "seconds": round(progress.seconds, 3)}
    journal.write("held-out", progress.step, {**metrics, **numbers})
    run.report(f"step {progress.step:,}: {held_out_line(run.objective.declared, metrics)}")
    return metrics


def max_evaluation_seconds(run: Run) -> float:
    """Return the maximum seconds of an evaluation; finite only for an "auto" size and a budget in minutes."""
    settings = run.recipe.run
    if settings.budget != "minutes" or settings.evaluation_sequences != "auto":
        return inf
    return 60 * settings.minutes * MAX_EVALUATION_FRACTION / 4


def plot_curves(run: Run, state: RunState) -> None:
    """Draw the curves of the run so far."""
    entropy = unigram_entropy(run.store.token_counts, run.recipe.masking.smoothing)
    drawn = panels(run.objective.declared, unigram_entropy=entropy)
    run.world.on_main(lambda: draw_curves(run.folder.path, drawn))
    state.plotted_seconds = state.progress.seconds
