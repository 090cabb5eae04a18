"""The model card: what the model is and how it came to be, written from the run's own facts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bertsmith.model.network import Network
from bertsmith.recipe.schema import Recipe

PAIRS = {
    "nsp": "next-sentence prediction",
    "sop": "sentence-order prediction",
    "full-sentences": "full sentences across documents, no pairs",
    "doc-sentences": "full sentences within documents, no pairs",
    "none": "single segments, no pairs",
}


CHOSEN = {
    "token": "chosen one by one",
    "word": "chosen as whole words",
    "ngram": "chosen as runs of words",
    "phrase": "chosen as whole phrases",
    "entity": "chosen as whole entities",
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What happened in a run."""

    steps: int
    tokens: int
    seconds: float
    skipped: int
    device: str
    corpus: dict[str, Any]
    """Counts from the store's manifest."""
    held_out: dict[str, float]
    """The last held-out evaluation."""
    unigram_entropy: float
    notes: tuple[str, ...] = ()


def model_card(recipe: Recipe, network: Network, facts: RunFacts) -> str:
    """The card as Markdown."""
    return "\n".join(
        [*_head(recipe, network), *_data(recipe, facts), *_training(recipe, facts), *_results(facts)]
    )


def held_out_rows(held_out: Mapping[str, float]) -> list[tuple[str, str]]:
    """Held-out results in words: what was measured, and the value."""
    names = {name: name.replace("_", " ") for name in held_out}
    names |= {"pair_majority": "pair accuracy of always giving the commoner answer"}
    return [
        (names[name], f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
        for name, value in held_out.items()
    ]


def _head(recipe: Recipe, network: Network) -> list[str]:
    shape = network.shape
    parameters = sum(parameter.numel() for parameter in network.parameters())
    sizes = f"{shape.layers} layers, width {shape.width}, {shape.heads} heads, {shape.vocabulary:,} entries"
    return [
        f"# {recipe.name}",
        "",
        f"A {shape.model_type} encoder ({sizes}; {parameters:,} parameters) with the heads "
        f"{', '.join(network.heads)}, pre-trained with bertsmith. Opens in bertsmith and in transformers.",
        "",
    ]


def _data(recipe: Recipe, facts: RunFacts) -> list[str]:
    examples = recipe.examples
    lengths = ", then ".join(f"{stage.length} for {stage.share:.0%} of the run" for stage in examples.stages)
    counts = ", ".join(f"{value:,} {name}" for name, value in facts.corpus.items() if isinstance(value, int))
    return [
        "## Data",
        f"- Corpus: {counts}; {examples.held_out_share:.2%} of the documents held out.",
        f"- Sequences: {PAIRS[examples.pairs]}; longest {lengths}.",
        f"- Objective: {_objective(recipe)}.",
        "",
    ]


def _objective(recipe: Recipe) -> str:
    masking, objective = recipe.masking, recipe.examples.objective
    if objective != "masked":
        return f"{objective}; every token is predicted"
    kept = 1 - masking.as_mask - masking.as_random
    shown = f"{masking.as_mask:.0%} masked, {masking.as_random:.0%} random, {kept:.0%} kept"
    units = [level.unit for level in masking.levels] or [masking.unit]
    chosen = " or ".join(CHOSEN[unit] for unit in units)
    return f"masked; {masking.rate:.0%} of the tokens, {chosen}, of these {shown} ({masking.masks} masks)"


def _training(recipe: Recipe, facts: RunFacts) -> list[str]:
    optim, batch = recipe.optim, recipe.batch
    size = f"{batch.sequences:,} sequences" if batch.by == "sequences" else f"{batch.tokens:,} tokens"
    start = "from scratch" if recipe.start.model == "scratch" else "from another model folder"
    return [
        "## Training",
        f"- {facts.steps:,} steps, {facts.tokens:,} tokens, {facts.seconds / 60:.1f} minutes on "
        f"{facts.device}; {facts.skipped} steps skipped; {start}.",
        f"- {optim.algorithm}, peak learning rate {optim.peak_lr:g}, {optim.decay} decay, "
        f"warm-up {optim.warmup_share:.1%}, weight decay {optim.weight_decay:g}, {size} a step.",
        *(f"- {note}" for note in facts.notes),
        "- Every setting: `recipe.toml`; every measurement: `metrics.jsonl`.",
        "",
    ]


def _results(facts: RunFacts) -> list[str]:
    return [
        "## Held-out results",
        "| measure | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in held_out_rows(facts.held_out)),
        f"| unigram entropy (a model that knows only frequencies), nats | {facts.unigram_entropy:.4f} |",
        "",
        "The model reflects its corpus, mistakes and prejudices included. Try it on your own data first.",
        "",
    ]
