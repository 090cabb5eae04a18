"""Choices for running a recipe on this machine: the values of "auto", and what was chosen."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bertsmith.core.errors import DoesNotFit
from bertsmith.data.collate import Multiples
from bertsmith.model.encoder import can_compile
from bertsmith.model.encoder_config import EncoderConfig, PassSize
from bertsmith.model.flops import flops_per_step
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.objectives.registry import OBJECTIVES, declaration
from bertsmith.objectives.step_memory import (
    TrainingLoad,
    estimate_memory,
    gibibytes,
    largest_micro_batch,
)
from bertsmith.recipe.data_sections import Stage
from bertsmith.recipe.model_section import keys_of
from bertsmith.recipe.schema import Recipe
from bertsmith.training.cuda_graphs import StepFacts, why_not_recorded
from bertsmith.training.distributed import World
from bertsmith.training.memory_share import plannable_gpu_bytes, share_of
from bertsmith.training.optimizers import OPTIMIZERS, optimizer_text
from bertsmith.training.trainer import Precision, choose_precision

CPU_MICRO_TOKENS = 8_192
GPU_MICRO_TOKENS = 65_536
"""Maximum tokens of a forward pass on a GPU; larger passes are not faster."""
CPU_MICRO_OPERATIONS = 4e11
"""Some seconds on a few slow cores: a request to stop is noticed only between two passes."""
GPU_LOADER_WORKERS = 4
GPU_EVALUATION_SEQUENCES, CPU_EVALUATION_SEQUENCES = 2048, 128
"""Sequences of a held-out evaluation: it should take seconds, because a run of minutes has twelve of them."""
MIN_EVALUATION_SEQUENCES = 16
MAX_EVALUATION_FRACTION = 0.1
"""Maximum fraction of a run's time for evaluations of "auto"; a single one takes at most a quarter of it."""
GPU_MULTIPLE, CPU_MULTIPLE = 64, 8
"""Token counts are rounded up to these by a filler sequence: matrix units are fast at round numbers."""
RECORDED_FLOPS = 2e13
"""Maximum operations of a recorded step: below it, a GPU waits for Python to launch its kernels."""
TOKEN_PARTS, PREDICTED_PARTS, SEQUENCE_PARTS = 64, 32, 4
"""Number of parts that the sizes of a recorded step are rounded to: few sizes to record, and little filler.

Empty sequences cost nothing.
"""
MEMORY_OF_LINUX = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """The values chosen for a recipe's "auto"s."""

    precision: Precision
    compiled: bool
    deterministic: bool
    micro_tokens: int
    multiples: Multiples
    recorded: bool
    """True if whole steps are recorded as CUDA graphs."""
    loader_workers: int
    evaluation_sequences: int
    notes: tuple[str, ...]


def fit_machine(
    recipe: Recipe,
    network: Network,
    world: World,
    *,
    other: Network | None = None,
    micro_tokens_before: int | None = None,
) -> Machine:
    """Return the values of "auto" on this machine; raise if the recipe cannot fit into memory.

    The other network is the generator or the teacher that the objective has.

    A resumed run keeps its micro-batches if they still fit: other sizes would round differently.
    """
    run, on_gpu = recipe.run, world.device.type == "cuda"
    sharded = world.size > 1 and run.parallel == "fsdp"
    precision = choose_precision(run.precision, world.device, sharded=sharded)
    cores_for_each = (os.cpu_count() or 1) // world.size
    workers = max(1, min(GPU_LOADER_WORKERS, cores_for_each - 1)) if on_gpu else 0
    networks = [network] if other is None else [network, other]
    compiled = (run.compile == "on" or (run.compile == "auto" and on_gpu)) and all(map(can_compile, networks))
    load = training_load(recipe, networks, world, precision, compiled=compiled)
    facts = StepFacts(
        world.device,
        precision,
        recipe.optim.algorithm,
        [each.encoder for each in networks],
        world.size,
        compiled,
        run.recompute,
        run.spike_factor,
        declaration(recipe).over_the_step,
    )
    recorded = not why_not_recorded(facts) and _is_small(recipe, networks, load)
    multiples = _multiples(recipe, load, on_gpu=on_gpu, recorded=recorded)
    # The last tokens are for filler, so that a step of round size is still one pass.
    usual = GPU_MICRO_TOKENS + multiples.tokens if on_gpu else _cpu_micro_tokens(networks, load)
    micro_tokens, memory = _micro_tokens(recipe, load, world, micro_tokens_before or usual)
    if recorded and step_size(recipe)[0] + multiples.tokens > micro_tokens:  # only one pass is recorded
        recorded, multiples = False, Multiples(GPU_MULTIPLE, GPU_MULTIPLE)
    deterministic = run.deterministic == "on" or (run.deterministic == "auto" and not on_gpu)
    place = f"{world.size} process{'es' if world.size > 1 else ''} on {world.device.type}"
    how = f"{place}, {precision}, {'compiled' if compiled else 'not compiled'}"
    how += ", whole steps as CUDA graphs" if recorded else ""
    bits = "the same bits each time" if deterministic else "last bits may differ from run to run"
    return Machine(
        precision=precision,
        compiled=compiled,
        deterministic=deterministic,
        micro_tokens=micro_tokens,
        multiples=multiples,
        recorded=recorded,
        loader_workers=workers if run.loader_workers == "auto" else run.loader_workers,
        evaluation_sequences=_evaluation_sequences(recipe, on_gpu=on_gpu),
        notes=(f"{how}; {bits}", memory),
    )


