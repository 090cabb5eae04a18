"""The initial model of a fine-tuning run: a trained encoder with the task head."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.inference.loaded_model import load
from bertsmith.inference.model_path import is_adapter, model_folder
from bertsmith.inference.task_model import leave_pooler_out
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder import layers_in
from bertsmith.model.folder.model_folder import Model, head_outputs
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.heads import OutputHead
from bertsmith.model.network import (
    Network,
    add_fresh_head,
    build_network,
    initialise,
    set_pooling,
    take_transform,
)
from bertsmith.tasks.task_config import TaskConfig
from bertsmith.text.tokenizer import Tokenizer

MIX_NOTE = (
    "a BiLSTM {over} learns: bertsmith reads it from mix.safetensors; other tools see an encoder "
    "without a head"
)
DROPOUTS = {
    "dropout": ("dropout", "embedding_dropout"),
    "attention_dropout": ("attention_dropout",),
    "head_dropout": ("head_dropout", "span_dropout", "choice_dropout", "pooler_dropout"),
}
"""Recipe keys, each with the names that the configs of the architectures use for it."""


@dataclass(frozen=True, slots=True)
class InitialTaskModel:
    """A network with the task head and the heads it depends on (with frozen features, no task head)."""

    network: Network
    tokenizer: Tokenizer
    fresh: tuple[str, ...]
    """Heads with fresh weights."""
    kept: bool
    """True if the task head is the folder's own."""
    notes: tuple[str, ...]


def load_initial_task_model(
    folder: Path, config: TaskConfig, *, seed: int, dropouts: Mapping[str, float] = MappingProxyType({})
) -> InitialTaskModel:
    """Return the encoder of a model folder with the head that the config requires, kept or fresh.

    `dropouts` are rates by the keys of a recipe; other rates are the folder's.
    """
    if config.head.encoder == "lora" and is_adapter(model_folder(folder)):
        remedy = f"merge it first: bertsmith merge --model {folder} --out FOLDER"
        raise UserError("is an adapter, but a whole model is required", where=str(folder), remedy=remedy)
    bert = load(folder, device="cpu")
    if is_quantised(bert.model.network):
        remedy = "fine-tune the model that it was made from, and quantise again"
        raise UserError("the model is quantised, so it cannot learn", where=str(folder), remedy=remedy)
    model = replace(bert.model, network=_with_dropouts(bert.model.network, dropouts))
    network, stream = model.network, torch.Generator().manual_seed(key_of(seed, "task head"))
    _check_text_length(network, config, where=str(folder))
    if config.head.encoder == "frozen-features":
        _leave_bare(model, config)
        note = MIX_NOTE.format(over="on frozen layers")
        return InitialTaskModel(network, bert.tokenizer, fresh=(), kept=False, notes=(note,))
    own, kept, fresh = bert.model.network.config, False, tuple[str, ...]()
    notes = [f"run.{key} = {rate:g}; the model has {getattr(own, key):g}" for key, rate in dropouts.items()]
    if config.head.has_bilstm:
        network.heads.clear()  # a trained pooler, too: the encoder under it changes
        notes.append(MIX_NOTE.format(over="with the layers that it reads"))
    else:
        kept, fresh = _put_head(model, config, stream)
    notes += [f"the head {config.head_name} of the folder is kept"] if kept else []
    notes += [f"the head {name} starts from fresh weights" for name in fresh]
    if config.head.pooling != "model":
        notes += _choose_pooling(network, config)
    if config.head.fresh_layers:
        notes.append(_renew_layers(network, config, stream))
    return InitialTaskModel(network, bert.tokenizer, fresh, kept, tuple(notes))


def _with_dropouts(network: Network, dropouts: Mapping[str, float]) -> Network:
    """Return a network with these dropout rates and the same weights."""
    if not dropouts:
        return network
    known = {field.name for field in fields(network.config)}
    names: dict[str, Any] = {
        name: rate for key, rate in dropouts.items() for name in DROPOUTS[key] if name in known
    }
    with torch.device("meta"):
        other = build_network(replace(network.config, **names), head_outputs(network))
    other.load_state_dict(network.state_dict(), assign=True)
    return other.train(network.training)


