"""An encoder with its heads, and the construction of networks of any architecture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import Architecture, HeadSpec, InitialRule, Names, with_prefix
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder import Encoder
from bertsmith.model.encoder_config import Direction, EncoderConfig
from bertsmith.model.heads import MaskedLanguageHead
from bertsmith.packed import Layout, PackedBatch


class Network(nn.Module):
    """One encoder and its heads by name: pooler, mlm, nsp, sop, classify, tag, span, choice, replaced."""

    def __init__(self, config: EncoderConfig, encoder: Encoder, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the last hidden states [T, D]."""
        hidden_TD: Tensor = self.encoder(batch)
        return hidden_TD

    def scores(self, head: str, hidden_TD: Tensor, layout: Layout) -> Tensor:
        """Return the outputs of a head: [S, C] for a sentence head, [T, C] for one on every token."""
        if self.heads[head].reads == "tokens":
            scores_TC: Tensor = self.heads[head](hidden_TD)
            return scores_TC
        return self.scores_of_sentences(head, self.encoder.sentence_states(hidden_TD, layout))

    def scores_of_sentences(self, head: str, sentence_SD: Tensor) -> Tensor:
        """Return the outputs of a sentence head [S, C], given the state of each sequence."""
        pooled = self.heads[head].reads == "pooled"
        scores_SC: Tensor = self.heads[head](self.heads["pooler"](sentence_SD) if pooled else sentence_SD)
        return scores_SC

    def sentence_scores(self, head: str, batch: PackedBatch) -> Tensor:
        """Return the outputs of a sentence head [S, C], without computing unused states."""
        return self.scores_of_sentences(head, self.encoder.sentences(batch))

    def pooled(self, hidden_TD: Tensor, layout: Layout) -> Tensor:
        """Return the pooler's output [S, D]."""
        pooled_SD: Tensor = self.heads["pooler"](self.encoder.sentence_states(hidden_TD, layout))
        return pooled_SD

    def word_scores(self, hidden_TD: Tensor, rows_P: Tensor) -> Tensor:
        """Return scores of the whole vocabulary for the words at these rows [P, V]."""
        return self.scores_of_views(self.encoder.by_view(hidden_TD[self.encoder.predicting_rows(rows_P)]))

    def scores_of_views(self, views: Sequence[Tensor]) -> Tensor:
        """Return scores of the whole vocabulary for words [P, V], given each view's states of them.

        Several views are combined by adding log-probabilities, which a softmax normalises again.
        """
        if len(views) == 1:
            return self.scores_of_words(views[0])
        scores = torch.stack([self.scores_of_words(hidden_PD) for hidden_PD in views])
        return scores.float().log_softmax(-1).sum(0)

    def scores_of_words(self, hidden_PD: Tensor, *, aligned: bool = False) -> Tensor:
        """Return scores of the whole vocabulary for these states [P, V].

        Aligned ones are padded to a round number with words that do not exist: their scores are -inf.
        """
        words_VE = self.encoder.words.weight
        scores_PV: Tensor = self.heads["mlm"](hidden_PD, words_VE, aligned=aligned)
        return scores_PV


def build_network(config: EncoderConfig, heads: Mapping[str, int]) -> Network:
    """Build a network with unset weights; `heads` gives each head's number of outputs."""
    architecture = architecture_of(config.model_type)
    modules = {name: _head_spec(architecture, name).build(config, outputs) for name, outputs in heads.items()}
    network = Network(config, architecture.build_encoder(config), modules)
    if "mlm" in heads and not config.tied:
        head = network.heads["mlm"]
        assert isinstance(head, MaskedLanguageHead)
        head.untie(network.encoder.words.weight)
    set_direction(network, config.direction)
    return network


def set_direction(network: Network, direction: Direction) -> None:
    """Let each token see both sides or one only, in training and afterwards; update the config."""
    if direction not in (known := architecture_of(network.config.model_type).directions):
        what = f"a model of type {network.config.model_type} reads {' or '.join(known)}, never {direction}"
        raise UserError(what, key="examples.objective", remedy="choose another objective or model")
    network.encoder.look(direction)
    network.config = replace(network.config, direction=direction)


