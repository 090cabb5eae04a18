"""Heads and feed-forward neurons removed from a network, and restored as zeros for other tools.

Shapes: H heads, K head width, D model width, I inner width, O outputs of a layer.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer import Block, GatedFeedForward, as_transformer
from bertsmith.model.transformer.transformer_config import TransformerConfig, with_heads

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptUnits:
    """Indices of the heads and feed-forward neurons that a block keeps."""

    heads: Numbers
    neurons: Numbers


def blocks_to_prune(network: Network) -> list[Block]:
    """Return the blocks of a network; each has the weights of one layer, or of all that run it (ALBERT)."""
    if is_quantised(network):
        remedy = "prune the model that it was made from, and quantise again"
        raise UserError("the model is quantised, so its weights are fixed", remedy=remedy)
    blocks = as_transformer(network.encoder, "heads or neurons that can be pruned").own_blocks()
    for part in ("attention", "feed_forward"):
        if len({id(getattr(block, part)) for block in blocks}) < len(blocks):
            what = "some layers share a part of their weights, so pruning one layer would change others"
            raise UserError(what, remedy="prune a model with layers that share all of their weights, or none")
    return blocks


def all_units(network: Network) -> list[KeptUnits]:
    """Return every head and neuron of each block."""
    config = with_heads(network.config)
    return [
        KeptUnits(tuple(range(config.heads_in(block))), tuple(range(config.inner_in(block))))
        for block in range(config.blocks)
    ]


def pruned_network(network: Network, kept: Sequence[KeptUnits]) -> Network:
    """Return a copy of a network with only these heads and neurons, and correspondingly smaller weights."""
    for layer, units in enumerate(kept):
        if not (units.heads and units.neurons):
            what = f"layer {layer} would lose all of its {'neurons' if units.heads else 'heads'}"
            raise UserError(what, remedy="keep at least one")
    pruned = deepcopy(network)
    for block, units in zip(blocks_to_prune(pruned), kept, strict=True):
        _slice_attention(block, units.heads)
        _slice_feed_forward(block, units.neurons)
    pruned.config = _with_counts(with_heads(network.config), kept)
    return pruned


def _with_counts(config: TransformerConfig, kept: Sequence[KeptUnits]) -> TransformerConfig:
    """Return the config of these shapes; a value that all layers share is stored once."""
    heads, inner = [len(units.heads) for units in kept], [len(units.neurons) for units in kept]
    return replace(
        config,
        inner=max(inner),
        layer_heads=() if set(heads) == {config.heads} else tuple(heads),
        layer_inner=() if len(set(inner)) == 1 else tuple(inner),
    )


def _slice_attention(block: Block, heads: Numbers) -> None:
    attention = block.attention
    width = attention.output.in_features // attention.heads
    rows_HK = torch.arange(attention.output.in_features).view(attention.heads, width)
    mixed = rows_HK[list(heads)].flatten()
    # Query, key and value are stacked.
    stacked = torch.cat([mixed + part * attention.output.in_features for part in range(3)])
    attention.project = _linear_of(attention.project, outputs=stacked)
    attention.output = _linear_of(attention.output, inputs=mixed)
    attention.heads = len(heads)


def _slice_feed_forward(block: Block, neurons: Numbers) -> None:
    feed_forward = block.feed_forward
    inner = torch.tensor(neurons)
    # A gated layer has the gates' rows below the neurons' rows.
    gates = [inner + feed_forward.contract.in_features] if isinstance(feed_forward, GatedFeedForward) else []
    feed_forward.expand = _linear_of(feed_forward.expand, outputs=torch.cat([inner, *gates]))
    feed_forward.contract = _linear_of(feed_forward.contract, inputs=inner)


def _linear_of(
    linear: nn.Linear, *, outputs: Tensor | None = None, inputs: Tensor | None = None
) -> nn.Linear:
    """Return a linear layer with some of another's outputs or inputs."""
    weight_OI, bias_O = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if outputs is not None:
        outputs = outputs.to(weight_OI.device)
        weight_OI = weight_OI[outputs]
        bias_O = None if bias_O is None else bias_O[outputs]
    if inputs is not None:
        weight_OI = weight_OI[:, inputs.to(weight_OI.device)]
    return _linear(weight_OI, bias_O)


def _linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI.contiguous())
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O.contiguous())
    return linear


# ---- back to a shape that other tools support


def zero_filled_network(network: Network) -> Network:
    """Return a network with the same outputs and one shape for all layers: pruned units are zeros."""
    filled, config = deepcopy(network), with_heads(network.config)
    for block in blocks_to_prune(filled):
        attention, feed_forward = block.attention, block.feed_forward
        attention.project = _filled(attention.project, outputs=config.width, stacked=3)
        attention.output = _filled(attention.output, inputs=config.width)
        attention.heads = config.heads
        halves = 2 if isinstance(feed_forward, GatedFeedForward) else 1
        feed_forward.expand = _filled(feed_forward.expand, outputs=config.inner, stacked=halves)
        feed_forward.contract = _filled(feed_forward.contract, inputs=config.inner)
    filled.config = replace(config, layer_heads=(), layer_inner=())
    return filled


def _filled(linear: nn.Linear, *, outputs: int = 0, inputs: int = 0, stacked: int = 1) -> nn.Linear:
    """Return a linear layer with zeros after the outputs of each stacked matrix, or after its inputs."""
    weight_OI, bias_O = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if outputs:
        weight_OI = torch.cat([_longer(part, outputs) for part in weight_OI.chunk(stacked)])
        if bias_O is not None:
            bias_O = torch.cat([_longer(part, outputs) for part in bias_O.chunk(stacked)])
    if inputs:
        weight_OI = _longer(weight_OI.mT, inputs).mT
    return _linear(weight_OI, bias_O)


def _longer(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