def _choose_pooling(network: Network, config: TaskConfig) -> list[str]:
    """Represent a sequence by its first token or the mean of all; return notes for the user."""
    pooling = config.head.pooling
    assert pooling != "model", "the pooling must be chosen"
    if config.kind.head.reads == "tokens":
        what = f"a {config.kind.name} task reads every token, so a single state does not represent them"
        raise UserError(what, key="head.pooling", remedy="remove it")
    if pooling == "first" and (seen := network.config.first_token_sees()):
        what = f"the first token of this model sees {seen}"
        raise UserError(what, key="head.pooling", remedy="remove it, or set it to mean")
    before = network.encoder.sentence
    set_pooling(network, pooling)
    if pooling == "mean" and not hasattr(network.config, "sentence"):
        told = "the head reads the mean of all tokens (see task.json)"
        return [f"{told}; other tools would read the {before}"]
    return []


def _leave_bare(model: Model, config: TaskConfig) -> None:
    """Remove every head except a trained pooler: a BiLSTM learns instead, and a random head would mislead."""
    if config.head.pooling != "model":
        what = "a BiLSTM on frozen layers reads a sequence in its own way"
        raise UserError(what, key="head.pooling", remedy="remove it")
    if config.head.cls == "raw":
        remedy = "keep it at pooled"
        raise UserError("a BiLSTM on frozen layers reads raw states already", key="head.cls", remedy=remedy)
    if config.head.fresh_layers:
        raise _frozen_anew(config)
    for name in set(model.network.heads) - ({"pooler"} - set(model.untrained)):
        del model.network.heads[name]


def _put_head(model: Model, config: TaskConfig, stream: torch.Generator) -> tuple[bool, tuple[str, ...]]:
    """Add the task head; return True if it is the folder's, and the names of heads with fresh weights."""
    network = model.network
    kept = _has_own_head(model, config)
    drawn = [] if kept else add_fresh_head(network, config.head_name, config.outputs, stream)
    if drawn and (config.head.weights == "solved" or config.head.encoder == "frozen-linear"):
        # A random transform hides part of the states from a linear head. A fresh head that is tuned is better
        # with it: 69.5 % instead of 64.3 on Banking77 (docs/finetuning.md).
        take_transform(network, config.head_name)
    needs = architecture_of(network.config.model_type).heads[config.head_name].needs
    for other in set(network.heads) - {config.head_name, *needs}:
        del network.heads[other]
    if config.head.cls == "raw" and not leave_pooler_out(network, config.head_name):
        what = f"the {config.head_name} head of {network.config.model_type} reads raw states already"
        raise UserError(what, key="head.cls", remedy="keep it at pooled")
    fresh = dict.fromkeys([*drawn, *model.untrained])
    return kept, tuple(name for name in fresh if name in network.heads)


def _has_own_head(model: Model, config: TaskConfig) -> bool:
    """True if the folder's own head fits the task."""
    network, name = model.network, config.head_name
    member = architecture_of(network.config.model_type)
    if name not in member.heads:
        what = f"{member.model_type} does not have a head for {config.kind.name} tasks"
        raise UserError(what, remedy="use a model of another family")
    return name in network.heads and _fits(model, config)


def _fits(model: Model, config: TaskConfig) -> bool:
    """True if the folder's head has as many outputs and the same labels as the task."""
    head = model.network.heads[config.head_name]
    if not isinstance(head, OutputHead) or head.output.out_features != config.outputs:
        return False
    return not config.labels or model.labels() == config.labels


def _renew_layers(network: Network, config: TaskConfig, stream: torch.Generator) -> str:
    """Give the last layers fresh weights (Zhang et al. 2021); return a note for the user."""
    layers, count = layers_in(network.encoder), config.head.fresh_layers
    if config.head.encoder != "tuned":
        raise _frozen_anew(config)
    if count > len(layers):
        what = f"the model has {len(layers)} separate layers, not {count}"
        raise UserError(what, key="head.fresh_layers", remedy=f"choose at most {len(layers)}")
    rule = architecture_of(network.config.model_type).initial(network.config)
    for layer in layers[len(layers) - count :]:
        initialise(layer, rule, stream)
    return f"the last {count} layers start from fresh weights"


def _frozen_anew(config: TaskConfig) -> UserError:
    what = f"layers with fresh weights cannot stay frozen (head.encoder = {config.head.encoder})"
    return UserError(what, key="head.fresh_layers", remedy="keep it at 0, or tune the encoder")


def _check_text_length(network: Network, config: TaskConfig, *, where: str) -> None:
    if config.text.longest > network.config.positions:
        what = f"takes {network.config.positions} tokens, but text.longest = {config.text.longest}"
        raise UserError(what, where=where, remedy=f"use `text.longest={network.config.positions}`")