def set_pooling(network: Network, sentence: Literal["first", "mean"]) -> None:
    """Represent a sequence by another state, also in a config that can express it."""
    network.encoder.sentence = sentence
    said: dict[str, Any] = {key.name: sentence for key in fields(network.config) if key.name == "sentence"}
    network.config = replace(network.config, **said)


def new_network(config: EncoderConfig, heads: Mapping[str, int], generator: torch.Generator) -> Network:
    """Return a network with the architecture's published initial weights, sampled from the generator."""
    network = build_network(config, heads)
    initialise(network, architecture_of(config.model_type).initial(config), generator)
    return network


def initialise(module: nn.Module, rule: InitialRule, generator: torch.Generator) -> None:
    """Sample every matrix and set every vector, in the order of the parameters."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                rule.vector(name, parameter)
                continue
            std = rule.std(name)
            if math.isinf(rule.cut):
                nn.init.normal_(parameter, 0.0, std, generator=generator)
            else:
                ends = (-rule.cut * std, rule.cut * std)
                nn.init.trunc_normal_(parameter, 0.0, std, *ends, generator=generator)


def add_fresh_head(network: Network, name: str, outputs: int, generator: torch.Generator) -> list[str]:
    """Add a newly initialised head, and its missing dependencies, to a network; return their names."""
    architecture = architecture_of(network.config.model_type)
    head = _head_spec(architecture, name).build(network.config, outputs)
    initialise(head, architecture.initial(network.config), generator)
    # Sampled in fp32 on the CPU, then moved: the same weights on any device and in any precision.
    like = network.encoder.words.weight
    network.heads[name] = head.to(device=like.device, dtype=like.dtype)
    return [name, *add_missing_supports(network, generator)]


def take_transform(network: Network, name: str) -> None:
    """Copy the transform of another head into this one if both are published under the same names.

    ModernBERT's classifiers begin with the transform of its masked-LM head, in transformers as well.
    """
    architecture, config = architecture_of(network.config.model_type), network.config
    own = _head_spec(architecture, name).names(config)
    for other in set(network.heads) - {name}:
        theirs = _head_spec(architecture, other).names(config)
        same = [each for each in own if each.startswith("transform.") and own[each] == theirs.get(each)]
        with torch.no_grad():
            for each in same:
                network.heads[name].get_parameter(each).copy_(network.heads[other].get_parameter(each))


def add_missing_supports(network: Network, generator: torch.Generator) -> list[str]:
    """Initialise missing dependencies of heads (a classifier without its pooler); return their names."""
    architecture = architecture_of(network.config.model_type)
    needed = {support for head in network.heads for support in _head_spec(architecture, head).needs}
    return [
        name
        for support in sorted(needed - set(network.heads))
        for name in add_fresh_head(network, support, 0, generator)
    ]


def published_names(config: EncoderConfig, heads: Mapping[str, int]) -> Names:
    """Map every parameter of the network to its published names, with the architecture's prefix."""
    architecture = architecture_of(config.model_type)
    names = {
        f"encoder.{ours}": theirs
        for ours, theirs in with_prefix(architecture.encoder_names(config), architecture.prefix).items()
    }
    for head in heads:
        names |= {
            f"heads.{head}.{ours}": theirs
            for ours, theirs in _head_spec(architecture, head).names(config).items()
        }
    if "mlm" in heads and not config.tied:
        names["heads.mlm.decoder"] = (architecture.decoder_name(config),)
    return names


def _head_spec(architecture: Architecture[Any], head: str) -> HeadSpec[Any]:
    if head not in architecture.heads:
        remedy = f"it has {', '.join(architecture.heads)}"
        raise UserError(f"{architecture.model_type} does not have a {head!r} head", remedy=remedy)
    return architecture.heads[head]
