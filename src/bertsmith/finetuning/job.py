"""The fine-tuning job: from a trained encoder and a task's files to a model that does the task."""

import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor

from bertsmith.finetuning.beginning import Beginning, begin
from bertsmith.finetuning.folder import Assignment, TuningFolder, clear_states, open_folder
from bertsmith.finetuning.loop import TuningStep, steps_of, tuning_steps
from bertsmith.finetuning.material import Material, Sheet, encoded_sheet, note_of, read_material
from bertsmith.finetuning.results import Finished, write_results
from bertsmith.finetuning.thresholds import threshold_trials, tuned_threshold
from bertsmith.ground.files import write_json
from bertsmith.inference.task_model import TaskModel, scorer_of
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches, balanced_weights
from bertsmith.tasks.examples import Question
from bertsmith.tasks.judging import deciding, judged
from bertsmith.tasks.objective import TaskObjective
from bertsmith.tasks.outcome import Outcome, outcome_of
from bertsmith.tasks.task_file import TaskNote
from bertsmith.training.checkpoint import TrainingState, latest_state, load_state, prune, save_state
from bertsmith.training.journal import Journal
from bertsmith.training.parallel import World, start_world
from bertsmith.training.signals import StopRequested
from bertsmith.training.steps import Caution, Learner
from bertsmith.training.tuning import build_tuning_optimizer
from bertsmith.training.watch import Watch

LOGGED_LINES = 200
"""About so many lines of metrics in a run."""
SECONDS_BETWEEN_STATES = 300.0
GPU_MULTIPLE, CPU_MULTIPLE = 64, 1


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


@dataclass
class _Run:
    """A run in progress."""

    assignment: Assignment
    folder: TuningFolder
    note: TaskNote
    beginning: Beginning
    learner: Learner
    model: TaskModel
    batches: ShuffledBatches
    exams: dict[str, Sheet]
    watch: Watch
    journal: Journal
    started: float
    step: int = 0
    loss_sum: float = 0.0
    loss_count: float = 0.0
    saved: float = field(default_factory=time.monotonic)
    best: tuple[float, dict[str, Tensor]] | None = None


def finetune(assignment: Assignment, watch: Watch) -> FinetuningResult:
    """Fine-tune as the assignment says; a run found in its folder goes on or, if finished, is reported."""
    folder = open_folder(assignment)
    if folder.finished:
        watch.note(f"{folder.path} is finished already: nothing is left to do")
        return _result_of(folder)
    material = read_material(assignment.task, assignment.data, skip_bad=assignment.skip_bad)
    return finetune_on(material, assignment, watch)


def finetune_on(material: Material, assignment: Assignment, watch: Watch) -> FinetuningResult:
    """Fine-tune on examples that were read before."""
    folder, started = open_folder(assignment), time.monotonic()
    for name, examples in material.splits.items():
        watch.note(f"{name}: {len(examples):,} examples")
    if material.skipped:
        watch.note(
            f"{len(material.skipped):,} bad lines were skipped, the first at {material.skipped[0].where}"
        )
    with StopRequested(watch.alert) as stop:
        run = _set_up(assignment, folder, material, watch, started)
        with run.journal:
            if not _train(run, stop):
                return _stopped(run)
            return _finish(run, material)


