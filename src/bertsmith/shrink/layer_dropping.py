"""Whole layers taken out of a network (Sajjad et al. 2020, "On the Effect of Dropping Layers")."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.albert import AlbertConfig
from bertsmith.model.architectures.modernbert import ModernBertConfig
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network

WHERE = "--drop-layers"


def without_layers(network: Network, dropped: Collection[int]) -> Network:
    """A network of its own that lacks these layers, counted from 0."""
    config = network.config
    kept = _kept_layers(config, dropped)
    smaller, changes = deepcopy(network), _changed_settings(config, kept)
    if not isinstance(config, AlbertConfig):  # whose layers run blocks that stay
        smaller.encoder.blocks = nn.ModuleList([smaller.encoder.blocks[layer] for layer in kept])
    smaller.config = replace(config, layers=len(kept), **changes)
    smaller.encoder.order = tuple(smaller.config.order())
    return smaller


def _kept_layers(config: EncoderConfig, dropped: Collection[int]) -> list[int]:
    if strange := [layer for layer in dropped if not 0 <= layer < config.layers]:
        remedy = f"name layers from 0 to {config.layers - 1}"
        raise UserError(f"there is no layer {strange[0]}", where=WHERE, remedy=remedy)
    kept = [layer for layer in range(config.layers) if layer not in dropped]
    if not kept:
        raise UserError("no layer would be left", where=WHERE, remedy="keep at least one")
    return kept


def _changed_settings(config: EncoderConfig, kept: list[int]) -> dict[str, Any]:
    """What config.json must say of the layers that are left, which are numbered anew."""
    if isinstance(config, AlbertConfig):
        if config.groups > 1 or config.sharing != "all":
            what = "layers that share weights in groups cannot be told apart from those that do not"
            raise UserError(what, where=WHERE, remedy="take a model that shares all of its layers, or none")
        return {}
    changes: dict[str, Any] = {
        name: tuple(sizes[layer] for layer in kept)
        for name in ("layer_heads", "layer_inner")
        if (sizes := getattr(config, name))
    }
    if isinstance(config, ModernBertConfig):
        if kept[0] != 0:
            what = "the first layer of ModernBERT has no norm of its own, and no other can stand in its place"
            raise UserError(what, where=WHERE, remedy="keep layer 0")
        changes["global_layers"] = tuple(
            number for number, layer in enumerate(kept) if layer in config.global_layers
        )
    return changes
