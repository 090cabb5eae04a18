"""Set-up of a pre-training run, new or from its last checkpoint, and the files that describe it."""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.core.files import read_json, write_json, write_text
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.data_loader import PretrainingDataset
from bertsmith.model.encoder import layers_in
from bertsmith.model.network import Network
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.objectives.registry import OBJECTIVES, declaration
from bertsmith.pretraining.data_stages import Stages, budget_of
from bertsmith.pretraining.fixed_evaluation import (
    fixed_data,
    fixed_notes,
    fixed_set,
)
from bertsmith.pretraining.hardware import Machine, choices, fit_machine
from bertsmith.pretraining.held_out import HeldOutSet, held_out_set, unigram_entropy
from bertsmith.pretraining.initial_model import build_initial_model
from bertsmith.recipe.load import load_recipe, recipe_text
from bertsmith.recipe.schema import Recipe
from bertsmith.training.budget import Budget
from bertsmith.training.cuda_graphs import recording_of
from bertsmith.training.distributed import World, share_work
from bertsmith.training.job import Start
from bertsmith.training.journal import write_versions
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import GradientGuard, Progress, Trainer, loss_scaler
from bertsmith.training.weight_average import WeightAverage

STORE_FILE, TEACHER_FILE, PLANS = "store.json", "teacher.json", "plans"


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run that are the same from its first step to its last."""

    recipe: Recipe
    store: TokenStore
    folder: RunFolder
    start: Start
    objective: PretrainingObjective
    trainer: Trainer
    budget: Budget
    machine: Machine
    train_data: PretrainingDataset
    held_out_data: PretrainingDataset
    teacher_hash: str
    """Hash of the teacher, or "" without a teacher."""
    notes: tuple[str, ...]
    fixed_sets: list[HeldOutSet]
    """The set of the fixed evaluation as a list of one, or empty for a run without a fixed evaluation."""
    held_out_sets: dict[int, HeldOutSet] = field(default_factory=dict)
    """Held-out set by stage, built at first use."""

    @property
    def world(self) -> World:
        """The processes that share the run."""
        return self.trainer.world

    @property
    def stages(self) -> Stages:
        """The stages of the recipe by the budget."""
        return Stages(self.recipe, self.budget)

    @property
    def unigram_entropy(self) -> float:
        """Loss of a model that only knows token frequencies."""
        return unigram_entropy(self.store.token_counts, self.recipe.masking.smoothing)

    def held_out_set(self, stage: int) -> HeldOutSet:
        """Return the held-out set of a stage."""
        if stage not in self.held_out_sets:
            batch, length = self.recipe.batch, self.recipe.examples.stages[stage].length
            rows = batch.sequences if batch.by == "sequences" else max(1, batch.tokens // length)
            self.held_out_sets[stage] = held_out_set(self.held_out_data, stage, self.world, block=rows)
        return self.held_out_sets[stage]

    def average_weights(self, progress: Progress) -> None:
        """Add the current weights to the average, if the recipe has one and its start is reached."""
        average, begins = self.trainer.average, self.recipe.run.average_from
        if average is not None and begins != "off" and self.budget.fraction(progress) > begins:
            average.add()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context that replaces the weights by their average, if any, as in the final model."""
        return nullcontext() if self.trainer.average is None else self.trainer.average.applied()


def set_up(recipe: Recipe, store: TokenStore, folder: RunFolder, start: Start) -> Run:
    """Build a run, new or to be restored; its folder is checked, the recipe's architecture is true."""
    initial, world, saved = build_initial_model(recipe, store), start.world, start.saved
    micro_tokens = None if saved is None else int(saved.state.scalars["micro_tokens"])
    machine = fit_machine(
        recipe, initial.network, world, other=initial.other, micro_tokens_before=micro_tokens
    )
    loading: dict[str, Any] = {"rank": world.rank, "world": world.size, "cache": folder.path / PLANS}
    loading |= {"micro_tokens": machine.micro_tokens, "multiples": machine.multiples}
    loading |= {"fields": declaration(recipe).fields}
    train = PretrainingDataset(store, recipe, split="train", **loading)
    held_out = PretrainingDataset(store, held_out_recipe(recipe, machine), split="held-out", **loading)
    fixed = fixed_data(store, recipe, world, micro_tokens=machine.micro_tokens, cache=folder.path / PLANS)
    teacher = "" if initial.teacher is None else network_hash(initial.teacher)
    world.on_main(store.verify)
    world.on_main(lambda: _check_before_it_begins(folder, (train, held_out), teacher))
    build = OBJECTIVES[recipe.examples.objective].build
    # A teacher is not a part of the objective, so `.to` does not move it with the objective.
    other = None if initial.other is None else initial.other.to(world.device)
    objective = build(initial.network, other, recipe).to(world.device).train()
    return Run(
        recipe,
        store,
        folder,
        start,
        objective,
        build_trainer(recipe, objective, machine, world),
        budget_of(recipe),
        machine,
        train,
        held_out,
        teacher,
        notes=(*initial.notes, *choices(recipe), *fixed_notes(recipe), *machine.notes),
        fixed_sets=[fixed_set(fixed, world)] if objective.declared.fixed else [],
    )


def run_folder(out: Path) -> RunFolder:
    """Return the folder of a pre-training run; the run writes its model last."""
    early = frozenset({STORE_FILE, TEACHER_FILE, "versions.json", "source.sha256"})
    return RunFolder(out, "recipe.toml", "result.json", early_files=early, caches=(PLANS,))


def _check_before_it_begins(folder: RunFolder, datasets: Sequence[PretrainingDataset], teacher: str) -> None:
    """Raise if a stage lacks steps or the teacher has changed."""
    # Before the folder is a run, which would not accept a store with more text.
    for dataset in datasets:
        for stage in range(len(dataset.recipe.examples.stages)):
            dataset.stage_index(stage).steps_in(0)
    folder.check_same_run({"teacher": teacher} if teacher else {}, lambda: begun_with(folder))


def begun_with(folder: RunFolder) -> dict[str, Any]:
    """Return the recipe of a run, and the hashes of its store and its teacher, if any."""
    files = {name: folder.path / file for name, file in (("store", STORE_FILE), ("teacher", TEACHER_FILE))}
    remedy = "start the run again in another folder"
    hashes = {name: read_json(file, remedy=remedy)["hash"] for name, file in files.items() if file.is_file()}
    return {"recipe": load_recipe(folder.config).model_dump(), **hashes}


def begin_folder(run: Run) -> None:
    """Write the files that describe a run."""
    folder, store = run.folder, run.store
    folder.remove_partial_files()
    write_versions(folder.path)
    if run.teacher_hash:
        write_json(folder.path / TEACHER_FILE, {"hash": run.teacher_hash})
    write_json(folder.path / STORE_FILE, {"hash": store.hash, "tokens": store.tokens})
    write_text(folder.config, recipe_text(run.recipe))  # last, because it marks the folder as a run


def network_hash(network: Network) -> str:
    """Return a hash of a network's config and weights."""
    digest = hashlib.sha256(repr(network.config).encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


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
