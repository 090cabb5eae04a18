"""ModernBERT (Warner et al. 2024): pre-norm, rotary positions, gated layers, local and global attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import Architecture, HeadSpec, InitialRule, Names, pair_of
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader, EncoderConfig, direction_keys

if TYPE_CHECKING:
    from torch import nn

    from bertsmith.model.encoder import Encoder, PreNormBlock
    from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Reads, Transform

GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    """A config whose layers look at everything or at a window, each with rotary positions of its own base."""

    reach: tuple[str, ...]
    """For each layer, GLOBAL or LOCAL."""
    local_attention: int
    """Tokens that a local layer sees on both sides together."""
    global_theta: float
    local_theta: float
    attention_bias: bool
    inner_bias: bool
    norm_bias: bool
    head_bias: bool
    decoder_bias: bool
    embedding_dropout: float
    head_activation: str
    sentence: Literal["first", "mean"]
    initial_cut: float


def read_config(reader: ConfigReader) -> ModernBertConfig:
    """The config in a config.json, in the form of 2024 or in today's."""
    width = reader.size("hidden_size", 768)
    layers = reader.size("num_hidden_layers", 22, most=MAX_LAYERS)
    heads = reader.size("num_attention_heads", 12)
    if width // heads % 2:
        what = f"rotary positions need heads of an even width, not {width // heads}"
        raise UserError(what, where=reader.where, remedy="correct hidden_size or num_attention_heads")
    global_theta, local_theta = _read_thetas(reader)
    pooling = reader.word("classifier_pooling", "cls", choices=("cls", "mean"))
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
        reach=_read_reach(reader, layers),
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
        sentence=cast(Literal["first", "mean"], {"cls": "first", "mean": "mean"}[pooling]),
        initial_cut=reader.number("initializer_cutoff_factor", 2.0),
    )


def _read_reach(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    every = reader.size("global_attn_every_n_layers", 3)
    # Today's files list every layer; those of 2024 say how many layers lie from one global one to the next.
    listed = reader.texts("layer_types")
    reach = listed or tuple(LOCAL if layer % every else GLOBAL for layer in range(layers))
    if len(reach) != layers or not set(reach) <= {GLOBAL, LOCAL}:
        remedy = f"name {GLOBAL} or {LOCAL} for each of the {layers} layers"
        raise UserError("layer_types does not fit the layers", where=reader.where, remedy=remedy)
    return reach


def _read_thetas(reader: ConfigReader) -> tuple[float, float]:
    """The rotary bases of global and local layers: today's table, or the two keys of 2024."""
    reader.require("rope_scaling", None, None)
    everywhere = reader.number("global_rope_theta", 160_000.0)
    local = reader.number("local_rope_theta", 10_000.0)
    if "local_rope_theta" in reader.values and reader.values["local_rope_theta"] is None:
        local = everywhere  # as in the files of 2024
    table = reader.table("rope_parameters")
    for kind, entry in table.items():
        if kind not in (GLOBAL, LOCAL) or not isinstance(entry, Mapping):
            what = f"rope_parameters has {kind!r}: {entry!r}"
            remedy = f"only tables for {GLOBAL} and {LOCAL} are known"
            raise UserError(what, where=reader.where, remedy=remedy)
    return _theta_in(table, GLOBAL, everywhere, reader), _theta_in(table, LOCAL, local, reader)


def _theta_in(table: Mapping[str, Any], kind: str, default: float, reader: ConfigReader) -> float:
    rotary = ConfigReader(table.get(kind, {}), f"{reader.where} rope_parameters.{kind}")
    rotary.require("rope_type", "default", "default")
    return rotary.number("rope_theta", default)


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """The config.json in today's form."""
    assert isinstance(config, ModernBertConfig)
    thetas = {GLOBAL: config.global_theta, LOCAL: config.local_theta}
    return {
        "model_type": "modernbert",
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
        **direction_keys(config),
        "layer_types": list(config.reach),
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
        "classifier_pooling": {"first": "cls", "mean": "mean"}[config.sentence],
    }


def build_encoder(config: EncoderConfig) -> "Encoder":
    """Word embeddings, pre-norm blocks and a last LayerNorm."""
    from torch import nn

    from bertsmith.model.encoder import Embeddings, Encoder

    assert isinstance(config, ModernBertConfig)
    words = nn.Embedding(config.vocabulary, config.width)
    embeddings = Embeddings(words, {}, norm=_norm(config), dropout=config.embedding_dropout)
    blocks = [_build_block(config, layer) for layer in range(config.layers)]
    return Encoder(
        embeddings, blocks, order=range(config.layers), final_norm=_norm(config), sentence=config.sentence
    )


def _build_block(config: ModernBertConfig, layer: int) -> "PreNormBlock":
    from torch import nn

    from bertsmith.model.attention import EVERYTHING, AttentionRule
    from bertsmith.model.encoder import GatedFeedForward, Norms, PreNormBlock, Rotary, SelfAttention

    is_global = config.reach[layer] == GLOBAL
    rule = AttentionRule(
        window=EVERYTHING if is_global else config.local_attention // 2, dropout=config.attention_dropout
    )
    rotary = Rotary(config.global_theta if is_global else config.local_theta)
    attention = SelfAttention(
        config.width, config.heads, rule=rule, bias=config.attention_bias, rotary=rotary
    )
    feed_forward = GatedFeedForward(
        config.width, config.inner, config.activation, bias=config.inner_bias, dropout=config.dropout
    )
    # The embeddings are normalised already: the first layer does not do it twice.
    norms = Norms(nn.Identity() if layer == 0 else _norm(config), _norm(config))
    return PreNormBlock(attention, feed_forward, norms, dropout=config.attention_dropout)


def _norm(config: ModernBertConfig) -> "nn.LayerNorm":
    from torch import nn

    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.norm_bias)


