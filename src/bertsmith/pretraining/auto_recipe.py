"""The recipe of `pretrain auto`: shape, batch and learning rate for the budget, the text and this machine.

Each shape with each batch size is a candidate. A candidate trains on as many tokens as the budget allows at
the measured speed. The candidate with the lowest expected loss (`scaling_law.py`) is chosen. All other
settings are from `speedrun-small` without pairs: pre-norm, rotary positions, Muon, a masking rate of 0.3.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import TypeVar

from bertsmith.core.errors import UserError
from bertsmith.core.wording import counted
from bertsmith.corpus.token_store import TokenStore
from bertsmith.objectives.step_memory import USABLE
from bertsmith.pretraining.hardware import free_bytes, step_size
from bertsmith.pretraining.held_out import unigram_entropy
from bertsmith.pretraining.run_setup import run_folder
from bertsmith.pretraining.scaling_law import MASKED, MILLION, RunSize
from bertsmith.pretraining.training_speed import ShapeSpeed, layer_weights, measure_speeds
from bertsmith.recipe.load import encoder_parameters, load_recipe
from bertsmith.recipe.schema import Recipe
from bertsmith.training.distributed import World, refuse_several_processes, start_world

AUTO, PARTS = "auto", "speedrun-small"
SIZES = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "base": (12, 768)}
"""Layers and width of Turc et al. (2019) and BERT-Base."""
SHAPES = (
    (2, 128),
    (4, 128),
    (4, 192),
    (4, 256),
    (6, 384),
    (12, 384),
    (8, 512),
    (12, 512),
    (12, 768),
)
"""Layers and width of the candidates, ordered by the operations per token. A 2x64 is hardly faster on a CPU,
and worse: in 4 minutes it reaches 2.23 bits per character, and a 2x128 2.12."""
BATCHES = tuple(127 << power for power in range(3, 10))
"""Tokens of a step; with padding, powers of two."""
ONE_HEAD = (2, 64)
"""Layers and width of a shape with a single head, which fits any width."""
FITTED_RATE = 0.3
"""Masking rate of the runs that the law was fitted on."""
MIN_STEPS = 150
"""Minimum steps of a candidate; one with fewer is chosen only if all have fewer."""
MEASURING_SECONDS, MEASURING_FRACTION = 15.0, 0.05
"""Maximum seconds of measuring, and the maximum fraction of a budget in minutes."""
OVERHEAD_SECONDS, OVERHEAD_FRACTION = (8.0, 45.0), 0.08
"""Time that a run spends without steps: seconds for start and end on a CPU and on a GPU, which compiles, and
the fraction for evaluations and building batches."""
BYTES_OF_A_WEIGHT = 32
"""Bytes per weight for weights, gradients, moments and a copy to save, with as much again for a step's
tensors."""
BUDGETS = tuple(10 * 1.25**power for power in range(60))
"""Seconds of steps that are tried to find the best candidate for a budget in steps or tokens."""
FITTED_TOKENS, FITTED_TEXT = (0.3 * MILLION, 300 * MILLION), MILLION
"""Range of tokens in the runs of the law, and minimum tokens of text; outside, no figure is printed."""
LITTLE = 0.15
"""Nats below the loss of word frequencies; a loss closer to it shows no learning from context."""
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "masked": ("examples.objective=masked",),
    "replaced": (  # as speedrun-base
        *("examples.objective=replaced", "masking.rate=0.2", "masking.as_mask=0.85", "masking.as_random=0.0"),
        "examples.stages=[{fraction=1.0, length=128, predictions=26}]",
    ),
}
REPLACED_RATE = 0.5
"""Learning rate for replaced tokens, as a multiple of the rate for masked ones (bench/scaling_runs.jsonl)."""
BELOW = ("name=auto", "run.minutes=30.0", "examples.pairs=full-sentences", "examples.single_fraction=0.0")
"""Settings that differ from speedrun-small; the user's settings override them."""
Options = Sequence[tuple[str, str]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AutoRequest:
    """Store, output folder and options of a `pretrain auto`."""

    load: Callable[[str | Path, Options], Recipe]
    """Function that loads a preset or file with options, which the user's options and settings override."""
    store: Path
    out: Path
    size: str = ""
    """A key of SIZES, or empty."""
    objective: str = ""
    """A key of OBJECTIVES, or empty."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape that agrees with the user's settings, and its training speed on this machine."""

    recipe: Recipe
    speed: ShapeSpeed
    batches: tuple[int, ...] = BATCHES
    """Batch sizes to choose from, in tokens of a step."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape with a batch size, the size of its run within the budget, and the expected loss."""

    shape: Shape
    size: RunSize
    loss: float
    """Expected loss, in nats of the text that the law was fitted on."""

    @property
    def name(self) -> str:
        """Layers x width of the shape."""
        return f"{self.shape.recipe.model.layers} x {self.shape.recipe.model.width}"


def auto_recipe(request: AutoRequest, report: Callable[[str], None]) -> Recipe:
    """Choose the recipe for this machine, or load the initial one of the run in the folder."""
    given = [("`objective`", line) for line in _entry(OBJECTIVES, request.objective, "objective")]
    size = _entry(SIZES, request.size, "size")
    folder = run_folder(request.out)
    if folder.begun:
        begun = load_recipe(folder.config)
        if begun.name != AUTO:
            what = f"the run there has another recipe: {begun.name}, not {AUTO}"
            raise UserError(what, where=str(folder.config), remedy="give `out` a new folder")
        report(f"auto: the initial recipe of the run ({folder.config})")
        return request.load(folder.config, [*given, *(_shape_options(size, "`size`") if size else ())])
    folder.check_no_unknown_files()
    refuse_several_processes("auto chooses a recipe in one process")
    began, store = time.monotonic(), TokenStore.open(request.store)
    below = [*((AUTO, line) for line in BELOW), *given]
    base = request.load(PARTS, [*below, *_shape_options(ONE_HEAD)])
    if base.start.model != "scratch":
        remedy = "remove `start.model`, or name a preset to continue from a model"
        raise UserError("auto trains from scratch", key="start.model", remedy=remedy)
    world = start_world(base.run.device)
    wanted = _with_given_width(request, below, [size] if size else SHAPES)
    shapes = _measured_shapes(request, below, wanted, store, world)
    spent = time.monotonic() - began + OVERHEAD_SECONDS[world.device.type == "cuda"]
    candidates = choose(shapes, store.tokens * (1 - base.examples.held_out_fraction), spent=spent)
    final = request.load(PARTS, [*below, *_options(candidates[0])])
    entropy = unigram_entropy(store.token_counts, final.masking.smoothing)
    for line in lines(candidates, final, entropy, measured=sum(each.speed.measured for each in shapes)):
        report(line)
    return final


def _entry(table: Mapping[str, tuple[T, ...]], name: str, key: str) -> tuple[T, ...]:
    """Return the entry that a setting names; empty if it was not given."""
    if name and name not in table:
        raise UserError(f"{name!r} is not a valid choice", key=key, remedy=f"give {', '.join(table)}")
    return table[name] if name else ()


def _shape_options(shape: tuple[int, ...], origin: str = AUTO) -> Options:
    layers, width = shape
    sizes = {"layers": layers, "width": width, "heads": width // 64, "inner": 64 * round(width * 8 / 3 / 64)}
    return [(origin, f"model.{key}={value}") for key, value in sizes.items()]


def _with_given_width(
    request: AutoRequest, below: Options, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the shapes, all with the width that the user's settings give, if any; heads follow from it."""
    tried = [(AUTO, f"model.width={width}") for width in (64, 128)]
    shape = _shape_options(ONE_HEAD)
    widths = {request.load(PARTS, [*below, *shape, each]).model.width for each in tried}
    given = widths.pop() if len(widths) == 1 else None
    return list(dict.fromkeys((layers, given or width) for layers, width in shapes))


def _measured_shapes(
    request: AutoRequest,
    below: Options,
    shapes: Sequence[tuple[int, ...]],
    store: TokenStore,
    world: World,
) -> list[Shape]:
    """Return the shapes that fit into memory, with their speeds."""
    loaded = (request.load(PARTS, [*below, *_shape_options(shape)]) for shape in shapes)
    recipes = list({each.model: each for each in loaded}.values())  # the user's settings may leave fewer
    run = recipes[0].run
    limit = MEASURING_FRACTION * 60 * run.minutes if run.budget == "minutes" else MEASURING_SECONDS
    fitting = [recipe for recipe in recipes if _fits(recipe, store, world)] or recipes[:1]
    measured = fitting
    if len(fitting) == 1:  # measure a small shape first, to extrapolate from if this one takes too long
        small = _shape_options((ONE_HEAD[0], fitting[0].model.width))
        measured = [request.load(PARTS, [*below, *small]), *fitting]
    limit = min(MEASURING_SECONDS, limit)
    speeds = measure_speeds(measured, store, world, seconds=limit)[-len(fitting) :]
    tried = [[*below, *_shape_options(shapes[0]), (AUTO, f"batch.tokens={size}")] for size in BATCHES[:2]]
    few, many = (step_size(request.load(PARTS, each))[0] for each in tried)
    batches = BATCHES if few != many else (few,)
    return [Shape(recipe, speed, batches) for recipe, speed in zip(fitting, speeds, strict=True)]


def _fits(recipe: Recipe, store: TokenStore, world: World) -> bool:
    """True if weights, gradients, moments and one sequence fit into the free memory."""
    weights = encoder_parameters(recipe.model, store.vocabulary)
    return weights * BYTES_OF_A_WEIGHT < USABLE * free_bytes(world)


def choose(shapes: Sequence[Shape], text_tokens: float, *, spent: float = 0.0) -> list[Candidate]:
    """Return the best candidate of each shape, the best of all first; `spent`: used seconds of the budget."""
    run = shapes[0].recipe.run
    if run.budget == "minutes":
        seconds = 60 * run.minutes
        usable = max((1 - OVERHEAD_FRACTION) * seconds - spent, seconds / 2)
        return _ranked(shapes, text_tokens, usable)
    by_steps = run.budget == "steps"
    wanted = run.steps if by_steps else run.tokens

    def reached(candidate: Candidate) -> float:
        return candidate.size.steps if by_steps else candidate.size.tokens

    # The candidate that is the best one for the time that it takes to spend this budget.
    best = {seconds: _ranked(shapes, text_tokens, seconds)[0] for seconds in BUDGETS}
    seconds = min(BUDGETS, key=lambda each: abs(log(reached(best[each]) / wanted)))
    choice = best[seconds]
    others = _ranked(shapes, text_tokens, seconds * wanted / reached(choice))
    batch = choice.size.batch_tokens
    first = _candidate(choice.shape, batch * wanted if by_steps else wanted, text_tokens, batch)
    return [first, *(each for each in others if each.shape is not choice.shape)]


def _ranked(shapes: Sequence[Shape], text_tokens: float, seconds: float) -> list[Candidate]:
    """Return each shape with its best batch for this many seconds of steps, lowest expected loss first."""
    best = []
    for shape in shapes:
        candidates = []
        for batch in shape.batches:
            tokens = batch * seconds / shape.speed.step_seconds(batch)
            candidates.append(_candidate(shape, tokens, text_tokens, batch))
        best.append(min(candidates, key=_order))
    return sorted(best, key=_order)


def _order(candidate: Candidate) -> tuple[float, float]:
    """Sort key: the expected loss; candidates with too few steps are last, the most steps first."""
    return max(0.0, MIN_STEPS - candidate.size.steps), candidate.loss


def _candidate(shape: Shape, tokens: float, text_tokens: float, batch: float) -> Candidate:
    size = RunSize(layer_weights(shape.recipe), shape.recipe.model.width, tokens, text_tokens, batch)
    return Candidate(shape, size, float(MASKED.loss(size)))


def _options(choice: Candidate) -> Options:
    """Return shape, batch and learning rate of a candidate as options."""
    model = choice.shape.recipe.model
    factor = REPLACED_RATE if choice.shape.recipe.examples.has_generator else 1.0
    rate = MASKED.best_rate(choice.size) * factor
    chosen = (f"batch.tokens={choice.size.batch_tokens:.0f}", f"optim.peak_lr={rate:.3g}")
    return [*_shape_options((model.layers, model.width)), *((AUTO, line) for line in chosen)]


def lines(candidates: Sequence[Candidate], recipe: Recipe, entropy: float, *, measured: int) -> list[str]:
    """Return five lines on choice, reason and expectation; `entropy`: loss of the text's frequencies."""
    choice, others = candidates[0], candidates[1:4]
    size, run, optim = choice.size, recipe.run, recipe.optim
    budget = counted(getattr(run, run.budget), run.budget.removesuffix("s"))
    tokens_per_second = size.batch_tokens / choice.shape.speed.step_seconds(size.batch_tokens)
    known = "measured" if choice.shape.speed.measured else "extrapolated"
    next_best = ", ".join(f"{each.name} +{max(0.0, each.loss - choice.loss):.2f} nats" for each in others)
    layers = f"{choice.name}, {size.weights / MILLION:.1f} M weights in its layers"
    spent = f"{size.tokens / MILLION:.2g} M tokens: {size.tokens / size.text_tokens:.1f} passes over the text"
    rates = (
        f"{optim.peak_lr:.3g} (layers {optim.peak_lr * optim.matrix_lr_factor:.3g}), then {optim.schedule}"
    )
    return [
        f"auto: {layers}, {size.batch_tokens:,.0f} tokens a step, about {size.steps:,.0f} steps",
        f"  why: the lowest expected loss for {budget}" + (f"; next {next_best}" if others else ""),
        f"  speed: {tokens_per_second:,.0f} tokens/s ({known}; shapes measured: {measured}), {spent}",
        f"  learning rate: {rates}; {recipe.masking.rate:.0%} masked, objective {recipe.examples.objective}",
        f"  expected at the end: {_expected(choice, recipe, entropy)}",
    ]


def _expected(choice: Candidate, recipe: Recipe, entropy: float) -> str:
    """Describe the expected accuracy on masked words and the loss, or the reason why they are not known."""
    size = choice.size
    if recipe.examples.has_generator:
        return "not known: the law is for masked tokens"
    if recipe.masking.rate != FITTED_RATE or recipe.optim.algorithm != "muon":
        return f"not known: the law is for Muon and a masking rate of {FITTED_RATE:g}"
    loss = float(MASKED.loss(size, recipe.optim.peak_lr))
    if size.tokens < FITTED_TOKENS[0] or loss > MASKED.frequencies - LITTLE:
        return (
            "little more than how frequent words are; allow more `run.minutes`, `run.tokens` or `run.steps`"
        )
    if size.tokens > FITTED_TOKENS[1] or size.text_tokens < FITTED_TEXT:
        return "not known: the budget or the text is outside the range of the law's runs"
    of_text = loss * entropy / MASKED.frequencies
    return f"{MASKED.words_right(loss):.0%} of masked words right, loss {of_text:.1f} (fixed evaluation)"
