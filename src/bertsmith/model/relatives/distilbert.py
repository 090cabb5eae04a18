"""DistilBERT (Sanh et al. 2019): half of BERT's layers, no segments, no pooler, its own config keys."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from bertsmith.model.heads import OutputHead, Transform
from bertsmith.model.member import HeadPlan, Member, Names, always, constant_std, pair_of
from bertsmith.model.relatives import bert
from bertsmith.model.settings import MOST_LAYERS, Settings
from bertsmith.model.shape import Shape


@dataclass(frozen=True, kw_only=True)
class DistilBertShape(Shape):
    """A shape with another dropout before the answer span."""

    span_dropout: float = 0.1


def span_rate(shape: Shape) -> float:
    """The dropout before the span head."""
    assert isinstance(shape, DistilBertShape)
    return shape.span_dropout


def body_rate(shape: Shape) -> float:
    """The encoder's own dropout."""
    return shape.dropout


def read_shape(settings: Settings) -> DistilBertShape:
    """The shape in a config.json with DistilBERT's keys."""
    width = settings.size("dim", 768)
    dropout = settings.rate("dropout", 0.1)
    return DistilBertShape(
        model_type="distilbert",
        vocabulary=settings.size("vocab_size", 30522),
        width=width,
        layers=settings.size("n_layers", 6, most=MOST_LAYERS),
        heads=settings.size("n_heads", 12),
        inner=settings.size("hidden_dim", 3072),
        embedding_width=width,
        positions=settings.size("max_position_embeddings", 512),
        segments=0,
        activation=settings.activation("activation", "gelu"),
        dropout=dropout,
        attention_dropout=settings.rate("attention_dropout", 0.1),
        head_dropout=settings.rate("seq_classif_dropout", 0.2),
        span_dropout=settings.rate("qa_dropout", 0.1),
        initial_std=settings.number("initializer_range", 0.02),
        pad_id=settings.size("pad_token_id", 0, least=0),
    )


def write_config(shape: Shape) -> dict[str, Any]:
    """The config.json with DistilBERT's keys."""
    assert isinstance(shape, DistilBertShape)
    return {
        "model_type": "distilbert",
        "vocab_size": shape.vocabulary,
        "dim": shape.width,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "hidden_dim": shape.inner,
        "max_position_embeddings": shape.positions,
        "activation": shape.activation,
        "dropout": shape.dropout,
        "attention_dropout": shape.attention_dropout,
        "seq_classif_dropout": shape.head_dropout,
        "qa_dropout": shape.span_dropout,
        "initializer_range": shape.initial_std,
        "pad_token_id": shape.pad_id,
    }


def encoder_names(shape: Shape) -> Names:
    """Encoder weights as DistilBERT's checkpoints call them."""
    names = bert.embedding_names(shape)
    for number in range(shape.layers):
        names |= _block_names(f"blocks.{number}", f"transformer.layer.{number}")
    return names


def _block_names(ours: str, theirs: str) -> Names:
    projections = (f"{theirs}.attention.{part}_lin" for part in ("q", "k", "v"))
    return {
        **pair_of(f"{ours}.attention.project", *projections),
        **pair_of(f"{ours}.attention.output", f"{theirs}.attention.out_lin"),
        **pair_of(f"{ours}.attention_norm", f"{theirs}.sa_layer_norm"),
        **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.ffn.lin1"),
        **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.ffn.lin2"),
        **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.output_layer_norm"),
    }


def _sentence_plan(outputs: int = 0) -> HeadPlan:
    """A ReLU layer of its own in place of the pooler."""

    def build(shape: Shape, wanted: int) -> OutputHead:
        transform = Transform(nn.Linear(shape.width, shape.width), "relu")
        layer = nn.Linear(shape.width, outputs or wanted)
        return OutputHead(layer, reads="sentence", dropout=shape.head_dropout, transform=transform)

    names = pair_of("transform.dense", "pre_classifier") | pair_of("output", "classifier")
    return HeadPlan(build, always(names))


DISTILBERT = Member(
    model_type="distilbert",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=bert.build_encoder,
    encoder_names=encoder_names,
    prefix="distilbert.",
    heads={
        "mlm": bert.masked_language_plan("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        "classify": _sentence_plan(),
        "tag": bert.linear_plan("classifier", reads="tokens", rate=body_rate),
        "span": bert.linear_plan("qa_outputs", reads="tokens", outputs=2, rate=span_rate),
        "choice": _sentence_plan(outputs=1),
    },
    architectures={
        "DistilBertForMaskedLM": ("mlm",),
        "DistilBertForSequenceClassification": ("classify",),
        "DistilBertForTokenClassification": ("tag",),
        "DistilBertForQuestionAnswering": ("span",),
        "DistilBertForMultipleChoice": ("choice",),
        "DistilBertModel": (),
    },
    initial=constant_std,
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
)
