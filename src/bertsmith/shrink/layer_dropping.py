"""Dropping whole layers of a network (Sajjad et al. 2020, "On the Effect of Dropping Layers")."""

from collections.abc import Collection
from copy import deepcopy

from bertsmith.core.errors import UserError
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer_config import with_heads

KEY = "drop_layers"


def without_layers(network: Network, dropped: Collection[int]) -> Network:
    """Return a copy of a network without these layers, counted from 0."""
    config = network.config
    kept = _kept_layers(config, dropped)
    if network.encoder.shares_layers and with_heads(config).blocks == config.layers:
        what = "layers that share only a part of their weights cannot be removed"
        raise UserError(what, key=KEY, remedy="use a model that shares all of its layers, or none")
    smaller = deepcopy(network)
    smaller.config = config.subset(kept, where=f"`{KEY}`")
    smaller.encoder.keep_layers(kept, smaller.config)
    return smaller


def _kept_layers(config: EncoderConfig, dropped: Collection[int]) -> list[int]:
    if strange := [layer for layer in dropped if not 0 <= layer < config.layers]:
        remedy = f"name layers from 0 to {config.layers - 1}"
        raise UserError(f"layer {strange[0]} does not exist", key=KEY, remedy=remedy)
    kept = [layer for layer in range(config.layers) if layer not in dropped]
    if not kept:
        raise UserError("this would remove every layer", key=KEY, remedy="keep at least one")
    return kept
