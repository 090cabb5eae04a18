"""The end of a pre-training run: a model folder that any tool opens, with a card of the run's own facts."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from bertsmith.core.errors import Diverged
from bertsmith.core.files import atomic_folder, write_text
from bertsmith.core.measures import Declaration, brief
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.folder.model_folder import Model, head_outputs, write_model
from bertsmith.model.folder.tensor_files import SAVED_WEIGHT_FILES
from bertsmith.model.network import Network, build_network
from bertsmith.objectives.registry import OBJECTIVES, declaration
from bertsmith.pretraining.held_out import pretraining_objective
from bertsmith.recipe.schema import Recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.curves import CURVES_FILE
from bertsmith.training.run_folder import card_text, facts_block, table_block, usage_block
from bertsmith.training.trainer import Trainer

PAIRS = {
    "nsp": "next-sentence prediction",
    "sop": "sentence-order prediction",
    "sentence-pair": "next-sentence prediction on pairs of single sentences",
    "full-sentences": "full sentences across documents, no pairs",
    "doc-sentences": "full sentences within documents, no pairs",
    "none": "single segments, no pairs",
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run, for its model card."""

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
    held_out_before: dict[str, float] = field(default_factory=dict)
    """Held-out results before the first step, of a run that began with a model folder."""


def model_card(
    recipe: Recipe, network: Network, tokenizer: Tokenizer, facts: RunFacts, *, picture: bool
) -> str:
    """The card as Markdown."""
    config = network.config
    parameters = sum(parameter.numel() for parameter in network.parameters())
    sizes = f"{config.shape_text()}, {config.vocabulary:,} entries"
    article = "An" if config.model_type[0] in "aeiou" else "A"
    introduction = (
        f"{article} {config.model_type} encoder ({sizes}; {parameters:,} parameters) with the heads "
        f"{', '.join(network.heads)}, pre-trained with bertsmith. {opened_by(config)}"
    )
    entropy = (
        "unigram entropy (a model that knows only frequencies), nats",
        f"{facts.unigram_entropy:.4f}",
    )
    results = [*held_out_rows(declaration(recipe), facts.held_out, facts.held_out_before), entropy]
    blocks = [
        facts_block(_data(recipe, facts), heading="Data"),
        facts_block(_training(recipe, facts), heading="Training"),
        table_block(("metric", "value"), results, heading="Held-out results"),
    ]
    caveat = (
        "The model reflects its corpus, mistakes and prejudices included. Try it on your own data first. Its "
        "vectors were not trained for similarity: for search, use a sentence model."
    )
    blocks += [
        usage_block(usage_of(network, tokenizer)),
        *([[f"![Curves of the run]({CURVES_FILE})"]] if picture else []),
    ]
    header = card_header(network, tokenizer)
    return card_text(recipe.name, introduction, blocks, caveat=caveat, header=header)


