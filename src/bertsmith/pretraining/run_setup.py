"""Set-up of a pre-training run, new or from its last checkpoint.

`set_up` turns a request into a `Run`, which does not change from step to step, and a `RunState`, which does.
`StepLoader` supplies the batches of the steps.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json, write_text
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.data_loader import PretrainingDataset, StepBatches, StepIndex, load_steps
from bertsmith.model.encoder import layers_in
from bertsmith.model.network import Network
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.objectives.registry import OBJECTIVES
from bertsmith.pretraining.fixed_evaluation import (
    fixed_data,
    fixed_notes,
    fixed_set,
)
from bertsmith.pretraining.hardware import Machine, choices, fit_machine
from bertsmith.pretraining.held_out import HeldOutSet, held_out_set, unigram_entropy
from bertsmith.pretraining.initial_model import build_initial_model, with_true_model
from bertsmith.pretraining.learning_watch import LearningWatch
from bertsmith.pretraining.metrics_window import MetricsWindow
from bertsmith.pretraining.stages import Budget
from bertsmith.recipe.load import recipe_text
from bertsmith.recipe.schema import Recipe
from bertsmith.training.callbacks import ProgressCallback, outlive_sigterm
from bertsmith.training.checkpoint import SavedState, latest_state, load_checkpoint
from bertsmith.training.cuda_graphs import recording_of
from bertsmith.training.distributed import World, share_work
from bertsmith.training.journal import write_versions
from bertsmith.training.optimizers import build_optimizer, pretraining_rate
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import Clock, GradientGuard, Progress, StepInput, Trainer, loss_scaler
from bertsmith.training.weight_average import WeightAverage

STORE_FILE, TEACHER_FILE, PLANS = "store.json", "teacher.json", "plans"


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Conditions that end a run before its budget is spent; the run is saved and can be resumed."""

    if_flat: bool = False
    """True to end a run that has its loss at the unigram line."""
    rule: Callable[[Sequence[float]], str] | None = None
    """Function, for a run of one process, from the losses so far to the reason to end it, or an empty text.

    The losses come from the fixed evaluation after step 0, or from the run's own if it has no fixed one."""


NEVER_EARLY = EarlyStopping()


@dataclass(frozen=True, slots=True)
class Request:
    """Recipe, store and output folder of a run."""

    recipe: Recipe
    store: Path
    out: Path
    clock: Clock = field(default_factory=Clock)
    early_stopping: EarlyStopping = NEVER_EARLY


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run that are the same from its first step to its last."""

    recipe: Recipe
    store: TokenStore
    folder: RunFolder
    objective: PretrainingObjective
    trainer: Trainer
    budget: Budget
    machine: Machine
    train_data: PretrainingDataset
    held_out_data: PretrainingDataset
    callback: ProgressCallback
    notes: tuple[str, ...]
    clock: Clock
    fixed_sets: list[HeldOutSet]
    """The set of the fixed evaluation as a list of one, or empty for a run without a fixed evaluation."""
    held_out_sets: dict[int, HeldOutSet] = field(default_factory=dict)
    """Held-out set by stage, built at first use."""
    early_stopping: EarlyStopping = NEVER_EARLY

    @property
    def world(self) -> World:
        """The processes that share the run."""
        return self.trainer.world

    def held_out_set(self, stage: int) -> HeldOutSet:
        """Return the held-out set of a stage."""
        if stage not in self.held_out_sets:
            self.held_out_sets[stage] = held_out_set(self.held_out_data, stage, self.world)
        return self.held_out_sets[stage]

    def show_progress(self, progress: Progress) -> None:
        """Update the progress bar."""
        if self.world.main:
            self.callback.on_progress(self.budget.fraction(progress))

    def average_weights(self, progress: Progress) -> None:
        """Add the current weights to the average, if the recipe asks for one and its start is reached."""
        average, begins = self.trainer.average, self.recipe.run.average_from
        if average is not None and begins != "off" and self.budget.fraction(progress) > begins:
            average.add()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are the average, if any, as in the final model."""
        return nullcontext() if self.trainer.average is None else self.trainer.average.applied()

    def report(self, text: str) -> None:
        """Report a message from the main process."""
        if self.world.main:
            self.callback.on_message(text)


