"""DeBERTa-v3 (He et al. 2021): attention to content and to relative positions, no absolute ones."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import Architecture, HeadSpec, InitialRule, Names, pair_of
from bertsmith.model.architectures import bert
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from bertsmith.model.transformer.disentangled import DisentangledEncoder


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(TransformerConfig):
    """A config with relative positions in buckets."""

    plain_attention: ClassVar[bool] = False
    norm_eps: float = 1e-7
    max_distance: int
    """Distance from which on tokens share a bucket."""
    buckets: int
    """Buckets of distances to either side; with `max_distance` buckets each distance has its own."""
    pooler_dropout: float = 0.0
    pooler_activation: str = "gelu"


def read_config(reader: ConfigReader) -> DebertaConfig:
    """Read the config in a config.json; reject settings of version 2 that version 3 lacks."""
    width, positions = reader.size("hidden_size"), reader.size("max_position_embeddings", 512)
    # DeBERTa-v2's XLarge sizes have a convolution, and other models of the type absolute positions.
    for key, default, wanted in (
        ("relative_attention", False, True),
        ("share_att_key", False, True),
        ("position_biased_input", True, False),
        ("norm_rel_ebd", "none", "layer_norm"),
        ("conv_kernel_size", 0, 0),
        ("embedding_size", width, width),
        ("pooler_hidden_size", width, width),
    ):
        reader.require(key, default, wanted)
    _check_terms(reader)
    furthest = reader.size("max_relative_positions", -1, least=-1)
    max_distance = furthest if furthest > 0 else positions
    buckets = reader.size("position_buckets", -1, least=-1)
    if buckets == 1:  # half of them are for near distances
        what, remedy = "position_buckets is 1", "write 2 or more, or -1 for one of each distance"
        raise UserError(what, where=reader.where, remedy=remedy)
    dropout = reader.rate("hidden_dropout_prob", 0.1)
    return DebertaConfig(
        model_type="deberta-v2",
        vocabulary=reader.size("vocab_size"),
        width=width,
        layers=reader.size("num_hidden_layers", most=MAX_LAYERS),
        heads=reader.size("num_attention_heads"),
        inner=reader.size("intermediate_size"),
        embedding_width=width,
        positions=positions,
        segments=reader.size("type_vocab_size", 0, least=0),
        activation=reader.activation("hidden_act", "gelu"),
        norm_eps=reader.number("layer_norm_eps", 1e-7),
        dropout=dropout,
        attention_dropout=reader.rate("attention_probs_dropout_prob", 0.1),
        head_dropout=reader.rate("cls_dropout", dropout),
        initial_std=reader.number("initializer_range", 0.02),
        pad_id=reader.size("pad_token_id", 0, least=0),
        direction=reader.direction(),
        max_distance=max_distance,
        buckets=buckets if buckets > 0 else max_distance,
        pooler_dropout=reader.rate("pooler_dropout", 0.0),
        pooler_activation=reader.activation("pooler_hidden_act", "gelu"),
    )


def _check_terms(reader: ConfigReader) -> None:
    """Raise unless content attends to positions and positions to content; older files write "p2c|c2p"."""
    value = reader.values.get("pos_att_type")
    terms = reader.texts("pos_att_type") if not isinstance(value, str) else tuple(value.lower().split("|"))
    reader.used.add("pos_att_type")
    if {term.strip() for term in terms} != {"p2c", "c2p"}:
        what = f"pos_att_type is {value!r}"
        raise UserError(what, where=reader.where, remedy="only c2p and p2c together are supported")


def write_config(config: DebertaConfig) -> dict[str, Any]:
    """Return the config.json of a config."""
    written = bert.write_config(config)
    written["cls_dropout"] = written.pop("classifier_dropout")
    return written | {
        "relative_attention": True,
        "max_relative_positions": config.max_distance,
        "position_buckets": config.buckets if config.buckets != config.max_distance else -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "pooler_dropout": config.pooler_dropout,
        "pooler_hidden_act": config.pooler_activation,
        "pooler_hidden_size": config.width,
        "legacy": True,  # the names of the masked-LM head that are written
    }


def build_encoder(config: DebertaConfig) -> "DisentangledEncoder":
    """Build BERT's post-norm blocks with disentangled attention, over word vectors alone."""
    from torch import nn

    from bertsmith.model.attention.rule import AttentionRule
    from bertsmith.model.embeddings import Embeddings, SegmentTable
    from bertsmith.model.transformer.disentangled import (
        DisentangledAttention,
        DisentangledEncoder,
        RelativePositions,
    )
    from bertsmith.model.transformer.transformer import FeedForward, Norms, PostNormBlock, attention_shape

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.width, eps=config.norm_eps)

    relative = RelativePositions(
        nn.Embedding(2 * config.buckets, config.width),
        norm(),
        max_distance=config.max_distance,
        dropout=config.dropout,
    )
    blocks = []
    for number in range(config.layers):
        rule = AttentionRule(dropout=config.attention_dropout)
        shape = attention_shape(config, number)
        attention = DisentangledAttention(shape, rule=rule, relative=relative)
        feed_forward = FeedForward(config.width, config.inner_in(number), config.activation)
        blocks.append(PostNormBlock(attention, feed_forward, Norms(norm(), norm()), dropout=config.dropout))
    segments = {"segment": SegmentTable(config.segments, config.width)} if config.segments else {}
    words = nn.Embedding(config.vocabulary, config.width)
    embeddings = Embeddings(words, segments, norm=norm(), dropout=config.dropout)
    return DisentangledEncoder(embeddings, blocks, relative=relative)