def _set_up(
    assignment: Assignment, folder: TuningFolder, material: Material, watch: Watch, started: float
) -> _Run:
    recipe = assignment.recipe
    note = note_of(material, recipe)
    world = start_world(recipe.run.device)
    beginning = begin(assignment.model, note, seed=recipe.run.seed)
    for remark in beginning.notes:
        watch.note(remark)
    cache = cache_folder()
    train = encoded_sheet(material.splits["train"], note, beginning.tokenizer, cache=cache)
    exams = {
        name: encoded_sheet(material.splits[name], note, beginning.tokenizer, cache=cache)
        for name in material.exams
    }
    learner, model = learner_and_model(beginning, note, recipe, world)
    multiple = GPU_MULTIPLE if world.device.type == "cuda" else CPU_MULTIPLE
    weights = balanced_weights(train.encoded, len(note.labels)) if _balanced(note) else None
    batches = ShuffledBatches(
        train.encoded,
        examples_per_step=recipe.run.examples,
        seed=recipe.run.seed,
        micro_tokens=recipe.run.micro_tokens,
        multiple=multiple,
        class_weights_C=weights,
    )
    saved = latest_state(folder.checkpoints)
    step = 0
    if saved is not None:
        load_state(saved, learner.objective, optimizer=learner.optimizer, world=world)
        step, started = saved.state.step, started - saved.state.seconds
        watch.note(f"goes on from step {step:,}")
    journal = Journal.open(folder.path, resume_step=step)
    return _Run(
        assignment, folder, note, beginning, learner, model, batches, exams, watch, journal, started, step
    )


def _balanced(note: TaskNote) -> bool:
    return note.head.class_weights == "balanced" and note.kind in ("classify", "tag")


def learner_and_model(
    beginning: Beginning, note: TaskNote, recipe: FinetuningRecipe, world: World
) -> tuple[Learner, TaskModel]:
    """What learns, and the same network as it is asked."""
    gpu = world.device.type == "cuda"
    precision = ("bf16" if gpu else "fp32") if recipe.run.precision == "auto" else recipe.run.precision
    scorer = scorer_of(beginning.network, note, seed=recipe.run.seed, fresh=beginning.fresh)
    objective = TaskObjective(scorer.to(world.device), note.kind, span_over=note.head.span_over).train()
    wanted = recipe.run.compile == "on" or (recipe.run.compile == "auto" and gpu)
    if wanted and note.head.encoder != "frozen-mix":  # an LSTM is no part of a graph
        objective.compile_whole()
    optimizer = build_tuning_optimizer(scorer, recipe.optim)
    learner = Learner(objective, optimizer, world, precision, recipe.optim.clip_norm, Caution("off"))
    return learner, TaskModel(objective, beginning.tokenizer, note, world.device, precision)


# ---- training


