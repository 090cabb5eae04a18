"""The parts of a pre-training job: its batches, the sums between lines of metrics, evaluation, and judge."""

import itertools
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from bertsmith.core.measures import Declaration
from bertsmith.data.data_loader import StepBatches, StepIndex, load_steps
from bertsmith.pretraining.fixed_evaluation import evaluate_fixed
from bertsmith.pretraining.hardware import MAX_EVALUATION_FRACTION, affordable_evaluations, peak_of
from bertsmith.pretraining.held_out import evaluate, over_all_ranks
from bertsmith.pretraining.learning_watch import WHAT_TO_TRY, LearningWatch, constant_prediction
from bertsmith.pretraining.pretrained_model import held_out_line
from bertsmith.pretraining.run_setup import Run
from bertsmith.pretraining.sample_guesses import sample_guesses
from bertsmith.training.callbacks import outlive_sigterm
from bertsmith.training.checkpoint import SavedState
from bertsmith.training.curves import draw_curves, panels
from bertsmith.training.early_stopping import EarlyStopping, EndKind, Judge, evaluated_values
from bertsmith.training.job import Facts, Remembered
from bertsmith.training.journal import RunJournal
from bertsmith.training.optimizers import pretraining_rate
from bertsmith.training.trainer import Progress, StepInput, StepReport

EVALUATIONS = 10
"""Maximum number of evaluations during a run if run.evaluate_every_steps is "auto"."""
SECONDS_BETWEEN_PLOTS = 60.0


