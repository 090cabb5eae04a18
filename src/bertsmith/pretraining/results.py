"""The end of a run: a model folder that any tool opens, with its recipe, its measurements and its card."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_folder, write_text
from bertsmith.model.family import build_network
from bertsmith.model.network import Network
from bertsmith.model.tensor_files import WEIGHT_FILES
from bertsmith.model.weights import Model, head_outputs, write_model
from bertsmith.pretraining.card import RunFacts, model_card
from bertsmith.recipe.schema import Recipe
from bertsmith.text.tokenizer import Tokenizer


def whole_network(objective: nn.Module, network: Network) -> Network:
    """A plain copy of the network on the CPU, put together from what each process holds; all must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(objective, options=options)
    prefix = "network."
    weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    with torch.device("meta"):
        plain = build_network(network.shape, head_outputs(network))
    if weights:  # only the main process is given them
        plain.load_state_dict(weights, assign=True)
    return plain.eval()


def refuse_broken(network: Network, *, where: str) -> None:
    """Complain if a weight is not a number: a run may end amid steps that were skipped for that."""
    broken = [name for name, tensor in network.state_dict().items() if not bool(tensor.isfinite().all())]
    if broken:
        remedy = "lower optim.peak_lr and start again in a new folder"
        raise UserError(
            f"the run ended with weights that are no numbers: {broken[0]}", where=where, remedy=remedy
        )


def write_model_folder(target: Path, network: Network, tokenizer: Tokenizer, extras: dict[str, str]) -> None:
    """Write weights, tokenizer and the given texts as one folder that appears whole."""
    with atomic_folder(target, replaces=WEIGHT_FILES) as fresh:
        write_model(fresh, Model(network))
        tokenizer.save(fresh)
        for name, text in extras.items():
            write_text(fresh / name, text)


def write_results(
    folder: Path, recipe: Recipe, network: Network, tokenizer: Tokenizer, facts: RunFacts
) -> None:
    """Write the finished model of a run and its card."""
    card = model_card(recipe, network, facts)
    write_text(folder / "card.md", card)
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in ("recipe.toml", "metrics.jsonl")}
    write_model_folder(folder / "model", network, tokenizer, {**texts, "card.md": card})