@dataclass
class RunState:
    """The state that changes with every step, apart from weights; checkpoints have what is irreplaceable."""

    window: MetricsWindow
    watch: LearningWatch
    progress: Progress = field(default_factory=Progress)
    held_out: dict[str, float] = field(default_factory=dict)
    """Metrics of the last held-out evaluation."""
    evaluation_due: bool = True
    """True if an evaluation must run before the next step: in a new run, or after an interrupted one."""
    evaluation_seconds: float = 0.0
    """Seconds of the last evaluation."""
    all_evaluations_seconds: float = 0.0
    """Seconds of all evaluations since this start."""
    saved_step: int = 0
    """Newest saved step, or 0."""
    plotted_seconds: float = 0.0
    """Seconds of the run when its curves were last drawn."""
    rolled_back_to: int = -1
    """Step of the last rollback, or -1."""
    early_end: str = ""
    """Reason why the run ends early (`EarlyStopping`), or empty."""


def set_up(request: Request, world: World, callback: ProgressCallback) -> tuple[Run, RunState]:
    """Build the requested run, new or from its last checkpoint; the folder must be checked before."""
    recipe, store = with_true_model(request.recipe), TokenStore.open(request.store)
    folder = run_folder(request.out)
    initial = build_initial_model(recipe, store)
    saved = latest_state(folder.checkpoints, world)
    micro_tokens = None if saved is None else int(saved.state.scalars["micro_tokens"])
    machine = fit_machine(
        recipe, initial.network, world, other=initial.other, micro_tokens_before=micro_tokens
    )
    loading: dict[str, Any] = {"rank": world.rank, "world": world.size, "cache": folder.path / PLANS}
    loading |= {"micro_tokens": machine.micro_tokens, "multiples": machine.multiples}
    train = PretrainingDataset(store, recipe, split="train", **loading)
    held_out = PretrainingDataset(store, held_out_recipe(recipe, machine), split="held-out", **loading)
    fixed = fixed_data(store, recipe, world, micro_tokens=machine.micro_tokens, cache=folder.path / PLANS)
    world.on_main(store.verify)
    world.on_main(lambda: _begin_folder(folder, recipe, (train, held_out), initial.teacher))
    build = OBJECTIVES[recipe.examples.objective].build
    # A teacher is not a part of the objective, so `.to` does not move it with the objective.
    other = None if initial.other is None else initial.other.to(world.device)
    objective = build(initial.network, other, recipe).to(world.device).train()
    trainer = build_trainer(recipe, objective, machine, world)
    entropy = unigram_entropy(store.token_counts, recipe.masking.smoothing)
    declared = objective.declared
    watch = LearningWatch(entropy, recipe.optim.warmup_fraction, declared.own[declared.watched])
    fresh = RunState(MetricsWindow.empty(declared), watch)
    state = fresh if saved is None else _restore(saved, fresh, trainer)
    notes = (*initial.notes, *choices(recipe), *fixed_notes(recipe), *machine.notes)
    run = Run(
        recipe,
        store,
        folder,
        objective,
        trainer,
        Budget(recipe),
        machine,
        train,
        held_out,
        callback,
        notes,
        replace(request.clock, before=state.progress.seconds),
        fixed_sets=[fixed_set(fixed, world)] if declared.fixed else [],
        early_stopping=request.early_stopping,
    )
    for note in notes:
        run.report(note)
    if saved is not None:
        run.report(f"resumes from step {saved.state.step:,}")
    elif any(folder.checkpoints.glob("step-*.damaged")):
        run.report("no saved state is whole: the run starts again at step 0")
    return run, state


def run_folder(out: Path) -> RunFolder:
    """Return the folder of a pre-training run; the run writes its model last."""
    early = frozenset({STORE_FILE, TEACHER_FILE, "versions.json", "source.sha256"})
    return RunFolder(out, "recipe.toml", "model/config.json", early_files=early, caches=(PLANS,))