class StepLoader:
    """The source of the trainer's steps, with batches built ahead by loader processes.

    Call `close`: the garbage collector would end the queues' threads first, and then wait five seconds in
    vain for each process.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._part: tuple[int, float] | None = None
        self._ahead: Generator[StepBatches] | None = None
        self._progress = Progress()

    def __call__(self, progress: Progress) -> StepInput | None:
        """Return the input of the next step, or None if the budget is spent."""
        run, trainer = self.run, self.run.trainer
        if run.budget.spent(progress):
            return None
        self._progress = progress = run.stages.enter(progress)
        ahead = self._turned_to(run.stages.address(progress))
        asked = time.monotonic()
        batches = next(ahead)
        waited = time.monotonic() - asked
        names = (*run.objective.declared.counts, "tokens")
        *counts, tokens = trainer.world.sum([batches.counts[name] for name in names])
        rate = pretraining_rate(run.budget.fraction(progress), run.recipe.optim)
        return StepInput(batches.micros, tuple(counts), rate, progress, int(tokens), batches, waited)

    def close(self) -> None:
        """End the processes that build batches."""
        if self._ahead is not None:
            self._ahead.close()

    def _turned_to(self, address: StepIndex) -> Generator[StepBatches]:
        """Return the loader; a new one if stage or masking level change, which a loader cannot foresee."""
        if self._ahead is not None and self._part == (address.stage, address.progress):
            return self._ahead
        self.close()
        self._part = address.stage, address.progress
        following = (self._index(address, step) for step in itertools.count(address.step))
        pin = self.run.world.device.type == "cuda"
        workers = self.run.machine.loader_workers
        self._ahead = load_steps(
            self.run.train_data, following, workers=workers, pin=pin, in_worker=outlive_sigterm
        )
        return self._ahead

    def _index(self, address: StepIndex, step: int) -> StepIndex:
        """Return the index of a step of the stage; called when a process begins to build the step."""
        ahead = step - self._progress.stage_step
        return replace(
            address,
            step=step,
            masking_rate=self.run.stages.masking_rate(self._progress, steps_ahead=ahead),
        )


# ---- metrics


@dataclass
class Sums:
    """Sums since the last line of metrics; the fields are keys of state.json in checkpoints."""

    sums: dict[str, float]
    """Sums of this rank, over steps that were not skipped, like the counts."""
    counts: dict[str, float]
    tokens: int = 0
    """Tokens over all ranks, including skipped steps."""
    sequences: int = 0
    waited: float = 0.0
    since: float = 0.0
    """Seconds of the run at the last line."""

    @classmethod
    def empty(cls, declared: Declaration, *, since: float = 0.0) -> "Sums":
        """Return empty sums for an objective."""
        return cls(dict.fromkeys(declared.sums, 0.0), dict.fromkeys(declared.counts, 0.0), since=since)


class MetricsWindow(Remembered):
    """The metrics of the steps since the last line."""

    def __init__(self, run: Run) -> None:
        self.run, self.sums = run, Sums.empty(run.objective.declared)

    def add(self, report: StepReport) -> None:
        """Add a step."""
        batches, sums = report.step.batches, self.sums
        if not report.skipped:
            for name, new in zip(sums.sums, report.sums.tolist(), strict=True):
                sums.sums[name] += new
            for name in sums.counts:
                sums.counts[name] += batches.counts[name]
        sums.tokens += report.step.tokens
        sums.sequences += int(batches.counts["sequences"])
        sums.waited += report.step.waited_seconds

    def line(self, report: StepReport) -> dict[str, Any]:
        """Return a line of metrics over all ranks, and begin the next one."""
        run, sums, at = self.run, self.sums, report.progress
        declared = run.objective.declared
        passed = max(at.seconds - sums.since, 1e-9)
        values = {
            **declared.means(over_all_ranks(sums.sums | sums.counts, run.world)),
            "learning_rate": report.step.learning_rate,
            "gradient_norm": report.gradient_norm,
            "tokens": at.tokens,
            "seconds": round(at.seconds, 3),
            "tokens_per_second": round(sums.tokens / passed, 1),
            "input_wait": round(sums.waited / passed, 5),
            "skipped": at.skipped,
        }
        peak = peak_of(run.world.device)
        if peak is not None and sums.tokens:
            size = run.world.size
            predicted = int(sums.counts.get("masked", 0.0) * size)
            flops = run.objective.flops(sums.tokens, sums.sequences * size, predicted)
            seconds = sums.tokens / values["tokens_per_second"]
            values["mfu"] = round(flops / seconds / (peak * size), 4)
        self.sums = Sums.empty(declared, since=at.seconds)
        return values

    def scalars(self) -> dict[str, Any]:
        """Return the sums over all ranks, so that a resume changes no line, and the recent gradient norms."""
        run, sums = self.run, self.sums
        totals = [over_all_ranks(each, run.world) for each in (sums.sums, sums.counts)]
        return {
            "window": asdict(replace(sums, sums=totals[0], counts=totals[1])),
            "norms": list(run.trainer.guard.norms),
            "micro_tokens": run.machine.micro_tokens,  # other micro-batches would round differently
        }

    def restore(self, saved: SavedState) -> None:
        """Restore the saved sums; the sums of all ranks count in the main process."""
        if self.run.world.main:
            self.sums = Sums(**saved.state.scalars["window"])
        self.run.trainer.guard.norms.extend(saved.state.scalars["norms"])


# ---- evaluation


class HeldOutEvaluation(Remembered):
    """Evaluation on the held-out documents, the run's own and the fixed one, and the curves of both."""

    def __init__(self, run: Run) -> None:
        self.run, self.due = run, True
        self.held_out: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.seconds = self.all_seconds = 0.0
        """Seconds of the last evaluation, and of all since this start."""
        self.evaluated_step = -1
        self.plotted_seconds = 0.0
        """Seconds of the run when its curves were last drawn."""
        self.fraction = 0.0
        """Fraction of the budget at the last step."""

    def is_due_after(self, at: Progress) -> bool:
        """True if an evaluation is due by the recipe."""
        run, settings = self.run, self.run.recipe.run
        before, self.fraction = self.fraction, run.budget.fraction(at)
        if settings.evaluate_every_steps != "auto":
            return at.step % settings.evaluate_every_steps == 0
        times = EVALUATIONS
        if not run.budget.by_clock:
            fixed = sum(each.sequences for each in run.fixed_sets)
            times = min(times, affordable_evaluations(run.recipe, run.machine.evaluation_sequences + fixed))
        due = int(self.fraction * times) > int(before * times)
        # Skip an evaluation if they would take too much of the time; the main process's clock decides.
        taken = self.all_seconds + self.seconds
        affordable = taken <= MAX_EVALUATION_FRACTION * at.seconds or not run.budget.by_clock
        return due and run.world.broadcast(float(affordable)) > 0

    def evaluate(self, at: Progress, journal: RunJournal, *, last: bool) -> Facts | None:
        """Evaluate, unless an earlier start has; draw the curves at most once a minute and at the end.

        Returns None if the user asked to stop meanwhile, which interrupts the evaluation.
        """
        run = self.run
        if last and not self.due and self.evaluated_step == at.step:
            return {}
        self.due = True
        if not at.step and not self._evaluate_later_stages(at, journal):
            return None
        began = run.start.clock()
        with run.averaged_weights():
            evaluated = self._evaluate_stage(at, journal)
            # With several processes, each may have only a part of the weights.
            if evaluated and at.step and run.fixed_sets and run.world.size == 1:
                for line in sample_guesses(run.trainer, run.fixed_sets[0], run.store.tokenizer()):
                    run.start.callback.on_message(line)
        if evaluated is None:
            return None
        self.held_out, self.evaluated_step, self.due = evaluated, at.step, False
        self.seconds = run.start.clock() - began
        self.all_seconds += self.seconds
        due = last or at.seconds - self.plotted_seconds >= SECONDS_BETWEEN_PLOTS
        if at.step and run.world.broadcast(float(due)) > 0:  # the main process's clock decides for all
            self.plotted_seconds = at.seconds
            plot_curves(run)
        return {}

    def scalars(self) -> dict[str, Any]:
        """Return the last metrics, and True if the next step must wait for an evaluation."""
        return {"held_out": self.held_out, "evaluation_due": self.due}

    def restore(self, saved: SavedState) -> None:
        """Restore the saved values."""
        self.held_out, self.due = (saved.state.scalars[key] for key in ("held_out", "evaluation_due"))
        self.evaluated_step, self.fraction = saved.state.step, self.run.budget.fraction(saved.state.progress)

    def _evaluate_later_stages(self, at: Progress, journal: RunJournal) -> bool:
        """Evaluate a given initial model on the later stages too, so that the gain of the run is known.

        Returns False if the user asked to stop meanwhile.
        """
        if self.run.recipe.start.model == "scratch":
            return True
        stages = range(1, len(self.run.recipe.examples.stages))
        later = (replace(at, stage=stage) for stage in stages)
        return all(self._evaluate_stage(progress, journal) is not None for progress in later)

    def _evaluate_stage(self, at: Progress, journal: RunJournal) -> dict[str, float] | None:
        """Evaluate on a stage's sequences; None if the user asked to stop meanwhile."""
        run, stop = self.run, self.run.start.stop
        asked_before = stop.here  # then finish all that is due first, so that a resume changes no line
        limits: Any = {
            "stopping": lambda: stop.here and not asked_before,
            "max_seconds": max_evaluation_seconds(run),
        }
        evaluated = evaluate(run.trainer, run.held_out_set(at.stage), **limits)
        if evaluated is None:
            return None
        metrics, run.held_out_sets[at.stage] = evaluated
        for number, fixed in enumerate(run.fixed_sets):
            compared = evaluate_fixed(run.trainer, fixed, **limits)
            if compared is None:
                return None
            metrics |= compared[0]
            run.fixed_sets[number] = compared[1]
        numbers = {"stage": at.stage, "tokens": at.tokens, "seconds": round(at.seconds, 3)}
        journal.write("held-out", at.step, {**metrics, **numbers})
        text = f"step {at.step:,}: {held_out_line(run.objective.declared, metrics)}"
        run.start.callback.on_message(text)
        return metrics


