"""Conversion of a trained BERT to an ALBERT (Lan et al. 2019): shared layers, factorised word embeddings.

The shared weights of a group of layers are the mean of their weights, or the first layer's. The result is
worse than the BERT until it is trained further; if nothing is shared or narrowed, it computes the same.

Shapes: V words, D width, E embedding width.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import Bert
from bertsmith.model.architectures.albert import SHARED_PARTS, AlbertConfig, Sharing
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.folder.model_folder import head_outputs
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.network import Network, build_network
from bertsmith.model.transformer.transformer import Block, Transformer, as_transformer

KEPT_HEADS = ("pooler", "mlm", "classify", "tag", "span", "choice")
"""Heads that an ALBERT also has, in the same form."""


@dataclass(frozen=True, slots=True)
class SharedShape:
    """Weights that layers share, and the width of the embeddings."""

    sharing: Sharing | Literal["none"] = "all"
    groups: int = 1
    """Number of groups of neighbouring layers that share weights."""
    embedding_width: int | None = None
    """Embedding width; None means the model's width."""
    take: Literal["average", "first"] = "average"
    """Shared weights of a group: the mean of its layers, or its first layer."""


def shared_model(bert: Bert, shape: SharedShape) -> Bert:
    """Return the model with shared weights; a word head that does not fit narrower embeddings is left out."""
    network = bert.model.network
    config = _albert_config(network.config, shape)
    if is_quantised(network):
        remedy = "share the model that it was made from, and quantise again"
        raise UserError("the model is quantised, so its weights are fixed", remedy=remedy)
    model = replace(bert.model, network=shared_network(network, config, shape.take))
    return Bert(model, bert.tokenizer, device="cpu", finetuned=bert.finetuned)


def shared_network(
    network: Network, config: AlbertConfig, take: Literal["average", "first"] = "average"
) -> Network:
    """Return a network of this config with a BERT's weights."""
    wanted = [each for each in KEPT_HEADS if each in network.heads]
    if config.embedding_width < config.width and "mlm" in wanted:
        wanted.remove("mlm")  # with narrower embeddings its last layer would need another shape
    outputs = head_outputs(network)
    shared = build_network(config, {head: outputs[head] for head in wanted})
    ours, theirs = (as_transformer(each.encoder, "blocks") for each in (shared, network))
    with torch.no_grad():
        _fill_embeddings(ours.embeddings, theirs.embeddings)
        for number, block in enumerate(ours.own_blocks()):
            _fill_block(block, number, theirs, config, take)
        for head in wanted:
            shared.heads[head].load_state_dict(network.heads[head].state_dict())
    return shared.eval()


def _albert_config(config: EncoderConfig, shape: SharedShape) -> AlbertConfig:
    if config.model_type != "bert" or config.own_keys():
        kind = "it is pruned" if config.model_type == "bert" else f"its type is {config.model_type}"
        what = f"{kind}, but only a BERT with layers of equal shape can become an ALBERT"
        raise UserError(what, key="model", remedy="pre-train an ALBERT (model.sharing) or distil one")
    for key, given, most in (
        ("groups", shape.groups, config.layers),
        ("embedding_width", shape.embedding_width or config.width, config.width),
    ):
        if not 1 <= given <= most:
            raise UserError(
                f"{given} is not a possible value", key=key, remedy=f"give a number from 1 to {most}"
            )
    own = {
        "model_type": "albert",
        "embedding_width": shape.embedding_width or config.width,
        "groups": config.layers if shape.sharing == "none" else shape.groups,
        "sharing": "all" if shape.sharing == "none" else shape.sharing,
    }
    return AlbertConfig(**vars(config) | own)


def _fill_block(
    block: Block, number: int, bert: Transformer, config: AlbertConfig, take: Literal["average", "first"]
) -> None:
    """Fill each part of a block: from one layer, or from all layers of its group."""
    groups = config.group_of_layers()
    whole = config.sharing == "all"
    group = number if whole else groups[number]
    members = [layer for layer, of in enumerate(groups) if of == group]
    for name, part in block.named_children():
        shares = whole or name in SHARED_PARTS[config.sharing]
        layers = (members if take == "average" else members[:1]) if shares else [number]
        states = [getattr(bert.blocks[layer], name).state_dict() for layer in layers]
        part.load_state_dict(
            {key: torch.stack([each[key] for each in states]).mean(0) for key in part.state_dict()}
        )


def _fill_embeddings(ours: Embeddings, theirs: Embeddings) -> None:
    """Copy the tables and widening layer as they are, or in fewer dimensions."""
    widen, width = ours.widen, theirs.words.embedding_dim
    assert isinstance(widen, nn.Linear)
    if widen.in_features == width:
        ours.load_state_dict(
            {**theirs.state_dict(), "widen.weight": torch.eye(width), "widen.bias": torch.zeros(width)}
        )
        return
    assert isinstance(theirs.norm, nn.LayerNorm) and isinstance(ours.norm, nn.LayerNorm)
    basis_DE = _basis(theirs, widen.in_features)
    for name, table in theirs.state_dict().items():
        if not name.startswith("norm."):
            ours.get_parameter(name).copy_(table.float() @ basis_DE)
    nn.init.ones_(ours.norm.weight)
    nn.init.zeros_(ours.norm.bias)
    # Both LayerNorms scale to a root mean square of 1, over D numbers and over E.
    scale = (width / widen.in_features) ** 0.5
    widen.weight.copy_(theirs.norm.weight[:, None] * basis_DE * scale)
    widen.bias.copy_(theirs.norm.bias)


def _basis(embeddings: Embeddings, width: int) -> Tensor:
    """Return a basis from D to E dimensions [D, E]: principal components, without the LayerNorm's mean.

    A LayerNorm subtracts the mean over the dimensions. So the mean is removed from D, and no direction of E
    is spent on it: E - 1 principal directions are embedded into the E numbers with a sum of 0. A sum of
    vectors in these directions is normalised to the same result as before.
    """
    state = embeddings.state_dict()
    tables = [table for name, table in state.items() if not name.startswith("norm.")]
    full = tables[0].shape[1]
    covariance_DD = torch.zeros(full, full, dtype=torch.float64)
    for table in tables:  # a token has one vector from each table
        centred = table.double() - table.double().mean(-1, keepdim=True)
        covariance_DD += centred.T @ centred / len(table)
    principal = torch.linalg.eigh(covariance_DD)[1].flip(-1)[:, : width - 1]
    principal = principal - principal.mean(0)
    beside_ones = torch.linalg.qr(torch.eye(width, dtype=torch.float64) - 1 / width)[0][:, : width - 1]
    basis_DE: Tensor = (principal @ beside_ones.T).float()
    return basis_DE
