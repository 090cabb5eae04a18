"""A network of some layers of another one: what a student begins with (DistilBERT; Sanh et al. 2019)."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.albert import AlbertConfig
from bertsmith.model.architectures.distilbert import DistilBertConfig
from bertsmith.model.architectures.modernbert import ModernBertConfig
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network
from bertsmith.model.transformer import PositionTable

DISTILBERT_EPS = 1e-12
"""Of every LayerNorm of a DistilBERT, whose config.json has no key for it."""


def evenly_spaced(layers: int, wanted: int) -> tuple[int, ...]:
    """So many of these layers, from the first to the last: of 12 layers, 6 are 0, 2, 4, 7, 9 and 11.

    These are the six of DistilBERT's script (extract_distilbert.py).
    """
    if wanted == 1:
        return (0,)
    return tuple(int(number * (layers - 1) / (wanted - 1) + 0.5) for number in range(wanted))


def subset_config(
    config: EncoderConfig, layers: Sequence[int], *, where: str = "distill.layers"
) -> EncoderConfig:
    """The config of a network with only these layers of one with this config; `where` they were asked for."""
    if behind := [each for each in layers if each >= config.layers]:
        what = (
            f"the teacher has {config.layers} layers, and layer {behind[0]}, counted from 0, is none of them"
        )
        raise UserError(what, where=where, remedy="choose fewer, or a larger teacher")

    def left(sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of these layers where pruning left each its own; one block has one for all layers."""
        return tuple(sizes[each] for each in layers) if len(sizes) == config.layers else sizes

    heads, inner = left(config.layer_heads), left(config.layer_inner)
    fewer = replace(config, layers=len(layers), layer_heads=heads, layer_inner=inner)
    if isinstance(fewer, AlbertConfig) and fewer.groups > 1:
        what = f"layers that share their weights in {fewer.groups} groups cannot be left out"
        raise UserError(what, where=where, remedy="take a model that shares all of its layers, or none")
    if isinstance(fewer, ModernBertConfig):
        if 0 in layers[1:] or layers[0] != 0:
            what = "a ModernBERT's first layer has no norm before its attention, and stays the first"
            raise UserError(what, where=where, remedy="keep layer 0, once")
        seeing_all = [number for number, each in enumerate(layers) if each in fewer.global_layers]
        fewer = replace(fewer, global_layers=tuple(seeing_all))
    return fewer


def without_segments(config: EncoderConfig) -> EncoderConfig:
    """The config as DistilBERT's, which has no segments and no pooler, where a BERT can become one."""
    fits = config.model_type == "bert" and config.norm_eps == DISTILBERT_EPS
    if not fits:
        return config
    return DistilBertConfig(
        **{**vars(config), "model_type": "distilbert", "segments": 0, "head_dropout": 0.2}
    )


def network_of_layers(source: Network, layers: Sequence[int], config: EncoderConfig) -> Network:
    """A network of this config with these layers of another one, its embeddings and its MLM head.

    What `without_segments` leaves out, the first segment's vector, becomes part of every position's: with one
    segment both networks have the same embeddings.
    """
    encoder = deepcopy(source.encoder)
    encoder.keep_layers(layers, config.order())
    if not config.segments and encoder.input is not None:
        encoder.input.fold_segment()
    return Network(
        config, encoder, {name: deepcopy(source.heads[name]) for name in source.heads if name == "mlm"}
    ).eval()


def freeze_positions(network: Network) -> bool:
    """Let the position table stay as it is; whether there is one."""
    parts = network.encoder.input
    tables = (
        [] if parts is None else [each for each in parts.added.values() if isinstance(each, PositionTable)]
    )
    for table in tables:
        table.requires_grad_(False)
    return bool(tables)
