"""ModernBERT (Warner et al. 2024): pre-norm, rotary positions, gated layers, local and global attention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import Architecture, HeadSpec, InitialRule, Names, Pretraining, pair_of
from bertsmith.model.encoder_config import MAX_LAYERS, OWN_TYPE, ConfigReader, direction_keys
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import nn

    from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Reads, Transform
    from bertsmith.model.transformer.transformer import (
        FeedForward,
        GatedFeedForward,
        PreNormBlock,
        Transformer,
    )

GLOBAL, LOCAL = "full_attention", "sliding_attention"
POOLING = {"first": "cls", "mean": "mean"}
OWN_POOLING = {"first": "first", "mean": "average"}
"""Pooling names for our own type: a ModernBERT class of transformers that is called by name raises an error
at them, while it only warns about another type.
"""
OTHER_TOKENS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
"""Ids that the tokenizer defines; without them transformers uses the ids of the published vocabulary and
warns if our vocabulary has fewer tokens.
"""

EVERY = 3
"""Distance between global layers, as published, from the first layer on."""
Norm = Literal["layernorm", "rmsnorm"]
NORMS: tuple[Norm, ...] = ("layernorm", "rmsnorm")


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(TransformerConfig):
    """A config with layers that see the whole sequence or a window, each with its own rotary base.

    The defaults are the published ones (transformers, configuration_modernbert.py).
    """

    head_dropout: float = 0.0
    global_layers: tuple[int, ...]
    """Numbers, from 0, of the global layers; the others see a window."""
    local_attention: int = 128
    """Tokens that a local layer sees on both sides together."""
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    attention_bias: bool = False
    inner_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    decoder_bias: bool = True
    embedding_dropout: float = 0.0
    head_activation: str = "gelu"
    sentence: Literal["first", "mean"] = "first"
    initial_cut: float = 2.0
    gated: bool = True
    """True if one half of the feed-forward's inner values is multiplied by the other."""
    norm: Norm = "layernorm"
    """Kind of norm; rmsnorm does not have gains."""
    qk_norm: bool = False
    """True if each head normalises its queries and keys."""
    sandwich_norm: bool = False
    """True if the output of a sub-layer is normalised, too."""

    def expanded_in(self, block: int) -> int:
        """Return twice the inner width if one half of it is a gate."""
        return 2 * self.inner_in(block) if self.gated else self.inner_in(block)

    def seen_tokens(self, length: float, layer: int) -> float:
        """Return at most the window for a local layer."""
        return length if layer in self.global_layers else min(length, self.local_attention + 1)

    def own_settings(self) -> tuple[str, ...]:
        """Return the settings that ModernBERT does not have, by their names in a recipe."""
        differs = {
            "model.gated": not self.gated,
            "model.norm": self.norm != "layernorm",
            "model.qk_norm": self.qk_norm,
            "model.sandwich_norm": self.sandwich_norm,
            "examples.objective": self.direction != "both",
        }
        return (*(name for name, own in differs.items() if own), *super().own_settings())

    def subset(self, layers: Sequence[int], *, where: str = "distill.layers") -> Self:
        """Return the config of a network with only these layers, each with its own reach."""
        fewer = super().subset(layers, where=where)
        if 0 in layers[1:] or layers[0] != 0:
            what = "a ModernBERT's first layer lacks the norm before its attention, so it must stay the first"
            raise UserError(what, where=where, remedy="keep layer 0, once")
        seeing_all = [number for number, each in enumerate(layers) if each in self.global_layers]
        return replace(fewer, global_layers=tuple(seeing_all))

    @classmethod
    def of_recipe(cls, values: Mapping[str, Any]) -> Self:
        """Return the config for a recipe's model section, where `global_layers` may be a step."""
        layers, gated = values["global_layers"], values["gated"]
        if isinstance(layers, int):
            layers = tuple(range(0, values["layers"], layers))
        return super().of_recipe({**values, "global_layers": layers, "gated": gated in ("auto", True)})

    def in_recipe(self) -> dict[str, Any]:
        """Return its values as a recipe's model section has them."""
        steps = (EVERY, *range(1, self.layers + 1))
        fitting = (each for each in steps if self.global_layers == tuple(range(0, self.layers, each)))
        told = {"global_layers": next(fitting, self.global_layers), "gated": "auto" if self.gated else False}
        return super().in_recipe() | told


