"""GPT-2 (Radford et al. 2019): pre-norm blocks that look to the left and predict the next token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from bertsmith.model.architecture import (
    Architecture,
    HeadSpec,
    InitialRule,
    Names,
    Pretraining,
    always,
    pair_of,
)
from bertsmith.model.architectures import bert
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader, Direction
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from bertsmith.model.heads import MaskedLanguageHead
    from bertsmith.model.transformer.transformer import PreNormBlock, Transformer


@dataclass(frozen=True, kw_only=True)
class GptConfig(TransformerConfig):
    """A config that reads from left to right; the defaults are from transformers (GPT2Config)."""

    segments: int = 0
    activation: str = "gelu_new"
    norm_eps: float = 1e-5
    embedding_dropout: float = 0.1
    direction: Direction = "left-to-right"
    begin_id: int | None = None
    """Token at the beginning of a text, or None."""
    end_id: int | None = None
    """Token at the end of a text, or None."""

    def word_products(self) -> int:
        """Return the multiplications of its head, which is the word table alone."""
        return self.vocabulary * self.embedding_width

    @classmethod
    def of_recipe(cls, values: Mapping[str, Any]) -> Self:
        """Return the config for a recipe's model section, which has one dropout for all layers."""
        return super().of_recipe({**values, "embedding_dropout": values["dropout"]})


# ---- config.json


def read_config(reader: ConfigReader) -> GptConfig:
    """Read the config in a config.json with GPT-2's keys."""
    for key, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        reader.require(key, only, only)
    reader.require("add_cross_attention", False, False)
    width = reader.size("n_embd", 768)
    ends = [_optional(reader, key) for key in ("bos_token_id", "eos_token_id")]
    return GptConfig(
        model_type="gpt2",
        vocabulary=reader.size("vocab_size", 50_257),
        width=width,
        layers=reader.size("n_layer", 12, most=MAX_LAYERS),
        heads=reader.size("n_head", 12),
        inner=reader.size("n_inner", 4 * width),
        embedding_width=width,
        positions=reader.size("n_positions", 1024),
        activation=reader.activation("activation_function", "gelu_new"),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        embedding_dropout=reader.rate("embd_pdrop", 0.1),
        dropout=reader.rate("resid_pdrop", 0.1),
        attention_dropout=reader.rate("attn_pdrop", 0.1),
        head_dropout=reader.rate("classifier_dropout", 0.1),
        initial_std=reader.number("initializer_range", 0.02),
        # Published files do not define padding; packed texts do not need it, and its id is filler only.
        pad_id=reader.size("pad_token_id", ends[1] or 0, least=0),
        begin_id=ends[0],
        end_id=ends[1],
    )


def _optional(reader: ConfigReader, key: str) -> int | None:
    reader.used.add(key)
    return None if reader.values.get(key) is None else reader.size(key, least=0)


def write_config(config: GptConfig) -> dict[str, Any]:
    """Return the config.json with GPT-2's keys of a config."""
    return {
        "model_type": "gpt2",
        "vocab_size": config.vocabulary,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.inner,
        "n_positions": config.positions,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": config.embedding_dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "classifier_dropout": config.head_dropout,
        "initializer_range": config.initial_std,
        "pad_token_id": config.pad_id,
        "bos_token_id": config.begin_id,
        "eos_token_id": config.end_id,
    }


def count_parameters(config: GptConfig) -> int:
    """Count the weights of the encoder: the tables without a norm, the blocks, and the final norm."""
    rows = config.vocabulary + config.positions + 2
    return rows * config.width + bert.count_blocks(config)


# ---- the parts


def build_encoder(config: GptConfig) -> "Transformer":
    """Build word and position tables, pre-norm blocks and a last LayerNorm."""
    from torch import nn

    from bertsmith.model.embeddings import Embeddings, PositionTable
    from bertsmith.model.transformer.transformer import Transformer

    width = config.width
    words, places = nn.Embedding(config.vocabulary, width), PositionTable(config.positions, width)
    dropout = config.embedding_dropout
    return Transformer(
        Embeddings(words, {"position": places}, norm=nn.Identity(), dropout=dropout),
        [_build_block(config, number) for number in range(config.layers)],
        order=range(config.layers),
        final_norm=nn.LayerNorm(width, eps=config.norm_eps),
        sentence="last",
    )