def max_evaluation_seconds(run: Run) -> float:
    """Return the maximum seconds of an evaluation; finite only for an "auto" size and a budget in minutes."""
    settings = run.recipe.run
    if settings.budget != "minutes" or settings.evaluation_sequences != "auto":
        return inf
    return 60 * settings.minutes * MAX_EVALUATION_FRACTION / 4


def plot_curves(run: Run) -> None:
    """Draw the curves of the run so far."""
    drawn = panels(run.objective.declared, unigram_entropy=run.unigram_entropy)
    run.world.on_main(lambda: draw_curves(run.folder.path, drawn))


# ---- the judge


@dataclass
class LearningJudge(Judge):
    """Warns of a run that does not learn as soon as that is seen, and ends it early if that was requested."""

    run: Run
    asked: EarlyStopping
    watch: LearningWatch = field(init=False)
    ending: EndKind = field(init=False)

    def __post_init__(self) -> None:
        self.ending = "stopped" if self.asked.rule is None else "ended early"
        recipe, declared = self.run.recipe, self.run.objective.declared
        self.watch = LearningWatch(
            self.run.unigram_entropy, recipe.optim.warmup_fraction, declared.own[declared.watched]
        )

    def after_line(self, at: Progress, values: Mapping[str, Any], journal: RunJournal) -> str | None:
        """Report what the line shows; return the reason to end a flat run."""
        run, watch, plateau = self.run, self.watch, None
        watch.add(at.step, values)
        if run.objective.declared.baseline == "unigram":
            plateau = watch.plateau(run.budget.fraction(at))
        for finding in filter(None, (watch.explosion(), plateau)):
            if finding.kind in watch.told:
                continue
            watch.told.add(finding.kind)
            text = finding.text
            if finding.kind == "plateau":
                token = constant_prediction(run.trainer, run.held_out_set(at.stage))
                if token is not None:
                    piece = run.store.tokenizer().token(token)
                    text += f"; the decoder is dead: it predicts {piece!r} everywhere"
                text += f"; {WHAT_TO_TRY}"
            journal.write("event", at.step, {"warning": finding.kind, "text": text})
            run.start.callback.on_message(text)
        return plateau.text if plateau is not None and self.asked.if_flat else None

    def after_evaluation(self) -> str | None:
        """Return the reason of the rule to end the run."""
        metric, rule = self.run.objective.declared.deciding, self.asked.rule
        values = () if rule is None else list(evaluated_values(self.run.folder.path, metric).values())
        end = None if rule is None else rule(values)
        return None if end is None else end.reason(metric)
