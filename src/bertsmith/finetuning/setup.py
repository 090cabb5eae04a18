"""Everything a fine-tuning run needs, from its assignment and the examples that were read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path

import torch

from bertsmith.finetuning.beginning import Beginning, begin
from bertsmith.finetuning.folder import Assignment, TuningFolder
from bertsmith.finetuning.material import Material, Sheet, encoded_sheet, note_of
from bertsmith.finetuning.number_scale import NumberScale, scale_of
from bertsmith.finetuning.remarks import on_cuts, on_exams, on_numbers, on_steps
from bertsmith.ground.errors import UserError
from bertsmith.inference.task_model import TaskModel, scorer_of
from bertsmith.model.network import Network
from bertsmith.model.varlen_attention import flash_fits
from bertsmith.recipe.finetuning import FinetuningRecipe
from bertsmith.tasks.batches import ShuffledBatches, balanced_weights
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import TaskObjective
from bertsmith.tasks.task_file import TaskNote
from bertsmith.training.parallel import World, start_world
from bertsmith.training.step_graphs import recording_of
from bertsmith.training.steps import Caution, Learner, Precision
from bertsmith.training.tuning import build_tuning_optimizer

CPU_HALF_MULTIPLE = 32
"""A CPU's half-precision products are compiled for each shape (oneDNN); 10 % of a step where all differ."""
LEAST_MULTIPLE, LARGEST_MULTIPLE = 64, 512
SIZES_OF_STEPS = 24
"""Into so many parts the tokens of a usual step are counted: few sizes to record, and little filler."""


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same from a run's first step to its last."""

    assignment: Assignment
    learner: Learner
    model: TaskModel
    """The network that learns, as it is asked."""
    batches: ShuffledBatches
    exams: Mapping[str, Sheet]
    examples: int
    """For training, each counted once."""
    notes: tuple[str, ...]
    """What the user should know of the beginning."""
    scale: NumberScale | None = None
    """On which numbers are learned, where they are a user's own."""

    @property
    def recipe(self) -> FinetuningRecipe:
        """How it is done."""
        return self.assignment.recipe

    @property
    def folder(self) -> TuningFolder:
        """Where it is written."""
        return TuningFolder(self.assignment.out)


def set_up(assignment: Assignment, material: Material) -> Run:
    """The run of an assignment, before its first step; nothing is written yet."""
    recipe, note = assignment.recipe, note_of(material, assignment.recipe)
    _refuse_lack_of_exams(material, recipe)
    world = _single_world(recipe)
    beginning = begin(assignment.model, note, seed=recipe.run.seed)
    sheets = {
        name: encoded_sheet(examples, note, beginning.tokenizer, cache=cache_folder())
        for name, examples in material.splits.items()
    }
    learner, model = learner_and_model(beginning, note, recipe, world)
    train, scale = sheets["train"], scale_of(material.task, sheets["train"].encoded)
    if scale is not None and beginning.kept:
        scale.take_out_of(model.objective.scorer)
    batches = _batches(scale.learned(train.encoded) if scale else train.encoded, note, recipe, world)
    remarks = (
        *on_exams(assignment, material),
        *on_cuts(train, note, beginning.tokenizer),
        *on_steps(batches, recipe),
        *on_numbers(scale),
    )
    return Run(
        assignment,
        learner,
        model,
        batches=batches,
        exams={name: sheets[name] for name in material.exams},
        examples=len(material.splits["train"]),
        notes=(*beginning.notes, *remarks),
        scale=scale,
    )


def learner_and_model(
    beginning: Beginning, note: TaskNote, recipe: FinetuningRecipe, world: World
) -> tuple[Learner, TaskModel]:
    """What learns, and the same network as it is asked."""
    gpu = world.device.type == "cuda"
    precision = ("bf16" if gpu else "fp32") if recipe.run.precision == "auto" else recipe.run.precision
    network, seed = beginning.network, recipe.run.seed
    scorer = scorer_of(network, note, beginning.tokenizer, seed=seed, fresh=beginning.fresh)
    objective = TaskObjective(scorer.to(world.device), note.kind, span_over=note.head.span_over).train()
    wanted = recipe.run.compile == "on" or (recipe.run.compile == "auto" and gpu)
    if wanted and note.head.encoder != "frozen-mix":  # an LSTM is no part of a graph
        objective.compile_whole()
    optimizer = build_tuning_optimizer(scorer, recipe.optim)
    recordable = objective.compiled and _recordable(network, precision, world.device)
    graphs = recording_of(optimizer, world.device) if recordable else None
    learner = Learner(objective, optimizer, world, precision, recipe.optim.clip_norm, Caution("off"), graphs)
    return learner, TaskModel(objective, beginning.tokenizer, note, world.device, precision)


def _recordable(network: Network, precision: Precision, device: torch.device) -> bool:
    """Whether a step can be recorded: only flash attention never looks at the lengths on the CPU."""
    shape = network.shape
    return device.type == "cuda" and precision == "bf16" and flash_fits(shape.width // shape.heads, device)


def cache_folder() -> Path:
    """Where encoded splits are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "bertsmith" / "encodings"


def _batches(train: EncodedSet, note: TaskNote, recipe: FinetuningRecipe, world: World) -> ShuffledBatches:
    balanced = note.head.class_weights == "balanced"
    return ShuffledBatches(
        train,
        examples_per_step=recipe.run.examples,
        seed=recipe.run.seed,
        micro_tokens=recipe.run.micro_tokens,
        multiple=filling_multiple(train, recipe, world.device),
        class_weights_C=balanced_weights(train, len(note.labels)) if balanced else None,
    )


def filling_multiple(encoded: EncodedSet, recipe: FinetuningRecipe, device: torch.device) -> int:
    """To multiples of this many tokens the steps are filled up, where a new shape costs time; or 1."""
    if device.type != "cuda":
        return CPU_HALF_MULTIPLE if recipe.run.precision == "bf16" else 1
    tokens = recipe.run.examples * len(encoded.tokens_T) / encoded.items
    return min(max(LEAST_MULTIPLE, int(2 ** round(log2(tokens / SIZES_OF_STEPS)))), LARGEST_MULTIPLE)


def _single_world(recipe: FinetuningRecipe) -> World:
    world = start_world(recipe.run.device)
    if world.size > 1:
        what = f"fine-tuning runs in one process, and {world.size} were started"
        raise UserError(what, remedy="start it without torchrun")
    return world


def _refuse_lack_of_exams(material: Material, recipe: FinetuningRecipe) -> None:
    """Stop where a setting needs a development set and there is none."""
    needs = {
        "run.keep": (recipe.run.keep == "best", "last"),
        "answers.null_threshold": (recipe.answers.null_threshold == "tuned", "0.0"),
    }
    for key, (needed, instead) in needs.items():
        if needed and not material.exams:
            what = "needs a development set, and there is none"
            raise UserError(what, where=key, remedy=f"add its file, or --set {key}={instead}")