def read_config(reader: ConfigReader) -> ModernBertConfig:
    """Read the config in a config.json, in the form of 2024 or in today's."""
    width = reader.size("hidden_size", 768)
    layers = reader.size("num_hidden_layers", 22, most=MAX_LAYERS)
    heads = reader.size("num_attention_heads", 12)
    if width // heads % 2:
        what = f"rotary positions need heads of an even width, not {width // heads}"
        raise UserError(what, where=reader.where, remedy="correct hidden_size or num_attention_heads")
    global_theta, local_theta = _read_thetas(reader)
    is_own = reader.values.get("model_type") == OWN_TYPE
    sentence = {word: which for which, word in (OWN_POOLING if is_own else POOLING).items()}
    pooling = reader.word("classifier_pooling", next(iter(sentence)), choices=tuple(sentence))
    return ModernBertConfig(
        model_type="modernbert",
        vocabulary=reader.size("vocab_size", 50368),
        width=width,
        layers=layers,
        heads=heads,
        inner=reader.size("intermediate_size", 1152),
        embedding_width=width,
        positions=reader.size("max_position_embeddings", 8192),
        segments=0,
        activation=reader.activation("hidden_activation", "gelu"),
        norm_eps=reader.number("norm_eps", 1e-5),
        dropout=reader.rate("mlp_dropout", 0.0),
        attention_dropout=reader.rate("attention_dropout", 0.0),
        head_dropout=reader.rate("classifier_dropout", 0.0),
        initial_std=reader.number("initializer_range", 0.02),
        pad_id=reader.size("pad_token_id", 50283, least=0),
        direction=reader.direction(),
        global_layers=_read_global_layers(reader, layers),
        local_attention=reader.size("local_attention", 128),
        global_theta=global_theta,
        local_theta=local_theta,
        attention_bias=reader.switch("attention_bias", False),
        inner_bias=reader.switch("mlp_bias", False),
        norm_bias=reader.switch("norm_bias", False),
        head_bias=reader.switch("classifier_bias", False),
        decoder_bias=reader.switch("decoder_bias", True),
        embedding_dropout=reader.rate("embedding_dropout", 0.0),
        head_activation=reader.activation("classifier_activation", "gelu"),
        sentence=cast(Literal["first", "mean"], sentence[pooling]),
        initial_cut=reader.number("initializer_cutoff_factor", 2.0),
        gated=reader.switch("gated", True),
        norm=cast(Norm, reader.word("norm", "layernorm", choices=NORMS)),
        qk_norm=reader.switch("qk_norm", False),
        sandwich_norm=reader.switch("sandwich_norm", False),
    )


def _read_global_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    every = reader.size("global_attn_every_n_layers", EVERY)
    # Today's files list every layer; the files of 2024 have the distance between global layers.
    listed = reader.texts("layer_types")
    reach = listed or tuple(LOCAL if layer % every else GLOBAL for layer in range(layers))
    if len(reach) != layers or not set(reach) <= {GLOBAL, LOCAL}:
        remedy = f"name {GLOBAL} or {LOCAL} for each of the {layers} layers"
        raise UserError("layer_types does not fit the layers", where=reader.where, remedy=remedy)
    return tuple(layer for layer, kind in enumerate(reach) if kind == GLOBAL)


def _read_thetas(reader: ConfigReader) -> tuple[float, float]:
    """Return the rotary bases of global and local layers: today's table, or the two keys of 2024."""
    reader.require("rope_scaling", None, None)
    everywhere = reader.number("global_rope_theta", 160_000.0)
    local = reader.number("local_rope_theta", 10_000.0)
    if "local_rope_theta" in reader.values and reader.values["local_rope_theta"] is None:
        local = everywhere  # as in the files of 2024
    table = reader.table("rope_parameters")
    for kind, entry in table.items():
        if kind not in (GLOBAL, LOCAL) or not isinstance(entry, Mapping):
            what = f"rope_parameters has {kind!r}: {entry!r}"
            remedy = f"only tables for {GLOBAL} and {LOCAL} are supported"
            raise UserError(what, where=reader.where, remedy=remedy)
    return _theta_in(table, GLOBAL, everywhere, reader), _theta_in(table, LOCAL, local, reader)


def _theta_in(table: Mapping[str, Any], kind: str, default: float, reader: ConfigReader) -> float:
    rotary = ConfigReader(table.get(kind, {}), f"{reader.where} rope_parameters.{kind}")
    rotary.require("rope_type", "default", "default")
    return rotary.number("rope_theta", default)