def encoder_names(config: EncoderConfig) -> Names:
    """Encoder weights as ModernBERT's checkpoints call them."""
    assert isinstance(config, ModernBertConfig)
    names: Names = {"embeddings.words.weight": ("embeddings.tok_embeddings.weight",)}
    names |= pair_of("embeddings.norm", "embeddings.norm", bias=config.norm_bias)
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        if layer:  # the first has none: see `_build_block`
            names |= pair_of(f"{ours}.attention_norm", f"{theirs}.attn_norm", bias=config.norm_bias)
        names |= {
            **pair_of(f"{ours}.attention.project", f"{theirs}.attn.Wqkv", bias=config.attention_bias),
            **pair_of(f"{ours}.attention.output", f"{theirs}.attn.Wo", bias=config.attention_bias),
            **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.mlp_norm", bias=config.norm_bias),
            **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.mlp.Wi", bias=config.inner_bias),
            **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.mlp.Wo", bias=config.inner_bias),
        }
    return names | pair_of("final_norm", "final_norm", bias=config.norm_bias)


def _transform(config: EncoderConfig) -> "Transform":
    from torch import nn

    from bertsmith.model.heads import Transform

    assert isinstance(config, ModernBertConfig)
    dense = nn.Linear(config.width, config.width, bias=config.head_bias)
    return Transform(dense, config.head_activation, _norm(config))


def _transform_names(config: EncoderConfig) -> Names:
    assert isinstance(config, ModernBertConfig)
    return pair_of("transform.dense", "head.dense", bias=config.head_bias) | pair_of(
        "transform.norm", "head.norm", bias=config.norm_bias
    )


def _build_masked_language_head(config: EncoderConfig, _: int) -> "MaskedLanguageHead":
    from bertsmith.model.heads import MaskedLanguageHead

    assert isinstance(config, ModernBertConfig)
    return MaskedLanguageHead(_transform(config), config.vocabulary, bias=config.decoder_bias)


def _masked_language_names(config: EncoderConfig) -> Names:
    assert isinstance(config, ModernBertConfig)
    return _transform_names(config) | ({"bias": ("decoder.bias",)} if config.decoder_bias else {})


def _output_head(reads: "Reads", outputs: int = 0) -> HeadSpec:
    def build(config: EncoderConfig, wanted: int) -> "OutputHead":
        from torch import nn

        from bertsmith.model.heads import OutputHead

        layer = nn.Linear(config.width, outputs or wanted)
        return OutputHead(layer, reads=reads, dropout=config.head_dropout, transform=_transform(config))

    def names(config: EncoderConfig) -> Names:
        return _transform_names(config) | pair_of("output", "classifier")

    return HeadSpec(build, names, labelled=not outputs)


def initial(config: EncoderConfig) -> InitialRule:
    """Layers that write to the residual stream start smaller; task outputs start at 1 / sqrt(width)."""
    assert isinstance(config, ModernBertConfig)
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
)