def encoder_names(config: DebertaConfig) -> Names:
    """Return the names of encoder weights in DeBERTa's checkpoints."""
    names: Names = {
        "embeddings.words.weight": ("embeddings.word_embeddings.weight",),
        "relative.table.weight": ("encoder.rel_embeddings.weight",),
        **pair_of("relative.norm", "encoder.LayerNorm"),
        **pair_of("embeddings.norm", "embeddings.LayerNorm"),
    }
    if config.segments:
        names["embeddings.added.segment.weight"] = ("embeddings.token_type_embeddings.weight",)
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"encoder.layer.{number}"
        projections = (f"{theirs}.attention.self.{part}_proj" for part in ("query", "key", "value"))
        names |= bert.block_names(ours, theirs) | pair_of(f"{ours}.attention.project", *projections)
    return names


def _sentence_head(outputs: int = 0) -> HeadSpec[DebertaConfig]:
    # The pooler belongs to the task here: published encoders do not have one.
    return bert.two_layer_head(
        "pooler.dense",
        "classifier",
        activation=lambda config: config.pooler_activation,
        outputs=outputs,
        rate_before=lambda config: config.pooler_dropout,
    )


def _second_names() -> dict[str, str]:
    """Return second names of the decoder of the masked-LM head, and of that head in Microsoft's own files."""
    names = {
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
    }
    for part in ("dense", "LayerNorm"):
        for kind in ("weight", "bias"):
            first = f"cls.predictions.transform.{part}.{kind}"
            names[f"lm_predictions.lm_head.{part}.{kind}"] = first
    return names


def body_rate(config: DebertaConfig) -> float:
    """Return the encoder's own dropout."""
    return config.dropout


DEBERTA = Architecture(
    model_type="deberta-v2",  # config.json of version 3 has this type, too
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="deberta.",
    heads={
        "mlm": bert.masked_language_head(
            "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
        ),
        "classify": _sentence_head(),
        "tag": bert.linear_head("classifier", reads="tokens", rate=body_rate),
        "span": bert.linear_head("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
        "choice": _sentence_head(outputs=1),
    },
    classes={
        "DebertaV2ForMaskedLM": ("mlm",),
        "DebertaV2ForSequenceClassification": ("classify",),
        "DebertaV2ForTokenClassification": ("tag",),
        "DebertaV2ForQuestionAnswering": ("span",),
        "DebertaV2ForMultipleChoice": ("choice",),
        "DebertaV2Model": (),
    },
    initial=lambda config: InitialRule(std=lambda _name: config.initial_std, cut=math.inf),
    tied=_second_names(),
)
