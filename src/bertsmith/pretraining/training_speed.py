"""The training speed of this machine, measured in a few seconds with real steps of a few shapes.

The time of a step is linear in its tokens, with a fixed part for the optimiser, Python and kernel launches.
Both parts are measured for small shapes, one after the other. Larger shapes, with steps that take too long,
are extrapolated from the last one: the fixed part by the work of an update, the rest by a token's operations.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.collate import PretrainingBatch, counts_of
from bertsmith.model.encoder_config import PassSize
from bertsmith.objectives.registry import OBJECTIVES, declaration
from bertsmith.packed import pack
from bertsmith.pretraining.hardware import Machine, fit_machine
from bertsmith.pretraining.initial_model import build_initial_model
from bertsmith.pretraining.run_setup import build_trainer
from bertsmith.recipe.load import encoder_parameters
from bertsmith.recipe.schema import Recipe
from bertsmith.training.distributed import World
from bertsmith.training.trainer import StepInput, Trainer, same_bits, take_step

CPU_SEQUENCES, GPU_SEQUENCES = (4, 16), (64, 480)
REPEATS = 3
LEAST_CPU_SHARE, LEAST_GPU_SHARE = 0.1, 0.03
"""Minimum fraction of a step's time that its tokens take. On a GPU, an uncompiled step of a small shape is
mostly kernel launches, for any number of tokens: set by two runs on an H200 (bench/README.md)."""
ADAM_WORK = 30
"""Work of Adam per weight, from the fixed parts of 2x64 to 6x384 on a CPU; it is bound by memory."""
COMPILED_GAIN, RECORDED_SECONDS = 1.5, 0.002
"""Assumed speedup of a token on a GPU by compiling, because uncompiled steps are measured, and assumed fixed
seconds of a recorded step. No run has tested these assumptions.
"""


@dataclass(frozen=True, slots=True)
class ShapeSpeed:
    """The training speed of one shape."""

    fixed_seconds: float
    """Fixed seconds of a step, without its tokens."""
    token_seconds: float
    flops: float
    """Operations per token."""
    update_work: float
    """Operations of an optimiser update, up to a factor (`update_work`)."""
    measured: bool = True

    def step_seconds(self, tokens: float) -> float:
        """Return the seconds of a step of this many tokens."""
        return self.fixed_seconds + tokens * self.token_seconds

    def scaled_to(self, recipe: Recipe, vocabulary: int) -> "ShapeSpeed":
        """Extrapolate the speed of another shape from the operations of its updates and tokens."""
        work, flops = update_work(recipe, vocabulary), token_flops(recipe, vocabulary)
        fixed = self.fixed_seconds * work / self.update_work
        return ShapeSpeed(fixed, self.token_seconds * flops / self.flops, flops, work, measured=False)


def layer_weights(recipe: Recipe) -> int:
    """Return the number of the encoder's weights without embeddings."""
    return encoder_parameters(recipe.model, 1) - recipe.model.width


def update_work(recipe: Recipe, vocabulary: int) -> float:
    """Return the operations of an update, up to a factor: Muon's in the layers, Adam's on embeddings."""
    return float(recipe.model.width * (layer_weights(recipe) + ADAM_WORK * vocabulary))


def token_flops(recipe: Recipe, vocabulary: int) -> float:
    """Return the operations of training per token of the first stage."""
    config, stage = recipe.model.encoder_config(vocabulary), recipe.examples.stages[0]
    layers = config.operations(PassSize(stage.length, 1)) / stage.length
    generator = recipe.replaced.generator_size if recipe.examples.has_generator else 0.0
    head = 2 * (config.width + vocabulary) * config.width * stage.predictions / stage.length
    return 3 * (layers * (1 + generator) + head)


