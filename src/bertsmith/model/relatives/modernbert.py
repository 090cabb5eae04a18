"""ModernBERT (Warner et al. 2024): pre-norm, rotary positions, gated layers, local and global attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn

from bertsmith.ground.errors import UserError
from bertsmith.model.attention_rule import EVERYTHING, AttentionRule
from bertsmith.model.encoder import (
    Embeddings,
    Encoder,
    GatedFeedForward,
    Norms,
    PreNormBlock,
    Rotary,
    SelfAttention,
)
from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Reads, Transform
from bertsmith.model.initial import InitialRule
from bertsmith.model.member import HeadPlan, Member, Names, pair_of
from bertsmith.model.settings import MOST_LAYERS, Settings
from bertsmith.model.shape import Shape

GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ModernBertShape(Shape):
    """A shape whose layers look at everything or at a window, each with rotary positions of its own base."""

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


def read_shape(settings: Settings) -> ModernBertShape:
    """The shape in a config.json, in the form of 2024 or in today's."""
    width = settings.size("hidden_size", 768)
    layers = settings.size("num_hidden_layers", 22, most=MOST_LAYERS)
    heads = settings.size("num_attention_heads", 12)
    if width // heads % 2:
        what = f"rotary positions need heads of an even width, not {width // heads}"
        raise UserError(what, where=settings.where, remedy="correct hidden_size or num_attention_heads")
    global_theta, local_theta = _read_thetas(settings)
    pooling = settings.word("classifier_pooling", "cls", choices=("cls", "mean"))
    return ModernBertShape(
        model_type="modernbert",
        vocabulary=settings.size("vocab_size", 50368),
        width=width,
        layers=layers,
        heads=heads,
        inner=settings.size("intermediate_size", 1152),
        embedding_width=width,
        positions=settings.size("max_position_embeddings", 8192),
        segments=0,
        activation=settings.activation("hidden_activation", "gelu"),
        norm_eps=settings.number("norm_eps", 1e-5),
        dropout=settings.rate("mlp_dropout", 0.0),
        attention_dropout=settings.rate("attention_dropout", 0.0),
        head_dropout=settings.rate("classifier_dropout", 0.0),
        initial_std=settings.number("initializer_range", 0.02),
        pad_id=settings.size("pad_token_id", 50283, least=0),
        reach=_read_reach(settings, layers),
        local_attention=settings.size("local_attention", 128),
        global_theta=global_theta,
        local_theta=local_theta,
        attention_bias=settings.switch("attention_bias", False),
        inner_bias=settings.switch("mlp_bias", False),
        norm_bias=settings.switch("norm_bias", False),
        head_bias=settings.switch("classifier_bias", False),
        decoder_bias=settings.switch("decoder_bias", True),
        embedding_dropout=settings.rate("embedding_dropout", 0.0),
        head_activation=settings.activation("classifier_activation", "gelu"),
        sentence=cast(Literal["first", "mean"], {"cls": "first", "mean": "mean"}[pooling]),
        initial_cut=settings.number("initializer_cutoff_factor", 2.0),
    )


def _read_reach(settings: Settings, layers: int) -> tuple[str, ...]:
    every = settings.size("global_attn_every_n_layers", 3)
    listed = settings.texts("layer_types")
    reach = listed or tuple(LOCAL if layer % every else GLOBAL for layer in range(layers))
    if len(reach) != layers or not set(reach) <= {GLOBAL, LOCAL}:
        remedy = f"name {GLOBAL} or {LOCAL} for each of the {layers} layers"
        raise UserError("layer_types does not fit the layers", where=settings.where, remedy=remedy)
    return reach


def _read_thetas(settings: Settings) -> tuple[float, float]:
    """The rotary bases of global and local layers: today's table, or the two keys of 2024."""
    settings.refuse_unless("rope_scaling", None, None)
    everywhere = settings.number("global_rope_theta", 160_000.0)
    local = settings.number("local_rope_theta", 10_000.0)
    if "local_rope_theta" in settings.values and settings.values["local_rope_theta"] is None:
        local = everywhere  # as in the files of 2024
    table = settings.table("rope_parameters")
    for kind, entry in table.items():
        if kind not in (GLOBAL, LOCAL) or not isinstance(entry, Mapping):
            what = f"rope_parameters has {kind!r}: {entry!r}"
            remedy = f"only tables for {GLOBAL} and {LOCAL} are known"
            raise UserError(what, where=settings.where, remedy=remedy)
    return _theta_in(table, GLOBAL, everywhere, settings), _theta_in(table, LOCAL, local, settings)


def _theta_in(table: Mapping[str, Any], kind: str, default: float, settings: Settings) -> float:
    rotary = Settings(table.get(kind, {}), f"{settings.where} rope_parameters.{kind}")
    rotary.refuse_unless("rope_type", "default", "default")
    return rotary.number("rope_theta", default)


def write_config(shape: Shape) -> dict[str, Any]:
    """The config.json in today's form."""
    assert isinstance(shape, ModernBertShape)
    thetas = {GLOBAL: shape.global_theta, LOCAL: shape.local_theta}
    return {
        "model_type": "modernbert",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.positions,
        "hidden_activation": shape.activation,
        "norm_eps": shape.norm_eps,
        "mlp_dropout": shape.dropout,
        "attention_dropout": shape.attention_dropout,
        "classifier_dropout": shape.head_dropout,
        "initializer_range": shape.initial_std,
        "initializer_cutoff_factor": shape.initial_cut,
        "pad_token_id": shape.pad_id,
        "layer_types": list(shape.reach),
        "local_attention": shape.local_attention,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.inner_bias,
        "norm_bias": shape.norm_bias,
        "classifier_bias": shape.head_bias,
        "decoder_bias": shape.decoder_bias,
        "embedding_dropout": shape.embedding_dropout,
        "classifier_activation": shape.head_activation,
        "classifier_pooling": {"first": "cls", "mean": "mean"}[shape.sentence],
    }


