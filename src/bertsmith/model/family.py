"""The family: which members there are, and how to make a network of any of them."""

from collections.abc import Mapping

import torch

from bertsmith.ground.errors import UserError
from bertsmith.model.initial import initialise
from bertsmith.model.member import HeadPlan, Member, Names, with_prefix
from bertsmith.model.network import Network
from bertsmith.model.relatives.albert import ALBERT
from bertsmith.model.relatives.bert import BERT
from bertsmith.model.relatives.distilbert import DISTILBERT
from bertsmith.model.relatives.electra import ELECTRA
from bertsmith.model.relatives.ernie import ERNIE
from bertsmith.model.relatives.modernbert import MODERNBERT
from bertsmith.model.relatives.roberta import ROBERTA
from bertsmith.model.shape import Shape

FAMILY: dict[str, Member] = {
    member.model_type: member for member in (BERT, ROBERTA, ALBERT, DISTILBERT, ERNIE, ELECTRA, MODERNBERT)
}


def member_of(model_type: str, *, where: str = "") -> Member:
    """The member of this name."""
    if model_type not in FAMILY:
        remedy = f"bertsmith knows {', '.join(FAMILY)}"
        raise UserError(f"unknown model_type {model_type!r}", where=where, remedy=remedy)
    return FAMILY[model_type]


def build_network(shape: Shape, heads: Mapping[str, int]) -> Network:
    """A network whose weights are still to be filled; `heads` gives each head's number of outputs."""
    member = member_of(shape.model_type)
    modules = {name: _plan(member, name).build(shape, outputs) for name, outputs in heads.items()}
    return Network(shape, member.build_encoder(shape), modules)


def new_network(shape: Shape, heads: Mapping[str, int], stream: torch.Generator) -> Network:
    """A network with the member's published initial weights, drawn from the stream."""
    network = build_network(shape, heads)
    initialise(network, member_of(shape.model_type).initial(shape), stream)
    return network


def add_fresh_head(network: Network, name: str, outputs: int, stream: torch.Generator) -> list[str]:
    """Put a newly drawn head, and what it stands on, on a network that lacks them; their names."""
    member = member_of(network.shape.model_type)
    head = _plan(member, name).build(network.shape, outputs)
    initialise(head, member.initial(network.shape), stream)
    like = network.encoder.embeddings.words.weight
    network.heads[name] = head.to(device=like.device, dtype=like.dtype)
    return [name, *add_missing_supports(network, stream)]


def add_missing_supports(network: Network, stream: torch.Generator) -> list[str]:
    """Draw what heads stand on where it is missing (a classifier without its pooler); the names drawn."""
    member = member_of(network.shape.model_type)
    needed = {support for head in network.heads for support in _plan(member, head).needs}
    return [
        name
        for support in sorted(needed - set(network.heads))
        for name in add_fresh_head(network, support, 0, stream)
    ]


def published_names(shape: Shape, heads: Mapping[str, int]) -> Names:
    """Every parameter of the network -> its published names, in the form with the member's prefix."""
    member = member_of(shape.model_type)
    names = {
        f"encoder.{ours}": theirs
        for ours, theirs in with_prefix(member.encoder_names(shape), member.prefix).items()
    }
    for head in heads:
        names |= {f"heads.{head}.{ours}": theirs for ours, theirs in _plan(member, head).names(shape).items()}
    return names


def _plan(member: Member, head: str) -> HeadPlan:
    if head not in member.heads:
        remedy = f"it has {', '.join(member.heads)}"
        raise UserError(f"{member.model_type} has no {head!r} head", remedy=remedy)
    return member.heads[head]