def measure_speeds(
    recipes: Sequence[Recipe], store: TokenStore, world: World, *, seconds: float
) -> list[ShapeSpeed]:
    """Measure the speed of each recipe's shape, smallest first; extrapolate shapes that take too long."""
    ends, speeds, last = time.monotonic() + seconds, list[ShapeSpeed](), None
    for recipe in recipes:
        speed = None if last is None else last.scaled_to(recipe, store.vocabulary)
        if speed is None or time.monotonic() + _measuring_seconds(speed, recipe, world) < ends:
            speed = last = measured_speed(recipe, store, world)
            if world.device.type == "cuda":
                torch.cuda.empty_cache()  # otherwise torch's cache does not count as free memory
        speeds.append(speed)
    return speeds


def _sequences(world: World) -> tuple[int, int]:
    """Return the sequences of the two measured steps; the difference of their times is due to tokens."""
    return GPU_SEQUENCES if world.device.type == "cuda" else CPU_SEQUENCES


def _measuring_seconds(speed: ShapeSpeed, recipe: Recipe, world: World) -> float:
    """Estimate the seconds to measure a shape of this speed."""
    length = recipe.examples.stages[0].length
    return (1 + REPEATS) * sum(speed.step_seconds(each * length) for each in _sequences(world))


def measured_speed(recipe: Recipe, store: TokenStore, world: World) -> ShapeSpeed:
    """Measure the speed of a recipe's shape with steps on random tokens."""
    on_gpu, length = world.device.type == "cuda", recipe.examples.stages[0].length
    trainer, machine = _trainer(recipe, store, world)
    most = min(
        _sequences(world)[1], max(2, machine.micro_tokens // length)
    )  # one forward pass, which fits into memory
    fewest = min(_sequences(world)[0], most // 2)
    with same_bits(machine.deterministic):
        few, many = (
            _seconds(trainer, _random_step(recipe, store.vocabulary, count)) for count in (fewest, most)
        )
    least = LEAST_GPU_SHARE if on_gpu else LEAST_CPU_SHARE
    each = max(many - few, least * many) / ((most - fewest) * length)
    fixed = max(0.0, many - each * most * length)
    work = update_work(recipe, store.vocabulary)
    if on_gpu:
        each, fixed = each / COMPILED_GAIN, min(fixed, RECORDED_SECONDS)
    return ShapeSpeed(fixed, each, token_flops(recipe, store.vocabulary), work)


def _trainer(recipe: Recipe, store: TokenStore, world: World) -> tuple[Trainer, Machine]:
    """Build the uncompiled trainer of a run of this recipe, and its settings on this machine."""
    plain = recipe.model_copy(update={"run": recipe.run.model_copy(update={"compile": "off"})})
    initial = build_initial_model(plain, store)
    machine = fit_machine(plain, initial.network, world, other=initial.other)
    objective = OBJECTIVES[plain.examples.objective].build(initial.network, initial.other, plain)
    trainer = build_trainer(plain, objective.to(world.device).train(), machine, world)
    return trainer, machine


def _seconds(trainer: Trainer, step: StepInput) -> float:
    """Return the seconds of a step, the fastest of a few after the first one."""
    found = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        take_step(trainer, step)
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize(trainer.world.device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _random_step(recipe: Recipe, vocabulary: int, sequences: int) -> StepInput:
    """Return a step of random tokens in sequences of full length, masked as often as in the recipe."""
    stage, generator = recipe.examples.stages[0], torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (sequences, stage.length), generator=generator)
    inputs, tokens, masked = pack(ids.tolist()), ids.numel(), sequences * stage.predictions
    rows_P = torch.randperm(tokens, generator=generator)[:masked].sort().values
    ids_P, weights_P = inputs.tokens_T[rows_P], torch.ones(masked)
    known = {"masked_rows_P": rows_P, "masked_ids_P": ids_P, "masked_weights_P": weights_P}
    empty = {"P": torch.zeros_like(rows_P), "S": torch.zeros(sequences, dtype=torch.long), "T": ids.flatten()}
    declared = declaration(recipe)
    fields = {each.name: known.get(each.name, empty[each.per]) for each in declared.fields}
    batch = PretrainingBatch(inputs, torch.tensor([tokens]), fields)
    found = counts_of([batch], declared.fields)
    counts = tuple(found[name] for name in declared.counts)
    return StepInput([batch], counts, recipe.optim.peak_lr, tokens=tokens)