def write_config(config: ModernBertConfig) -> dict[str, Any]:
    """Return the config.json in today's form; our own type and keys for settings that ModernBERT lacks."""
    is_own = bool(config.own_settings())
    own = {
        "gated": config.gated,
        "norm": config.norm,
        "qk_norm": config.qk_norm,
        "sandwich_norm": config.sandwich_norm,
    }
    thetas = {GLOBAL: config.global_theta, LOCAL: config.local_theta}
    return {
        "model_type": OWN_TYPE if is_own else "modernbert",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.inner,
        "max_position_embeddings": config.positions,
        "hidden_activation": config.activation,
        "norm_eps": config.norm_eps,
        "mlp_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "classifier_dropout": config.head_dropout,
        "initializer_range": config.initial_std,
        "initializer_cutoff_factor": config.initial_cut,
        "pad_token_id": config.pad_id,
        **dict.fromkeys(OTHER_TOKENS),
        **direction_keys(config),
        "layer_types": [GLOBAL if layer in config.global_layers else LOCAL for layer in range(config.layers)],
        "local_attention": config.local_attention,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
        "attention_bias": config.attention_bias,
        "mlp_bias": config.inner_bias,
        "norm_bias": config.norm_bias,
        "classifier_bias": config.head_bias,
        "decoder_bias": config.decoder_bias,
        "embedding_dropout": config.embedding_dropout,
        "classifier_activation": config.head_activation,
        "classifier_pooling": (OWN_POOLING if is_own else POOLING)[config.sentence],
        **(own if is_own else {}),
    }


def count_parameters(config: ModernBertConfig) -> int:
    """Count the weights of the encoder, which lacks a pooler."""
    # Recipes do not have a key for biases, and ModernBERT does not have biases.
    norms = 2 + 2 * config.layers - 1 + (2 * config.layers if config.sandwich_norm else 0)
    gains = norms * config.width if config.norm == "layernorm" else 0
    attention = 4 * config.head_width * sum(config.heads_in(layer) for layer in range(config.layers))
    inner = sum(config.expanded_in(layer) + config.inner_in(layer) for layer in range(config.layers))
    return config.width * (config.vocabulary + attention + inner) + gains


def build_encoder(config: ModernBertConfig) -> "Transformer":
    """Build word embeddings, pre-norm blocks and a last LayerNorm."""
    from torch import nn

    from bertsmith.model.embeddings import Embeddings
    from bertsmith.model.transformer.transformer import Transformer

    words = nn.Embedding(config.vocabulary, config.width)
    embeddings = Embeddings(words, {}, norm=_norm(config), dropout=config.embedding_dropout)
    blocks = [_build_block(config, layer) for layer in range(config.layers)]
    return Transformer(
        embeddings, blocks, order=range(config.layers), final_norm=_norm(config), sentence=config.sentence
    )


def _build_block(config: ModernBertConfig, layer: int) -> "PreNormBlock":
    from torch import nn

    from bertsmith.model.attention.rotary import NormalisedRotary, Rotary
    from bertsmith.model.attention.rule import EVERYTHING, AttentionRule
    from bertsmith.model.transformer.transformer import (
        Norms,
        PreNormBlock,
        SelfAttention,
        attention_shape,
    )

    is_global = layer in config.global_layers
    rule = AttentionRule(
        window=EVERYTHING if is_global else config.local_attention // 2, dropout=config.attention_dropout
    )
    theta = config.global_theta if is_global else config.local_theta
    rotary = NormalisedRotary(theta, eps=config.norm_eps) if config.qk_norm else Rotary(theta)
    attention = SelfAttention(
        attention_shape(config, layer), rule=rule, bias=config.attention_bias, rotary=rotary
    )
    # The embeddings are already normalised: the first layer does not do it twice.
    first = nn.Identity() if layer == 0 else _norm(config)
    added = [_norm(config) for _ in range(2)] if config.sandwich_norm else []
    norms, feed_forward = Norms(first, _norm(config), *added), _feed_forward(config, layer)
    return PreNormBlock(attention, feed_forward, norms, dropout=config.attention_dropout)


def _feed_forward(config: ModernBertConfig, layer: int) -> "FeedForward | GatedFeedForward":
    from bertsmith.model.transformer.transformer import FeedForward, GatedFeedForward

    kind, inner = GatedFeedForward if config.gated else FeedForward, config.inner_in(layer)
    return kind(config.width, inner, config.activation, bias=config.inner_bias, dropout=config.dropout)


def _norm(config: ModernBertConfig) -> "nn.LayerNorm | nn.RMSNorm":
    from torch import nn

    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps, elementwise_affine=False)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.norm_bias)


def encoder_names(config: ModernBertConfig) -> Names:
    """Return the names of encoder weights in ModernBERT's checkpoints."""
    names: Names = {"embeddings.words.weight": ("embeddings.tok_embeddings.weight",)}
    names |= _norm_names(config, "embeddings.norm", "embeddings.norm")
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        if layer:  # the first layer lacks it: see `_build_block`
            names |= _norm_names(config, f"{ours}.attention_norm", f"{theirs}.attn_norm")
        if config.sandwich_norm:
            names |= _norm_names(config, f"{ours}.attention_output_norm", f"{theirs}.attn_output_norm")
            names |= _norm_names(config, f"{ours}.feed_forward_output_norm", f"{theirs}.mlp_output_norm")
        names |= {
            **pair_of(f"{ours}.attention.project", f"{theirs}.attn.Wqkv", bias=config.attention_bias),
            **pair_of(f"{ours}.attention.output", f"{theirs}.attn.Wo", bias=config.attention_bias),
            **_norm_names(config, f"{ours}.feed_forward_norm", f"{theirs}.mlp_norm"),
            **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.mlp.Wi", bias=config.inner_bias),
            **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.mlp.Wo", bias=config.inner_bias),
        }
    return names | _norm_names(config, "final_norm", "final_norm")