def _train(run: _Run, stop: StopRequested) -> bool:
    """Take the steps that are left; whether the end was reached."""
    recipe = run.assignment.recipe
    total = steps_of(run.batches, recipe)
    exam_steps = {
        round(total * number / recipe.run.evaluations) for number in range(1, recipe.run.evaluations)
    }
    log_every = max(1, total // LOGGED_LINES)

    def pause_after(number: int) -> bool:
        return number in exam_steps or stop.here or _state_due(run)

    for step in tuning_steps(run.learner, run.batches, recipe, first=run.step, pause_after=pause_after):
        run.step = step.number
        _add(run, step)
        if step.number % log_every == 0 or step.number == total:
            _log(run, step, total)
        if step.number in exam_steps:
            _examine(run)
        if step.number < total and (stop.here or _state_due(run)):
            _save(run)
            if stop.here:
                return False
    return True


def _add(run: _Run, step: TuningStep) -> None:
    if step.outcome.skipped:
        run.watch.note(f"step {step.number} was left out: its gradient is {step.outcome.skipped}")
        return
    run.loss_sum += float(step.outcome.sums[0])
    run.loss_count += step.items.count


def _log(run: _Run, step: TuningStep, total: int) -> None:
    seconds = time.monotonic() - run.started
    values = {
        "loss": run.loss_sum / max(run.loss_count, 1e-9),
        "learning_rate": step.learning_rate,
        "gradient_norm": step.outcome.gradient_norm,
        "epoch": step.number / run.batches.steps_per_epoch,
        "seconds": round(seconds, 3),
    }
    run.loss_sum = run.loss_count = 0.0
    run.journal.write("train", step.number, values)
    left = seconds * (total - step.number) / step.number
    run.watch.step(step.number / total, {"step": step.number, "eta_seconds": left, **values})


def _examine(run: _Run) -> dict[str, tuple[Outcome, dict[str, float]]]:
    """What the model says of each exam, and how right it is; the best weights are remembered."""
    found: dict[str, tuple[Outcome, dict[str, float]]] = {}
    for name, sheet in run.exams.items():
        outcome = run.model.outcome(sheet.examples, sheet.encoded)
        found[name] = (outcome, judged(run.note, sheet.examples, sheet.encoded, outcome))
    if found:
        measures = next(iter(found.values()))[1]
        run.journal.write("held-out", run.step, measures)
        if run.assignment.recipe.run.keep == "best":
            _remember(run, deciding(run.note, measures))
    return found


def _remember(run: _Run, value: float) -> None:
    if run.best is None or value > run.best[0]:
        state = run.learner.objective.state_dict()
        run.best = (value, {name: tensor.detach().cpu().clone() for name, tensor in state.items()})


def _state_due(run: _Run) -> bool:
    return time.monotonic() - run.saved >= SECONDS_BETWEEN_STATES


def _save(run: _Run) -> None:
    learner = run.learner
    state = TrainingState(run.step, 0, time.monotonic() - run.started)
    save_state(
        run.folder.checkpoints,
        state,
        module=learner.objective,
        optimizer=learner.optimizer,
        world=learner.world,
    )
    prune(run.folder.checkpoints, keep_last=1)
    run.saved = time.monotonic()


# ---- the end


def _finish(run: _Run, material: Material) -> FinetuningResult:
    found = _examine(run)
    if run.best is not None and found:
        run.learner.objective.load_state_dict(run.best[1])
        found = _examine(run)
    note = run.note
    if note.answers.null_threshold == "tuned" and found:
        note, found = _with_threshold(run, found)
    seconds = time.monotonic() - run.started
    finished = Finished(
        assignment=run.assignment,
        note=note,
        model=replace(run.model, note=note),
        notes=run.beginning.notes,
        exams=run.exams,
        found=found,
        steps=run.step,
        seconds=seconds,
        examples=len(material.splits["train"]),
    )
    write_results(run.folder, finished)
    clear_states(run.folder)
    return _result_of(run.folder)


def _with_threshold(
    run: _Run, found: dict[str, tuple[Outcome, dict[str, float]]]
) -> tuple[TaskNote, dict[str, tuple[Outcome, dict[str, float]]]]:
    """The note with the null threshold that is best on the first exam, and all exams judged with it."""
    name, (outcome, _) = next(iter(found.items()))
    questions = [each for each in run.exams[name].examples if isinstance(each, Question)]
    threshold = tuned_threshold(questions, outcome.answers)
    trials = threshold_trials(questions, outcome.answers)
    write_json(
        run.folder.path / "thresholds.json", {"tuned": threshold, "halves": [asdict(each) for each in trials]}
    )
    answers = run.note.answers.model_copy(update={"null_threshold": threshold})
    note = run.note.model_copy(update={"answers": answers})
    judged_anew = {}
    for exam, (said, _) in found.items():
        sheet = run.exams[exam]
        decided = outcome_of(note, sheet.examples, sheet.encoded, said.scores)
        judged_anew[exam] = (decided, judged(note, sheet.examples, sheet.encoded, decided))
    return note, judged_anew


def _stopped(run: _Run) -> FinetuningResult:
    return FinetuningResult(
        run.folder.path, False, {}, time.monotonic() - run.started, run.step, run.batches.encoded.items
    )


def _result_of(folder: TuningFolder) -> FinetuningResult:
    result = folder.result()
    return FinetuningResult(
        folder.path, True, result["measures"], result["seconds"], result["steps"], result["examples"]
    )


def cache_folder() -> Path:
    """Where encoded splits are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "bertsmith" / "encodings"
