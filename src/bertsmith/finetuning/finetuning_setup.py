"""Setup of a fine-tuning run: encoded splits, the trainer, batches, and notes for the user."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
import torch

from bertsmith.core.cache import cache_folder
from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.finetuning.assignment import (
    Assignment,
    finetuning_folder,
    with_micro_tokens,
)
from bertsmith.finetuning.evaluation import parts_of_first
from bertsmith.finetuning.feature_cache import cached_states, cached_vectors
from bertsmith.finetuning.initial_task_model import DROPOUTS, InitialTaskModel, load_initial_task_model
from bertsmith.finetuning.linear_probe import Solution, solve_head
from bertsmith.finetuning.run_warnings import (
    describe_adapters,
    describe_micro_tokens,
    describe_solved_head,
    describe_target_scaler,
    total_steps,
    warn_of_cut_texts,
    warn_of_few_steps,
    warn_of_no_development_set,
    warn_of_vain_patience,
    warn_of_weak_development_set,
)
from bertsmith.finetuning.splits import EncodedSplit, TaskSplits, encoded_split, task_config_of
from bertsmith.finetuning.target_scaler import TargetScaler, fit_target_scaler
from bertsmith.finetuning.teacher_scores import Teachers, teacher_note
from bertsmith.inference.task_model import TaskModel, scorer_of
from bertsmith.model.encoder import can_compile
from bertsmith.model.lora import LoraShape, add_fresh_adapters
from bertsmith.model.network import Network
from bertsmith.objectives.step_memory import TrainingLoad, estimate_memory
from bertsmith.packed import SHORT_LENGTH
from bertsmith.recipe.finetuning_schema import FinetuningRecipe, LoraSection
from bertsmith.tasks.batches import ShuffledBatches, balanced_weights
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import TaskObjective, freeze_encoder
from bertsmith.tasks.task_config import TaskConfig, check_label_thresholds
from bertsmith.training.budget import Epochs, Minutes, Work
from bertsmith.training.cuda_graphs import StepFacts, recording_of, why_not_recorded
from bertsmith.training.distributed import World, share_work
from bertsmith.training.memory_share import plannable_gpu_bytes
from bertsmith.training.optimizers import (
    OPTIMIZERS,
    build_optimizer,
)
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import (
    GradientGuard,
    Trainer,
    choose_precision,
    loss_scaler,
)

CPU_HALF_MULTIPLE = 32
"""oneDNN compiles half-precision products for each shape: 10 % of a CPU step if all shapes differ."""
MICRO_TOKENS = 16_384
GPU_MICRO_TOKENS = (65_536, 32_768)
"""Tokens that keep a large GPU busy: launching a pass of BERT-Base takes 30 ms, however small it is."""
FORWARD_AND_BACKWARD = 3
"""Cost of a training token relative to an evaluated one: the backward pass takes twice as long."""
MIN_MULTIPLE, MAX_MULTIPLE = 64, 512
SIZES_OF_STEPS = 24
"""Approximate tokens of a usual step in multiples: few sizes to record, and little filler."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run that stay the same from its first step to its last."""

    assignment: Assignment
    trainer: Trainer
    model: TaskModel
    """The network that is trained, in its form for prediction."""
    batches: ShuffledBatches
    budget: Epochs
    evaluation_splits: Mapping[str, EncodedSplit]
    """Splits to evaluate on, the deciding one first."""
    train: EncodedSplit
    notes: tuple[str, ...]
    """Messages to the user before the first step."""
    scaler: TargetScaler | None = None
    """Scaler of the targets if they are a user's own numbers, else None."""
    solved: bool = False
    """True if the head began as the optimal linear head on the encoder (`linear_probe`)."""
    solution: Solution | None = None
    """The head's solution that this start computed; None if it resumes."""

    @property
    def tunes(self) -> bool:
        """True if the run takes steps: a solved head on a frozen encoder is optimal already."""
        return not (self.solved and self.recipe.head.encoder == "frozen-linear")

    @property
    def examples(self) -> int:
        """Training examples, each counted once."""
        return len(self.train.examples)

    @property
    def recipe(self) -> FinetuningRecipe:
        """Return the recipe of the run."""
        return self.assignment.recipe

    @property
    def world(self) -> World:
        """Return the processes that share the run."""
        return self.trainer.world

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""
        return finetuning_folder(self.assignment.out)


def set_up(assignment: Assignment, splits: TaskSplits, world: World, *, resumes: bool = False) -> Run:
    """Return the run of an assignment, without writing to its folder; every process must call it.

    `resumes`: saved weights will be loaded.
    """
    run = world.main_first(lambda: _set_up_here(assignment, splits, world, resumes=resumes))
    shared = share_work(run.trainer.objective, world, "ddp")
    return replace(run, trainer=replace(run.trainer, objective=shared))