def _norm_names(config: ModernBertConfig, ours: str, theirs: str) -> Names:
    return pair_of(ours, theirs, bias=config.norm_bias) if config.norm == "layernorm" else {}


def _transform(config: ModernBertConfig) -> "Transform":
    from torch import nn

    from bertsmith.model.heads import Transform

    dense = nn.Linear(config.width, config.width, bias=config.head_bias)
    return Transform(dense, config.head_activation, _norm(config))


def _transform_names(config: ModernBertConfig, head: str = "head") -> Names:
    dense = pair_of("transform.dense", f"{head}.dense", bias=config.head_bias)
    return dense | _norm_names(config, "transform.norm", f"{head}.norm")


def _build_masked_language_head(config: ModernBertConfig, _: int) -> "MaskedLanguageHead":
    from bertsmith.model.heads import MaskedLanguageHead

    return MaskedLanguageHead(_transform(config), config.vocabulary, bias=config.decoder_bias)


def _masked_language_names(config: ModernBertConfig) -> Names:
    return _transform_names(config) | ({"bias": ("decoder.bias",)} if config.decoder_bias else {})


def _output_head(
    reads: "Reads", outputs: int = 0, *, part: str = "", drops: bool = True
) -> HeadSpec[ModernBertConfig]:
    """Build the classifier behind a transform; published classes do not have one with a separate `part`."""

    def build(config: ModernBertConfig, wanted: int) -> "OutputHead":
        from torch import nn

        from bertsmith.model.heads import OutputHead

        layer, rate = nn.Linear(config.width, outputs or wanted), config.head_dropout if drops else 0.0
        return OutputHead(layer, reads=reads, dropout=rate, transform=_transform(config))

    def names(config: ModernBertConfig) -> Names:
        return _transform_names(config, f"{part}head") | pair_of("output", f"{part}classifier")

    return HeadSpec(build, names, labelled=not outputs)


def generator_config(config: ModernBertConfig, size: float) -> ModernBertConfig:
    """Return the config of the masked LM that a discriminator learns from, with a fraction of its layers.

    It is as wide as the discriminator (He et al. 2021, DeBERTaV3): both share embeddings, which cannot be
    made narrower here.
    """
    layers = max(1, round(config.layers * size))
    return replace(
        config,
        layers=layers,
        global_layers=tuple(layer for layer in config.global_layers if layer < layers),
        layer_heads=config.layer_heads[:layers],
        layer_inner=config.layer_inner[:layers],
    )


def initial(config: ModernBertConfig) -> InitialRule:
    """Return the rule: residual outputs start smaller, task outputs at 1 / sqrt(width)."""
    smaller = config.initial_std / math.sqrt(2 * config.layers)

    def std(name: str) -> float:
        if name.endswith(("attention.output.weight", "contract.weight", "transform.dense.weight")):
            return smaller
        return 1 / math.sqrt(config.width) if name.endswith("output.weight") else config.initial_std

    return InitialRule(std, cut=config.initial_cut)


MODERNBERT = Architecture(
    model_type="modernbert",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="model.",
    heads={
        "mlm": HeadSpec(_build_masked_language_head, _masked_language_names),
        # Without dropout, like BERT's and ELECTRA's. The names are ours: transformers ignores them.
        "nsp": _output_head("sentence", outputs=2, part="pair_", drops=False),
        "replaced": _output_head("tokens", outputs=1, part="replaced_", drops=False),
        "classify": _output_head("sentence"),
        "tag": _output_head("tokens"),
        "span": _output_head("tokens", outputs=2),
        "choice": _output_head("sentence", outputs=1),
    },
    classes={
        "ModernBertForMaskedLM": ("mlm",),
        "ModernBertForSequenceClassification": ("classify",),
        "ModernBertForTokenClassification": ("tag",),
        "ModernBertForQuestionAnswering": ("span",),
        "ModernBertForMultipleChoice": ("choice",),
        "ModernBertModel": (),
    },
    initial=initial,
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    # The published vocabulary is byte-level BPE of 50,368 entries, some of them unused.
    pretraining=Pretraining(
        50_368,
        count_parameters,
        ModernBertConfig,
        min_segments=0,
        own_head_dropout=True,
        generator_config=generator_config,
        generator_part="layers",
    ),
)
