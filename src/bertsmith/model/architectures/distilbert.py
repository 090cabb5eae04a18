"""DistilBERT (Sanh et al. 2019): half of BERT's layers, no segments, no pooler, its own config keys."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertsmith.model.architecture import (
    Architecture,
    Names,
    Pretraining,
    constant_std,
    pair_of,
)
from bertsmith.model.architectures import bert
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader, EncoderConfig, direction_keys
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    pass

NORM_EPS = 1e-12
"""Epsilon of every LayerNorm of a DistilBERT; its config.json lacks a key for it."""


@dataclass(frozen=True, kw_only=True)
class DistilBertConfig(TransformerConfig):
    """A config with other dropouts before the task heads."""

    head_dropout: float = 0.2
    span_dropout: float = 0.1


def without_segments(config: EncoderConfig) -> EncoderConfig:
    """Return the config as a DistilBERT's, without segments and pooler, if it is a BERT's."""
    if config.model_type != "bert" or vars(config)["norm_eps"] != NORM_EPS:
        return config
    own = {"model_type": "distilbert", "segments": 0, "head_dropout": 0.2}
    return DistilBertConfig(**vars(config) | own)


def span_rate(config: DistilBertConfig) -> float:
    """Return the dropout before the span head."""
    return config.span_dropout


def body_rate(config: DistilBertConfig) -> float:
    """Return the encoder's own dropout."""
    return config.dropout


def read_config(reader: ConfigReader) -> DistilBertConfig:
    """Read the config in a config.json with DistilBERT's keys."""
    width = reader.size("dim", 768)
    dropout = reader.rate("dropout", 0.1)
    return DistilBertConfig(
        model_type="distilbert",
        vocabulary=reader.size("vocab_size", 30522),
        width=width,
        layers=reader.size("n_layers", 6, most=MAX_LAYERS),
        heads=reader.size("n_heads", 12),
        inner=reader.size("hidden_dim", 3072),
        embedding_width=width,
        positions=reader.size("max_position_embeddings", 512),
        segments=0,
        activation=reader.activation("activation", "gelu"),
        dropout=dropout,
        attention_dropout=reader.rate("attention_dropout", 0.1),
        head_dropout=reader.rate("seq_classif_dropout", 0.2),
        span_dropout=reader.rate("qa_dropout", 0.1),
        initial_std=reader.number("initializer_range", 0.02),
        pad_id=reader.size("pad_token_id", 0, least=0),
        direction=reader.direction(),
    )


def write_config(config: DistilBertConfig) -> dict[str, Any]:
    """Return the config.json with DistilBERT's keys."""
    return {
        "model_type": "distilbert",
        "vocab_size": config.vocabulary,
        "dim": config.width,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "hidden_dim": config.inner,
        "max_position_embeddings": config.positions,
        "activation": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "seq_classif_dropout": config.head_dropout,
        "qa_dropout": config.span_dropout,
        "initializer_range": config.initial_std,
        "pad_token_id": config.pad_id,
        **direction_keys(config),
    }


def count_parameters(config: DistilBertConfig) -> int:
    """Count the weights of the encoder: BERT's without a pooler."""
    return bert.count_embeddings(config) + bert.count_blocks(config)


def encoder_names(config: DistilBertConfig) -> Names:
    """Return the names of encoder weights in DistilBERT's checkpoints."""
    names = bert.embedding_names(config)
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"transformer.layer.{number}"
        projections = (f"{theirs}.attention.{part}_lin" for part in ("q", "k", "v"))
        names |= {
            **pair_of(f"{ours}.attention.project", *projections),
            **pair_of(f"{ours}.attention.output", f"{theirs}.attention.out_lin"),
            **pair_of(f"{ours}.attention_norm", f"{theirs}.sa_layer_norm"),
            **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.ffn.lin1"),
            **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.ffn.lin2"),
            **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.output_layer_norm"),
        }
    return names


DISTILBERT = Architecture(
    model_type="distilbert",
    read_config=read_config,
    write_config=write_config,
    build_encoder=bert.build_encoder,
    encoder_names=encoder_names,
    prefix="distilbert.",
    heads={
        "mlm": bert.masked_language_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        "classify": bert.two_layer_head("pre_classifier", "classifier", activation=lambda _: "relu"),
        "tag": bert.linear_head("classifier", reads="tokens", rate=body_rate),
        "span": bert.linear_head("qa_outputs", reads="tokens", outputs=2, rate=span_rate),
        "choice": bert.two_layer_head("pre_classifier", "classifier", activation=lambda _: "relu", outputs=1),
    },
    classes={
        "DistilBertForMaskedLM": ("mlm",),
        "DistilBertForSequenceClassification": ("classify",),
        "DistilBertForTokenClassification": ("tag",),
        "DistilBertForQuestionAnswering": ("span",),
        "DistilBertForMultipleChoice": ("choice",),
        "DistilBertModel": (),
    },
    initial=constant_std,
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    pretraining=Pretraining(
        30_522, count_parameters, DistilBertConfig, min_segments=0, own_head_dropout=True
    ),  # BERT's vocabulary
)