def _set_up_here(assignment: Assignment, splits: TaskSplits, world: World, *, resumes: bool) -> Run:
    """Return the run for this process alone, without sharing its gradients."""
    recipe, config = assignment.recipe, task_config_of(splits, assignment.recipe)
    _check_development_set(splits, recipe)
    check_label_thresholds(config, where="answers.label_thresholds")
    dropouts = {key: rate for key in DROPOUTS if (rate := getattr(recipe.run, key)) != "model"}
    initial = load_initial_task_model(assignment.model, config, seed=recipe.run.seed, dropouts=dropouts)
    encoded = {
        name: encoded_split(examples, config, initial.tokenizer, cache=cache_folder("encodings"))
        for name, examples in splits.splits.items()
    }
    trainer, model = build_trainer(initial, config, recipe, world)
    if config.head.encoder == "frozen-features":
        encoded = {name: _with_states(split, model) for name, split in encoded.items()}
    train = encoded["train"]
    if recipe.distill.teachers:
        half = trainer.precision == "bf16"
        caches = cache_folder("encodings"), cache_folder("teacher-scores")
        asked = Teachers(recipe.distill.teachers, config, world.device, "bf16" if half else "fp32", *caches)
        train = asked.taught(train, initial.network)
    scaler = fit_target_scaler(splits.task, train.encoded, model.scorer)
    if scaler is not None and initial.kept:
        scaler.take_out_of(model.scorer)
    train_set = train.encoded
    if scaler is not None:
        told = None if train_set.teacher is None else scaler.transform(train_set.teacher)
        train_set = replace(train_set, targets=scaler.transform(train_set.targets), teacher=told)
    balanced = config.head.class_weights == "balanced"
    most_tokens = micro_tokens(initial.network, train_set, recipe, world)
    batches = ShuffledBatches(
        train_set,
        examples_per_step=recipe.run.examples,
        seed=recipe.run.seed,
        micro_tokens=most_tokens,
        multiple=filling_multiple(train_set, recipe, world),
        class_weights_C=balanced_weights(config.kind, train_set, len(config.labels)) if balanced else None,
        rank=world.rank,
        world=world.size,
    )
    solved = solves_head(recipe, config, kept=initial.kept)
    solution = None
    if solved and not resumes:
        vectors = cached_vectors(train_set, model, cache_folder("features"))
        solution = solve_head(model, train_set, vectors, batches.class_weights_C)
    evaluated = {name: encoded[name] for name in splits.evaluation_names}
    parts = parts_of_first(config.kind, evaluated)  # evaluated with the first
    tokens = [len(split.encoded.tokens_T) for name, split in evaluated.items() if name not in parts]
    run = Run(
        with_micro_tokens(assignment, most_tokens),
        trainer,
        model,
        batches=batches,
        budget=budget_of(batches, recipe, tokens),
        evaluation_splits=evaluated,
        train=train,
        notes=initial.notes,
        scaler=scaler,
        solved=solved,
        solution=solution,
    )
    warnings = (
        *warn_of_no_development_set(assignment, splits),
        *warn_of_weak_development_set(splits),
        *((assignment.reason,) if assignment.reason else ()),
        *warn_of_cut_texts(train, config, initial.tokenizer),
        *(warn_of_few_steps(batches, recipe) if run.tunes else ()),
        *(warn_of_vain_patience(batches, recipe) if run.tunes else ()),
        *describe_solved_head(solved=solved),
        *describe_adapters(initial.network, recipe),
        *describe_target_scaler(scaler),
        *describe_micro_tokens(recipe, most_tokens, world.device.type),
        *teacher_note(recipe.distill, train.examples),
    )
    return replace(run, notes=(*run.notes, *warnings))


def budget_of(
    batches: ShuffledBatches, recipe: FinetuningRecipe, evaluated_tokens: Sequence[int] = ()
) -> Epochs:
    """Return the budget of a run that evaluates splits of these token counts, the deciding one first."""
    settings, steps = recipe.run, total_steps(batches, recipe)
    work = Work(
        one_step=FORWARD_AND_BACKWARD * len(batches.encoded.tokens_T) / batches.steps_per_epoch,
        evaluation_steps=frozenset(
            round(steps * number / settings.evaluations) for number in range(1, settings.evaluations)
        ),
        one_evaluation=evaluated_tokens[0] if evaluated_tokens else 0,
        end=sum(evaluated_tokens),
    )
    return Epochs(steps, work, None if settings.minutes == "off" else Minutes(settings.minutes))


def solves_head(recipe: FinetuningRecipe, config: TaskConfig, *, kept: bool) -> bool:
    """True if the head begins as the optimal linear head on the encoder."""
    asked = recipe.head.weights == "solved"
    if config.kind.linear_problem is None:
        if asked:
            what = f"the scores of a {config.kind.name} head compete: a linear optimum does not exist"
            raise UserError(what, key="head.weights", remedy="keep it at fresh")
        return False
    if recipe.head.encoder == "frozen-linear":
        return not recipe.distill.teachers
    return asked and not kept and not recipe.head.has_bilstm


