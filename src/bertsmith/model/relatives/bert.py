"""BERT (Devlin et al. 2018): post-norm blocks, learned positions, segments, masked LM, next sentence."""

from collections.abc import Callable
from typing import Any

from torch import nn

from bertsmith.model.attention_rule import AttentionRule
from bertsmith.model.encoder import (
    Embeddings,
    Encoder,
    FeedForward,
    Norms,
    PositionTable,
    PostNormBlock,
    SegmentTable,
    SelfAttention,
    TaskTypeTable,
)
from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Pooler, Reads, Transform
from bertsmith.model.member import HeadPlan, Member, Names, always, constant_std, pair_of
from bertsmith.model.settings import MOST_LAYERS, Settings
from bertsmith.model.shape import Shape

# ---- config.json


def read_shape(settings: Settings) -> Shape:
    """The shape in a config.json with BERT's keys."""
    settings.refuse_unless("position_embedding_type", "absolute", "absolute")
    settings.refuse_unless("is_decoder", False, False)
    settings.refuse_unless("add_cross_attention", False, False)
    width = settings.size("hidden_size")
    return Shape(
        model_type=str(settings.values["model_type"]),
        vocabulary=settings.size("vocab_size"),
        width=width,
        layers=settings.size("num_hidden_layers", most=MOST_LAYERS),
        heads=settings.size("num_attention_heads"),
        inner=settings.size("intermediate_size"),
        embedding_width=width,
        positions=settings.size("max_position_embeddings"),
        segments=settings.size("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu"),
        norm_eps=settings.number("layer_norm_eps", 1e-12),
        dropout=settings.rate("hidden_dropout_prob", 0.1),
        attention_dropout=settings.rate("attention_probs_dropout_prob", 0.1),
        head_dropout=settings.rate("classifier_dropout", settings.rate("hidden_dropout_prob", 0.1)),
        initial_std=settings.number("initializer_range", 0.02),
        pad_id=settings.size("pad_token_id", 0, least=0),
    )


def write_config(shape: Shape) -> dict[str, Any]:
    """The config.json with BERT's keys of a shape."""
    return {
        "model_type": shape.model_type,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.positions,
        "type_vocab_size": shape.segments,
        "hidden_act": shape.activation,
        "layer_norm_eps": shape.norm_eps,
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.attention_dropout,
        "classifier_dropout": shape.head_dropout,
        "initializer_range": shape.initial_std,
        "pad_token_id": shape.pad_id,
    }


# ---- the parts


def build_encoder(shape: Shape) -> Encoder:
    """An encoder of BERT's parts."""
    blocks = [build_block(shape) for _ in range(shape.layers)]
    return Encoder(build_embeddings(shape), blocks, order=range(shape.layers))


def build_embeddings(shape: Shape, *, first_position: int = 0, widen: nn.Linear | None = None) -> Embeddings:
    """Word, position and segment tables, and task types where the shape has them."""
    width = shape.embedding_width
    added: dict[str, PositionTable | SegmentTable | TaskTypeTable] = {
        "position": PositionTable(shape.positions, width, first=first_position)
    }
    if shape.segments:
        added["segment"] = SegmentTable(shape.segments, width)
    if shape.task_types:
        added["task_type"] = TaskTypeTable(shape.task_types, width)
    words = nn.Embedding(shape.vocabulary, width)
    norm = nn.LayerNorm(width, eps=shape.norm_eps)
    return Embeddings(words, added, norm=norm, dropout=shape.dropout, widen=widen)


def build_block(shape: Shape) -> PostNormBlock:
    """One post-norm layer."""
    rule = AttentionRule(dropout=shape.attention_dropout)
    attention = SelfAttention(shape.width, shape.heads, rule=rule)
    feed_forward = FeedForward(shape.width, shape.inner, shape.activation)
    norms = Norms(*(nn.LayerNorm(shape.width, eps=shape.norm_eps) for _ in range(2)))
    return PostNormBlock(attention, feed_forward, norms, dropout=shape.dropout)


# ---- the names of the published weights


def encoder_names(shape: Shape) -> Names:
    """Encoder weights as BERT's checkpoints call them."""
    names = embedding_names(shape)
    for number in range(shape.layers):
        names |= block_names(f"blocks.{number}", f"encoder.layer.{number}")
    return names