def _is_small(recipe: Recipe, networks: Sequence[Network], load: TrainingLoad) -> bool:
    """True if a step is so small that it is worth a recording's filler."""
    tokens, sequences = step_size(recipe)
    return _flops(networks, load, tokens=tokens, sequences=sequences) < RECORDED_FLOPS


def _flops(networks: Sequence[Network], load: TrainingLoad, *, tokens: int, sequences: int) -> float:
    """Return the operations of this many tokens of a step."""
    size = PassSize(tokens, sequences, round(tokens * load.predicted_fraction))
    if load.teacher is None:
        return flops_per_step(networks, size)
    return flops_per_step(networks[:1], size, teacher=networks[1])


def _multiples(recipe: Recipe, load: TrainingLoad, *, on_gpu: bool, recorded: bool) -> Multiples:
    """Return the multiples that the sizes of a micro-batch are rounded up to."""
    if not on_gpu:
        return Multiples(CPU_MULTIPLE, CPU_MULTIPLE)
    if not recorded:
        return Multiples(GPU_MULTIPLE, GPU_MULTIPLE)
    tokens, sequences = step_size(recipe)
    predicted = tokens * load.predicted_fraction

    def part(size: float, parts: int) -> int:
        """Return a power of two that cuts a size into this many parts or a few more."""
        return max(GPU_MULTIPLE, 1 << max(0, int(size / parts).bit_length() - 1))

    return Multiples(
        part(tokens, TOKEN_PARTS), part(predicted, PREDICTED_PARTS), max(1, sequences // SEQUENCE_PARTS)
    )


def step_size(recipe: Recipe) -> tuple[int, int]:
    """Return the approximate tokens and sequences of a step."""
    batch, longest = recipe.batch, max(stage.length for stage in recipe.examples.stages)
    if batch.by == "sequences":
        return batch.sequences * longest, batch.sequences
    return batch.tokens, batch.tokens // longest


def _evaluation_sequences(recipe: Recipe, *, on_gpu: bool) -> int:
    """Return the number of sequences per evaluation: few enough that four fit their part of a short run."""
    run = recipe.run
    if run.evaluation_sequences != "auto":
        return run.evaluation_sequences
    usual = GPU_EVALUATION_SEQUENCES if on_gpu else CPU_EVALUATION_SEQUENCES
    if run.budget == "minutes":  # the seconds of an evaluation are measured (`held_out.evaluate`)
        return usual
    return min(usual, max(MIN_EVALUATION_SEQUENCES, _evaluated_sequences(recipe) // 4))


def affordable_evaluations(recipe: Recipe, sequences: int) -> int:
    """Return the number of evaluations of this size that fit their part of a run; not by the clock: runs of
    steps or tokens make the same ones each time, also if interrupted."""
    return _evaluated_sequences(recipe) // sequences


def _evaluated_sequences(recipe: Recipe) -> int:
    """Return the number of sequences in all evaluations of a run of steps or tokens."""
    run = recipe.run
    longest = max(stage.length for stage in recipe.examples.stages)
    _, for_each_step = step_size(recipe)
    shown = run.steps * for_each_step if run.budget == "steps" else run.tokens // longest
    # Training on a sequence takes a forward and a backward pass, twice the work of a forward pass.
    return int(3 * shown * MAX_EVALUATION_FRACTION)


def choices(recipe: Recipe) -> list[str]:
    """Describe what the recipe does if sources disagree or it deviates from them."""
    batch = recipe.batch
    size = f"{batch.sequences:,} sequences a step"
    # RoBERTa's study of short pairs enlarged its batches to as many tokens as with long pairs.
    if recipe.examples.pairs == "sentence-pair" and batch.by == "sequences":
        size += " (a deviation: for pairs of sentences, the published steps have as many tokens as others)"
    elif batch.by == "tokens":
        size = f"{batch.tokens:,} tokens a step"
        if recipe.examples.pairs != "sentence-pair":
            size += " (a deviation: the published sizes are in sequences)"
    masking = f"{recipe.masking.masks} masks by {recipe.masking.unit}, {recipe.masking.count} count"
    has_activation = "activation" in keys_of(recipe.model.type)
    return [
        f"{recipe.name}: {size}, pairs {recipe.examples.pairs}, {masking}",
        ", ".join([optimizer_text(recipe.optim), *([recipe.model.activation] if has_activation else [])]),
        *_shown_text(recipe),
        *_average_text(recipe),
        *OBJECTIVES[recipe.examples.objective].choices(recipe),
    ]


def _shown_text(recipe: Recipe) -> list[str]:
    """Describe the shown text, as far as a recipe's first lines do not."""
    masking, examples, batch, lines = recipe.masking, recipe.examples, recipe.batch, []
    for stage in examples.stages if examples.masks_tokens else ():
        if round(masking.largest_rate * stage.length) > stage.predictions:
            lines.append(
                f"of {stage.length} tokens at most {stage.predictions} are predicted (examples.stages), "
                f"fewer than {masking.largest_rate:.0%} of them (masking.rate, masking.final_rate)"
            )
    if masking.final_rate != "rate":
        lines.append(f"the masking rate changes from {masking.rate:.0%} to {masking.final_rate:.0%}")
    if examples.single_fraction:
        lines.append(f"{examples.single_fraction:.0%} of the documents are shown without pairs")
    if examples.pair_head != "none" and examples.pair_weight != 1:
        lines.append(f"the loss of pairs is multiplied by {examples.pair_weight:g}: BERT does not do this")
    if examples.short_fraction:
        which = "sequences without pairs" if examples.single_fraction else "sequences"
        lines.append(
            f"{examples.short_fraction:.0%} of the {which} end after at most {examples.short_length} "
            "tokens, or after a sentence"
        )
    if batch.ramp_from != "off":
        rise = f"from {batch.ramp_from:,} to {batch.full_size:,} {batch.by}"
        lines.append(f"steps grow {rise} over the first {batch.ramp_steps:,} steps")
    return lines


def _average_text(recipe: Recipe) -> list[str]:
    begins, decay = recipe.run.average_from, recipe.run.average_decay
    if begins == "off":
        return []
    kind = "equal average" if decay == "equal" else f"exponential average (decay {decay:g})"
    return [f"the model is the {kind} of the weights after {begins:.0%} of the run"]


def training_load(
    recipe: Recipe, networks: Sequence[Network], world: World, precision: Precision, *, compiled: bool
) -> TrainingLoad:
    """Return the properties of a recipe and its networks that determine the memory of a step."""
    hungriest = max(recipe.examples.stages, key=lambda stage: stage.length)
    # A generator's embeddings count twice here, though they are shared: an estimate on the safe side.
    weights = [sum(parameter.numel() for parameter in network.parameters()) for network in networks]
    shared = world.size if recipe.run.parallel == "fsdp" else 1
    has_teacher, others = recipe.examples.has_teacher, [network.config for network in networks[1:]]
    return TrainingLoad(
        config=networks[0].config,
        parameters=(weights[0] if has_teacher else sum(weights)) // shared,
        moments=kept_for_each_weight(recipe),
        longest=hungriest.length,
        predicted_fraction=_predicted_fraction(recipe, hungriest),
        device="cuda" if world.device.type == "cuda" else "cpu",
        precision=precision,
        recompute=recipe.run.recompute,
        compiled=compiled,
        generator=others[0] if others and not has_teacher else None,
        teacher=others[0] if has_teacher else None,
        teacher_parameters=weights[1] if has_teacher else 0,
        compared=_compared(recipe, networks[0].config, others[0], hungriest.length) if has_teacher else 0,
    )


def _compared(recipe: Recipe, student: EncoderConfig, teacher: EncoderConfig, longest: int) -> int:
    """Return the fp32 bytes per token of both models that `distill.*` compares, besides predictions."""
    distill, heads = recipe.distill, 0
    if distill.compares_heads:
        heads = max(with_heads(student).heads, with_heads(teacher).heads)
    states = (student.layers + 1) * (student.width + teacher.width) if distill.hidden_weight else 0
    # Each matrix of scores exists for both models and, temporarily, as their difference or logarithms.
    matrices = student.layers * bool(distill.attention_weight)
    matrices += len(distill.relations) * bool(distill.relation_weight)
    return 4 * (states + 3 * matrices * heads * longest)


def kept_for_each_weight(recipe: Recipe) -> int:
    """Return the fp32 numbers that a run keeps for each weight: the optimiser's moments, and an average."""
    return OPTIMIZERS[recipe.optim.algorithm].moments + (recipe.run.average_from != "off")


def _predicted_fraction(recipe: Recipe, stage: Stage) -> float:
    distill = recipe.distill
    everywhere = recipe.examples.has_teacher and distill.soft_weight > 0 and distill.rows == "all"
    if everywhere or not recipe.examples.masks_tokens:
        return 1.0
    return min(recipe.masking.largest_rate * 1.2, stage.predictions / stage.length * 1.2)


def _micro_tokens(recipe: Recipe, load: TrainingLoad, world: World, wanted: int) -> tuple[int, str]:
    """Return the tokens of one forward pass, and a line about its memory."""
    free = free_bytes(world)
    if recipe.batch.micro_tokens == "auto":
        # A sequence always has its filler.
        smallest = load.longest + max(GPU_MULTIPLE, CPU_MULTIPLE)
        fitting = max(smallest, min(wanted, largest_micro_batch(load, free_bytes=free)))
        # The smallest number of all ranks: a step has the same number of forward passes on every rank.
        of_ranks = world.sum([float(fitting) if rank == world.rank else 0.0 for rank in range(world.size)])
        tokens = int(min(of_ranks))
    else:
        tokens = recipe.batch.micro_tokens
    needed = estimate_memory(load, tokens).total
    if needed > free:
        what = f"{tokens} tokens need about {gibibytes(needed)}, but {gibibytes(free)} are free"
        remedy = "set batch.micro_tokens to auto, or run.recompute to true"
        raise DoesNotFit(what, key="batch.micro_tokens", remedy=remedy)
    return (
        tokens,
        f"memory: about {gibibytes(needed)} of {gibibytes(free)}, for {tokens:,} tokens in a forward pass",
    )


def _cpu_micro_tokens(networks: Sequence[Network], load: TrainingLoad) -> int:
    """Return the number of tokens, a power of two, that a CPU computes in seconds."""
    operations = _flops(networks, load, tokens=load.longest, sequences=1)
    affordable = int(CPU_MICRO_OPERATIONS / operations * load.longest)
    return min(CPU_MICRO_TOKENS, 1 << max(0, affordable.bit_length() - 1))


def free_bytes(world: World) -> int:
    """Return the memory of the device that a run may use."""
    if world.device.type == "cuda":
        return plannable_gpu_bytes(world.device)
    # The memory that Linux can provide; "free" would exclude all that only caches files.
    if MEMORY_OF_LINUX.is_file():
        known = dict(line.split(":", 1) for line in MEMORY_OF_LINUX.read_text().splitlines())
        free, total = (int(known[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        return share_of(free=free, total=total)
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 1 << 22
    whole = pages * os.sysconf("SC_PAGE_SIZE")
    return share_of(free=whole, total=whole)


def product_flops(device: torch.device) -> float | None:
    """Return the operations a second of large matrix products: a known GPU's data sheet, or measured."""
    if device.type != "cpu":
        return peak_of(device)
    matrix, seconds = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE), []
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - began)
    return 2 * PRODUCT_SIZE**3 / min(seconds)


PRODUCT_SIZE = 768
PEAK_FLOPS = {
    # Dense bf16 with fp32 accumulation, from the vendors' data sheets, except the H200's: 790e12 is assumed
    # to be the most that products reach there, of the data sheet's 989e12 (docs/performance.md).
    "H200": 790e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Peaks by words of torch's name for the GPU; a name that begins with another one precedes it."""


def peak_of(device: torch.device) -> float | None:
    """Return the most bf16 operations a second of this GPU, or None if unknown."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Return the peak by the GPU's name; an L40 is not an L4, and an RTX A1000 is not an A100."""
    return next((peak for known, peak in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)