def build_trainer(
    initial: InitialTaskModel, config: TaskConfig, recipe: FinetuningRecipe, world: World
) -> tuple[Trainer, TaskModel]:
    """Return the trainer, and its network in the form for prediction."""
    gpu, precision = world.device.type == "cuda", choose_precision(recipe.run.precision, world.device)
    network, seed = initial.network, recipe.run.seed
    if config.head.encoder == "lora":
        freeze_encoder(network, fresh=initial.fresh)
        stream = torch.Generator().manual_seed(key_of(seed, "lora"))
        add_fresh_adapters(network, recipe.lora.targets, lora_shape(recipe.lora), stream)
    scorer = scorer_of(network, config, initial.tokenizer, seed=seed, fresh=initial.fresh)
    network.encoder.recompute = recipe.run.recompute
    objective = TaskObjective(scorer.to(world.device), config.kind, config.head, recipe.distill).train()
    # An LSTM cannot be part of a graph.
    one_graph = can_compile(objective) and not config.head.has_bilstm
    if one_graph and (recipe.run.compile == "on" or (recipe.run.compile == "auto" and gpu)):
        objective.compile_whole()
    optimizer = build_optimizer(scorer, recipe.optim)
    facts = StepFacts(
        world.device,
        precision,
        recipe.optim.algorithm,
        [network.encoder],
        world.size,
        one_graph,
        recipe.run.recompute,
        followed=recipe.sparse.has_masks,
    )
    graphs = None if why_not_recorded(facts) else recording_of(optimizer, world.device)
    clip_norm, guard = recipe.optim.clip_norm, GradientGuard("off")
    loss_scale = loss_scaler(world.device, precision)
    trainer = Trainer(objective, optimizer, world, precision, clip_norm, guard, graphs, seed, loss_scale)
    return trainer, TaskModel(objective, initial.tokenizer, config, world.device, precision)


def lora_shape(lora: LoraSection) -> LoraShape:
    """Return the shape of the adapters in a recipe."""
    return LoraShape(lora.rank, lora.alpha, lora.dropout, lora.rank_stabilized)


def _with_states(split: EncodedSplit, model: TaskModel) -> EncodedSplit:
    states_L = cached_states(split.encoded, model, cache_folder("features"))
    return replace(split, encoded=replace(split.encoded, states_L=states_L))


def micro_tokens(network: Network, encoded: EncodedSet, recipe: FinetuningRecipe, world: World) -> int:
    """Return the most tokens in one forward pass; if "auto" on a GPU, as many as its free memory allows."""
    if recipe.run.micro_tokens != "auto":
        return recipe.run.micro_tokens
    if world.device.type != "cuda":
        return MICRO_TOKENS
    load = TrainingLoad(
        config=network.config,
        parameters=sum(each.numel() for each in network.parameters()),
        moments=OPTIMIZERS[recipe.optim.algorithm].moments,
        longest=int(np.diff(encoded.starts_N1).max(initial=1)),
        predicted_fraction=0.0,
        device="cuda",
        precision=choose_precision(recipe.run.precision, world.device),
        recompute=recipe.run.recompute,
    )
    # Twice that: a step of a new size needs memory in addition to the recorded steps' memory.
    free = plannable_gpu_bytes(world.device)
    fitting = (each for each in GPU_MICRO_TOKENS if 2 * estimate_memory(load, each).total <= free)
    return next(fitting, MICRO_TOKENS)


def filling_multiple(encoded: EncodedSet, recipe: FinetuningRecipe, world: World) -> int:
    """Return the multiple of tokens that steps are padded to if new shapes cost time, else 1."""
    if world.device.type != "cuda":
        return CPU_HALF_MULTIPLE if recipe.run.precision == "bf16" else 1
    tokens = recipe.run.examples / world.size * len(encoded.tokens_T) / encoded.items
    # Filler is one sequence: if all texts are short, it must be short as well.
    short = np.diff(encoded.starts_N1).max() <= SHORT_LENGTH
    most = SHORT_LENGTH if short else MAX_MULTIPLE
    return min(max(MIN_MULTIPLE, int(2 ** round(log2(tokens / SIZES_OF_STEPS)))), most)


def _check_development_set(splits: TaskSplits, recipe: FinetuningRecipe) -> None:
    """Raise if a setting requires a development set and the data lack one."""
    needs = {
        "run.keep": (recipe.run.keep == "best", "last"),
        "answers.null_threshold": (recipe.answers.null_threshold == "tuned", "0.0"),
        "answers.label_thresholds": (recipe.answers.label_thresholds == "tuned", "off"),
    }
    for key, (needed, instead) in needs.items():
        if needed and not splits.evaluation_names:
            what = "needs a development set, which is missing"
            raise UserError(what, key=key, remedy=f"add its file, or `{key}={instead}`")
