"""The fixed held-out evaluation: one measure for all recipes, in addition to a run's own metrics.

A run's own evaluation uses the masking and the lengths of its training. It shows how training proceeds, but
two recipes cannot be compared by it. In the fixed evaluation, every run predicts the same tokens of the same
held-out sequences of at most 128 tokens. 15 % of the tokens are predicted: 80 % of these are shown as the
mask, 10 % as random tokens and 10 % unchanged. The set depends only on the store, not on masking, lengths,
pairs or seed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bertsmith.core.measures import FIXED_PREFIX
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.batch_inspection import sequences_of
from bertsmith.data.collate import Multiples
from bertsmith.data.data_loader import PretrainingDataset
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.held_out import HeldOutSet, evaluate, held_out_set, pretraining_objective
from bertsmith.recipe.data_sections import ExamplesSection, MaskingSection, Stage
from bertsmith.recipe.schema import Recipe
from bertsmith.training.distributed import World
from bertsmith.training.trainer import Trainer

LENGTH, PREDICTIONS = 128, 20
HELD_OUT_FRACTION = 0.005
"""Fraction of the documents in the set; a recipe may hold out more, which include these."""
GPU_SEQUENCES, CPU_SEQUENCES = 1024, 128
"""Maximum number of sequences; a CPU uses the first of a GPU's sequences."""


def fixed_recipe(recipe: Recipe, world: World) -> Recipe:
    """Return the recipe of the fixed evaluation for this recipe's model and objective."""
    stage = Stage(fraction=1.0, length=min(LENGTH, recipe.model.positions), predictions=PREDICTIONS)
    examples = ExamplesSection(
        objective=recipe.examples.objective,
        pairs="doc-sentences",
        stages=(stage,),
        held_out_fraction=min(HELD_OUT_FRACTION, recipe.examples.held_out_fraction),
    )
    batch = type(recipe.batch)(by="sequences", sequences=fixed_sequences(world))
    return recipe.model_copy(update={"examples": examples, "masking": MaskingSection(), "batch": batch})


def fixed_data(
    store: TokenStore, recipe: Recipe, world: World, *, micro_tokens: int, cache: Path
) -> PretrainingDataset:
    """Return the held-out data that the fixed set is taken from."""
    compared, multiples = fixed_recipe(recipe, world), Multiples()
    # Sequences may be longer than in training; without gradients they still fit into memory.
    longest = compared.examples.stages[0].length + multiples.tokens
    return PretrainingDataset(
        store,
        compared,
        micro_tokens=max(micro_tokens, longest),
        cache=cache,
        rank=world.rank,
        world=world.size,
        multiples=multiples,
        split="held-out",
        fields=declaration(recipe).fields,
    )


def fixed_sequences(world: World) -> int:
    """Return the maximum number of sequences of the set on this machine."""
    return GPU_SEQUENCES if world.device.type == "cuda" else CPU_SEQUENCES


def fixed_notes(recipe: Recipe) -> list[str]:
    """Return notes on settings that make a run's fixed evaluation incomparable with other runs."""
    notes, what = [], "the fixed evaluation cannot be compared with other runs'"
    if recipe.examples.held_out_fraction < HELD_OUT_FRACTION:
        fraction = f"examples.held_out_fraction = {recipe.examples.held_out_fraction:g}"
        notes.append(f"{what}: {fraction} holds out fewer documents than {HELD_OUT_FRACTION:g} does")
    if recipe.model.positions < LENGTH:
        notes.append(f"{what}: its sequences end at model.positions = {recipe.model.positions}")
    return notes if declaration(recipe).fixed else []


def fixed_set(dataset: PretrainingDataset, world: World) -> HeldOutSet:
    """Return the sequences of the fixed evaluation, from a dataset of `fixed_recipe`.

    `tokens_per_character` does not count white space, because some vocabularies drop it.
    """
    found = held_out_set(dataset, 0, world)
    tokenizer = dataset.opened_store.tokenizer()
    tokens, characters = 0, 0
    for shown in sequences_of(found.batches):
        ids = (shown.targets.get(index, each) for index, each in enumerate(shown.tokens))
        text = [each for each in ids if each not in tokenizer.special_ids]
        tokens += len(text)
        characters += sum(not each.isspace() for each in tokenizer.decode(text))
    tokens_of_all, characters_of_all = world.sum([tokens, characters])
    known = {**found.totals, "tokens_per_character": tokens_of_all / max(1.0, characters_of_all)}
    return replace(found, totals=known)


def evaluate_fixed(
    trainer: Trainer, fixed: HeldOutSet, *, stopping: Callable[[], bool], max_seconds: float
) -> tuple[dict[str, float], HeldOutSet] | None:
    """Return the metrics of the fixed evaluation and the evaluated set, like `evaluate`."""
    evaluated = evaluate(trainer, fixed, stopping=stopping, max_seconds=max_seconds)
    if evaluated is None:
        return None
    metrics, held_out = evaluated
    named = ((FIXED_PREFIX + name, value) for name, value in metrics.items())
    fixed_metrics = pretraining_objective(trainer).declared.fixed
    return {name: value for name, value in named if name in fixed_metrics}, held_out