def _build_block(config: GptConfig, number: int) -> "PreNormBlock":
    from torch import nn

    from bertsmith.model.attention.rule import AttentionRule
    from bertsmith.model.transformer.transformer import (
        FeedForward,
        Norms,
        PreNormBlock,
        SelfAttention,
        attention_shape,
    )

    attention = SelfAttention(
        attention_shape(config, number), rule=AttentionRule(causal=True, dropout=config.attention_dropout)
    )
    feed_forward = FeedForward(config.width, config.inner_in(number), config.activation)
    norms = Norms(*(nn.LayerNorm(config.width, eps=config.norm_eps) for _ in range(2)))
    rate = config.dropout
    return PreNormBlock(attention, feed_forward, norms, dropout=rate, feed_forward_dropout=rate)


def initial(config: GptConfig) -> InitialRule:
    """Return the rule of openai/gpt-2 (model.py): residual outputs start smaller, positions at half."""
    smaller = config.initial_std / math.sqrt(2 * config.layers)

    def std(name: str) -> float:
        if name.endswith(("attention.output.weight", "contract.weight")):
            return smaller
        return config.initial_std / 2 if name.endswith("position.weight") else config.initial_std

    return InitialRule(std, cut=math.inf)


# ---- the names of the published weights

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""Weights of GPT-2's own linear layer, Conv1D, which are stored as [inputs, outputs]."""


def encoder_names(config: GptConfig) -> Names:
    """Return the names of encoder weights in GPT-2's checkpoints."""
    names: Names = {"embeddings.words.weight": ("wte.weight",)}
    names["embeddings.added.position.weight"] = ("wpe.weight",)
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"h.{number}"
        names |= {
            **pair_of(f"{ours}.attention_norm", f"{theirs}.ln_1"),
            **pair_of(f"{ours}.attention.project", f"{theirs}.attn.c_attn"),
            **pair_of(f"{ours}.attention.output", f"{theirs}.attn.c_proj"),
            **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.ln_2"),
            **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.mlp.c_fc"),
            **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.mlp.c_proj"),
        }
    return names | pair_of("final_norm", "ln_f")


def _build_word_head(config: GptConfig, _: int) -> "MaskedLanguageHead":
    from torch import nn

    from bertsmith.model.heads import MaskedLanguageHead

    return MaskedLanguageHead(nn.Identity(), config.vocabulary, bias=False)


def _build_classifier(config: GptConfig, outputs: int) -> Any:
    from torch import nn

    from bertsmith.model.heads import OutputHead

    return OutputHead(nn.Linear(config.width, outputs, bias=False), reads="sentence", dropout=0.0)


GPT = Architecture(
    model_type="gpt2",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    transposed=lambda name: name.endswith(TRANSPOSED),
    directions=("left-to-right",),
    prefix="transformer.",
    heads={
        "mlm": HeadSpec(_build_word_head, always({})),
        "classify": HeadSpec(
            _build_classifier, always(pair_of("output", "score", bias=False)), labelled=True
        ),
        "tag": bert.linear_head("classifier", reads="tokens"),
        "span": bert.linear_head("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    },
    classes={
        "GPT2LMHeadModel": ("mlm",),
        "GPT2ForSequenceClassification": ("classify",),
        "GPT2ForTokenClassification": ("tag",),
        "GPT2ForQuestionAnswering": ("span",),
        "GPT2Model": (),
        "GPT2DoubleHeadsModel": ("mlm",),  # for reading only: a writer uses the first class that fits
    },
    initial=initial,
    tied={"lm_head.weight": "transformer.wte.weight"},
    pretraining=Pretraining(50_257, count_parameters, GptConfig, min_segments=0, own_head_dropout=True),
)