def card_header(network: Network, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the header of a pre-trained model's card, for model hubs."""
    direction, ability = network.config.direction, "feature-extraction"
    if "mlm" in network.heads and tokenizer.has_mask and direction != "right-to-left":
        ability = "fill-mask"
    elif "mlm" in network.heads and direction == "left-to-right":
        ability = "text-generation"
    return {
        "library_name": "bertsmith",
        "pipeline_tag": ability,
        "tags": ["bertsmith", network.config.model_type, "pre-trained"],
    }


def usage_of(network: Network, tokenizer: Tokenizer) -> str:
    """Return example code that uses a pre-trained model."""
    asked = 'bert.embed(["A text of your own."]).shape'
    looks_back = any(view.offset < 0 for view in network.encoder.word_views())
    goes_on = looks_back and (network.config.direction == "left-to-right" or not tokenizer.has_mask)
    if "mlm" in network.heads and goes_on:
        asked = '[*bert.extend("Paris is", count=8)][-1].text'
    elif "mlm" in network.heads and tokenizer.has_mask:
        asked = 'bert.fill(f"Paris is the {bert.tokenizer.mask_token} of France.")[0][0].token'
    # The folder that contains this card, which may be moved and renamed.
    return f'import bertsmith\n\nbert = bertsmith.load("path/to/this/folder")\nprint({asked})'


def held_out_line(declared: Declaration, held_out: Mapping[str, float]) -> str:
    """Return an evaluation as a line of the log: the numbers that people compare first."""
    told = f"held-out {', '.join(brief(declared.own, held_out))}"
    fixed = brief(declared.fixed, held_out)
    return f"{told}; fixed evaluation: {', '.join(fixed)}" if fixed else told


def opened_by(config: EncoderConfig) -> str:
    """Describe the tools that open a folder of this config."""
    only_ours = config.own_settings()
    return "Opens in bertsmith." if only_ours else "Opens in bertsmith and in transformers."


def held_out_rows(
    declared: Declaration, held_out: Mapping[str, float], before: Mapping[str, float] = MappingProxyType({})
) -> list[tuple[str, str]]:
    """Return held-out results in words: the metric, and its value, with the value before the run."""
    rows = []
    for name, value in held_out.items():
        metric = declared.reported[name]
        now, was = metric.text(value), metric.text(before.get(name, value))
        rows.append((metric.label, now if was == now else f"{was} → {now}"))
    return rows


def _data(recipe: Recipe, facts: RunFacts) -> list[str]:
    examples = recipe.examples
    lengths = ", then ".join(
        f"{stage.length} for {stage.fraction:.0%} of the run" for stage in examples.stages
    )
    counts = ", ".join(f"{value:,} {name}" for name, value in facts.corpus.items() if isinstance(value, int))
    compared = "15% of the tokens (80/10/10)" if examples.masks_tokens else "every token"
    fixed = f"Fixed evaluation: {compared} of held-out sequences of up to 128 tokens is predicted."
    return [
        f"Corpus: {counts}; {examples.held_out_fraction:.2%} of the documents held out.",
        f"Sequences: {PAIRS[examples.pairs]}; longest {lengths}.",
        f"Objective: {OBJECTIVES[examples.objective].summary(recipe)}.",
        *([fixed] if declaration(recipe).fixed else []),
    ]


def _training(recipe: Recipe, facts: RunFacts) -> list[str]:
    optim, batch = recipe.optim, recipe.batch
    size = f"{batch.sequences:,} sequences" if batch.by == "sequences" else f"{batch.tokens:,} tokens"
    start = "from scratch" if recipe.start.model == "scratch" else "from another model folder"
    if recipe.distill.layers:
        start = f"from the layers {', '.join(map(str, recipe.distill.layers))} of its teacher"
    return [
        f"{facts.steps:,} steps, {facts.tokens:,} tokens, {facts.seconds / 60:.1f} minutes on "
        f"{facts.device}; {facts.skipped} steps skipped; {start}.",
        f"{optim.algorithm}, peak learning rate {optim.peak_lr:g}, {optim.schedule} decay, "
        f"warm-up {optim.warmup_fraction:.1%}, weight decay {optim.weight_decay:g}, {size} a step.",
        *facts.notes,
        "Every setting: `recipe.toml`; all metrics: `metrics.jsonl`.",
    ]


def whole_networks(trainer: Trainer) -> dict[str, Network]:
    """Return plain copies of the trained networks by folder, on the CPU, gathered from all processes.

    All processes must call it.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(trainer.objective, options=options)
    whole = {}
    for folder, network in pretraining_objective(trainer).networks().items():
        prefix = weights_prefix(folder)
        weights = {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}
        with torch.device("meta"):
            plain = build_network(network.config, head_outputs(network))
        if weights:  # only the main process gets them
            plain.load_state_dict(weights, assign=True)
        whole[folder] = plain.eval()
    return whole


def weights_prefix(folder: str) -> str:
    """Return the prefix of this folder's network in the names of its objective's weights."""
    return f"{folder or 'network'}."


def check_weights_are_finite(networks: Iterable[Network], *, where: str) -> None:
    """Raise if a weight is not a number: a run may end after steps that were skipped for this reason."""
    weights = (item for network in networks for item in network.state_dict().items())
    broken = [name for name, tensor in weights if not bool(tensor.isfinite().all())]
    if broken:
        remedy = "lower `optim.peak_lr` and start again in a new folder"
        raise Diverged(
            f"the run ended with weights that are not numbers: {broken[0]}", where=where, remedy=remedy
        )


def check_held_out_is_finite(held_out: Mapping[str, float], *, where: str) -> None:
    """Raise if the last held-out loss is not a number: finite weights can overflow in a forward pass."""
    if not isfinite(held_out.get("loss", 0.0)):
        remedy = "lower `optim.peak_lr` and start again in a new folder"
        raise Diverged("the run ended with a held-out loss that is not a number", where=where, remedy=remedy)


def write_model_folder(
    target: Path,
    networks: Mapping[str, Network],
    tokenizer: Tokenizer,
    extras: dict[str, str],
    pictures: Iterable[Path] = (),
) -> None:
    """Write weights, tokenizer, the given texts and pictures as one folder that appears whole."""
    with atomic_folder(target, replaces=SAVED_WEIGHT_FILES) as fresh:
        for folder, network in networks.items():
            write_model(fresh / folder, Model(network))
            tokenizer.save(fresh / folder)
        for name, text in extras.items():
            write_text(fresh / name, text)
        for picture in pictures:
            shutil.copy(picture, fresh / picture.name)


def write_results(
    folder: Path, recipe: Recipe, networks: Mapping[str, Network], tokenizer: Tokenizer, facts: RunFacts
) -> None:
    """Write the finished model of a run and its card."""
    picture = folder / CURVES_FILE
    card = model_card(recipe, networks[""], tokenizer, facts, picture=picture.exists())
    write_text(folder / "card.md", card)
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in ("recipe.toml", "metrics.jsonl")}
    pictures = [picture] if picture.exists() else []
    write_model_folder(folder / "model", networks, tokenizer, {**texts, "card.md": card}, pictures)