def embedding_names(shape: Shape) -> Names:
    """The tables and their LayerNorm."""
    names: Names = {"embeddings.words.weight": ("embeddings.word_embeddings.weight",)}
    names["embeddings.added.position.weight"] = ("embeddings.position_embeddings.weight",)
    if shape.segments:
        names["embeddings.added.segment.weight"] = ("embeddings.token_type_embeddings.weight",)
    if shape.task_types:
        names["embeddings.added.task_type.weight"] = ("embeddings.task_type_embeddings.weight",)
    return names | pair_of("embeddings.norm", "embeddings.LayerNorm")


def block_names(ours: str, theirs: str) -> Names:
    """One layer."""
    projections = (f"{theirs}.attention.self.{part}" for part in ("query", "key", "value"))
    return {
        **pair_of(f"{ours}.attention.project", *projections),
        **pair_of(f"{ours}.attention.output", f"{theirs}.attention.output.dense"),
        **pair_of(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
        **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.intermediate.dense"),
        **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.output.dense"),
        **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm"),
    }


# ---- heads


def pooler_plan(prefix: str) -> HeadPlan:
    """BERT's pooler, stored with the encoder."""
    return HeadPlan(lambda shape, _: Pooler(shape.width), always(pair_of("dense", f"{prefix}pooler.dense")))


def masked_language_plan(dense: str, norm: str, bias: str) -> HeadPlan:
    """The masked-LM head under a member's names; the transform ends in the embedding width."""
    names = {**pair_of("transform.dense", dense), **pair_of("transform.norm", norm), "bias": (bias,)}
    return HeadPlan(build_masked_language_head, always(names))


def build_masked_language_head(shape: Shape, _: int) -> MaskedLanguageHead:
    """Dense, activation, LayerNorm, then the word embeddings as decoder."""
    dense = nn.Linear(shape.width, shape.embedding_width)
    norm = nn.LayerNorm(shape.embedding_width, eps=shape.norm_eps)
    return MaskedLanguageHead(Transform(dense, shape.activation, norm), shape.vocabulary)


def head_rate(shape: Shape) -> float:
    """The dropout before a task's output layer."""
    return shape.head_dropout


def no_rate(_: Shape) -> float:
    """No dropout."""
    return 0.0


def linear_plan(
    name: str, *, reads: Reads, outputs: int = 0, rate: Callable[[Shape], float] = head_rate
) -> HeadPlan:
    """Dropout and one linear layer; `outputs` 0 leaves their number to the task."""

    def build(shape: Shape, wanted: int) -> OutputHead:
        return OutputHead(nn.Linear(shape.width, outputs or wanted), reads=reads, dropout=rate(shape))

    return HeadPlan(build, always(pair_of("output", name)), needs=("pooler",) if reads == "pooled" else ())


def pretraining_and_task_heads(prefix: str) -> dict[str, HeadPlan]:
    """The heads of BERT and of those that kept them (ERNIE)."""
    return {
        "pooler": pooler_plan(prefix),
        "mlm": masked_language_plan(
            "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
        ),
        "nsp": linear_plan("cls.seq_relationship", reads="pooled", outputs=2, rate=no_rate),
        "classify": linear_plan("classifier", reads="pooled"),
        "tag": linear_plan("classifier", reads="tokens"),
        "span": linear_plan("qa_outputs", reads="tokens", outputs=2, rate=no_rate),
        "choice": linear_plan("classifier", reads="pooled", outputs=1),
    }


def published_classes(name: str) -> dict[str, tuple[str, ...]]:
    """The published classes of BERT and of those that kept its heads."""
    return {
        f"{name}ForPreTraining": ("pooler", "mlm", "nsp"),
        f"{name}ForMaskedLM": ("mlm",),
        f"{name}ForNextSentencePrediction": ("pooler", "nsp"),
        f"{name}ForSequenceClassification": ("pooler", "classify"),
        f"{name}ForTokenClassification": ("tag",),
        f"{name}ForQuestionAnswering": ("span",),
        f"{name}ForMultipleChoice": ("pooler", "choice"),
        f"{name}Model": ("pooler",),
    }


def tied_names(prefix: str) -> dict[str, str]:
    """The decoder of the masked-LM head is the word embedding table."""
    return {
        "cls.predictions.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


BERT = Member(
    model_type="bert",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="bert.",
    heads=pretraining_and_task_heads("bert."),
    architectures=published_classes("Bert"),
    initial=constant_std,
    tied=tied_names("bert."),
)