def build_encoder(shape: Shape) -> Encoder:
    """Word embeddings, pre-norm blocks and a last LayerNorm."""
    assert isinstance(shape, ModernBertShape)
    words = nn.Embedding(shape.vocabulary, shape.width)
    embeddings = Embeddings(words, {}, norm=_norm(shape), dropout=shape.embedding_dropout)
    blocks = [_build_block(shape, layer) for layer in range(shape.layers)]
    return Encoder(
        embeddings, blocks, order=range(shape.layers), final_norm=_norm(shape), sentence=shape.sentence
    )


def _build_block(shape: ModernBertShape, layer: int) -> PreNormBlock:
    is_global = shape.reach[layer] == GLOBAL
    rule = AttentionRule(
        window=EVERYTHING if is_global else shape.local_attention // 2, dropout=shape.attention_dropout
    )
    rotary = Rotary(shape.global_theta if is_global else shape.local_theta)
    attention = SelfAttention(shape.width, shape.heads, rule=rule, bias=shape.attention_bias, rotary=rotary)
    feed_forward = GatedFeedForward(
        shape.width, shape.inner, shape.activation, bias=shape.inner_bias, dropout=shape.dropout
    )
    # The embeddings are normalised already: the first layer does not do it twice.
    norms = Norms(nn.Identity() if layer == 0 else _norm(shape), _norm(shape))
    return PreNormBlock(attention, feed_forward, norms, dropout=shape.attention_dropout)


def _norm(shape: ModernBertShape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.width, eps=shape.norm_eps, bias=shape.norm_bias)


def encoder_names(shape: Shape) -> Names:
    """Encoder weights as ModernBERT's checkpoints call them."""
    assert isinstance(shape, ModernBertShape)
    names: Names = {"embeddings.words.weight": ("embeddings.tok_embeddings.weight",)}
    names |= pair_of("embeddings.norm", "embeddings.norm", bias=shape.norm_bias)
    for layer in range(shape.layers):
        names |= _block_names(shape, layer)
    return names | pair_of("final_norm", "final_norm", bias=shape.norm_bias)


def _block_names(shape: ModernBertShape, layer: int) -> Names:
    ours, theirs = f"blocks.{layer}", f"layers.{layer}"
    norm = pair_of(f"{ours}.attention_norm", f"{theirs}.attn_norm", bias=shape.norm_bias) if layer else {}
    return {
        **norm,
        **pair_of(f"{ours}.attention.project", f"{theirs}.attn.Wqkv", bias=shape.attention_bias),
        **pair_of(f"{ours}.attention.output", f"{theirs}.attn.Wo", bias=shape.attention_bias),
        **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.mlp_norm", bias=shape.norm_bias),
        **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.mlp.Wi", bias=shape.inner_bias),
        **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.mlp.Wo", bias=shape.inner_bias),
    }


def _transform(shape: Shape) -> Transform:
    assert isinstance(shape, ModernBertShape)
    dense = nn.Linear(shape.width, shape.width, bias=shape.head_bias)
    return Transform(dense, shape.head_activation, _norm(shape))


def _transform_names(shape: Shape) -> Names:
    assert isinstance(shape, ModernBertShape)
    return pair_of("transform.dense", "head.dense", bias=shape.head_bias) | pair_of(
        "transform.norm", "head.norm", bias=shape.norm_bias
    )


def _build_masked_language_head(shape: Shape, _: int) -> MaskedLanguageHead:
    assert isinstance(shape, ModernBertShape)
    return MaskedLanguageHead(_transform(shape), shape.vocabulary, bias=shape.decoder_bias)


def _masked_language_names(shape: Shape) -> Names:
    assert isinstance(shape, ModernBertShape)
    return _transform_names(shape) | ({"bias": ("decoder.bias",)} if shape.decoder_bias else {})


def _output_plan(reads: Reads, outputs: int = 0) -> HeadPlan:
    def build(shape: Shape, wanted: int) -> OutputHead:
        layer = nn.Linear(shape.width, outputs or wanted)
        return OutputHead(layer, reads=reads, dropout=shape.head_dropout, transform=_transform(shape))

    return HeadPlan(build, lambda shape: _transform_names(shape) | pair_of("output", "classifier"))


def initial(shape: Shape) -> InitialRule:
    """Layers that write to the residual stream start smaller; task outputs start at 1 / sqrt(width)."""
    assert isinstance(shape, ModernBertShape)
    smaller = shape.initial_std / math.sqrt(2 * shape.layers)

    def std(name: str) -> float:
        if name.endswith(("attention.output.weight", "contract.weight", "transform.dense.weight")):
            return smaller
        return 1 / math.sqrt(shape.width) if name.endswith("output.weight") else shape.initial_std

    return InitialRule(std, cut=shape.initial_cut)


MODERNBERT = Member(
    model_type="modernbert",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="model.",
    heads={
        "mlm": HeadPlan(_build_masked_language_head, _masked_language_names),
        "classify": _output_plan("sentence"),
        "tag": _output_plan("tokens"),
        "span": _output_plan("tokens", outputs=2),
        "choice": _output_plan("sentence", outputs=1),
    },
    architectures={
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