def _begin_folder(
    folder: RunFolder, recipe: Recipe, datasets: Sequence[PretrainingDataset], teacher: Network | None
) -> None:
    """Write the files that describe the run; raise if a stage lacks steps or the teacher has changed."""
    # Find a stage without steps before the folder is a run, which would not accept a store with more text.
    for dataset in datasets:
        for stage in range(len(recipe.examples.stages)):
            dataset.stage_index(stage).steps_in(0)
    told = None if teacher is None else {"hash": network_hash(teacher)}
    _check_same_teacher(folder, told)
    folder.remove_partial_files()
    write_versions(folder.path)
    if told is not None:
        write_json(folder.path / TEACHER_FILE, told)
    store = datasets[0].opened_store
    write_json(folder.path / STORE_FILE, {"hash": store.hash, "tokens": store.tokens})
    write_text(folder.config, recipe_text(recipe))  # last, because it marks the folder as a run


def network_hash(network: Network) -> str:
    """Return a hash of a network's config and weights."""
    digest = hashlib.sha256(repr(network.config).encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _check_same_teacher(folder: RunFolder, told: Mapping[str, str] | None) -> None:
    """Raise if a run would resume with a different teacher."""
    file = folder.path / TEACHER_FILE
    if folder.begun and told is not None and read_json(file, remedy="give --out a new folder") != told:
        what = "the run there was started with another teacher: its weights have changed since"
        raise UserError(what, where=str(file), remedy="put them back, or give --out a new folder")


def held_out_recipe(recipe: Recipe, machine: Machine) -> Recipe:
    """Return the recipe for held-out examples: one step has all of them, for any number of ranks."""
    sizes = {"by": "sequences", "sequences": machine.evaluation_sequences, "ramp_from": "off"}
    batch = recipe.batch.model_copy(update=sizes)
    return recipe.model_copy(update={"batch": batch})


def build_trainer(recipe: Recipe, objective: PretrainingObjective, machine: Machine, world: World) -> Trainer:
    """Build the trainer of an objective: compiled, shared among processes, with its optimiser."""
    for network in objective.networks().values():
        network.encoder.recompute = recipe.run.recompute
    sharded = world.size > 1 and recipe.run.parallel == "fsdp"
    if machine.compiled and not sharded:
        objective.compile_whole()
    # Sharded weights are gathered between the layers, outside any graph.
    if machine.compiled and sharded:
        for layer in layers_in(objective):
            layer.compile(fullgraph=True)
    wrapped = share_work(objective, world, recipe.run.parallel)
    optimizer = build_optimizer(wrapped, recipe.optim, order="matrices first")
    averages = recipe.run.average_from != "off"
    return Trainer(
        wrapped,
        optimizer,
        world,
        machine.precision,
        recipe.optim.clip_norm,
        GradientGuard(recipe.run.spike_factor),
        graphs=recording_of(optimizer, world.device) if machine.recorded else None,
        seed=recipe.run.seed,
        scaler=loss_scaler(world.device, machine.precision),
        average=WeightAverage(wrapped, optimizer, recipe.run.average_decay) if averages else None,
    )


def _restore(saved: SavedState, fresh: RunState, trainer: Trainer) -> RunState:
    """Load weights and moments into the trainer, and return the rest of the saved state."""
    load_checkpoint(saved, trainer)
    scalars = saved.state.scalars
    trainer.guard.norms.extend(scalars["norms"])
    # Saved sums are over all ranks: only one rank loads them, so that they count once.
    window = MetricsWindow(**scalars["window"]) if trainer.world.main else fresh.window
    progress = saved.state.progress
    due = scalars["evaluation_due"]
    return RunState(window, fresh.watch, progress, scalars["held_out"], due, saved_step=progress.step)


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
        self._progress = progress = run.budget.enter_stage(progress)
        ahead = self._turned_to(run.budget.address(progress))
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
            masking_rate=self.run.budget.masking_rate(self._progress, steps_ahead=ahead),
        )
