"""RoBERTa (Liu et al. 2019): BERT without segments or next sentence; positions count from the pad id on."""

import math
from dataclasses import replace
from typing import Any

from torch import nn

from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import OutputHead, Transform
from bertsmith.model.initial import InitialRule
from bertsmith.model.member import HeadPlan, Member, always, pair_of
from bertsmith.model.relatives import bert
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape


def first_position(shape: Shape) -> int:
    """The row of the first token in the position table (fairseq: padding id + 1)."""
    return shape.pad_id + 1


def read_shape(settings: Settings) -> Shape:
    """BERT's shape, less the position rows that no token uses."""
    shape = replace(bert.read_shape(settings), pad_id=settings.size("pad_token_id", 1, least=0))
    return replace(shape, positions=shape.positions - first_position(shape))


def write_config(shape: Shape) -> dict[str, Any]:
    """BERT's config with RoBERTa's count of positions."""
    rows = shape.positions + first_position(shape)
    return bert.write_config(shape) | {"max_position_embeddings": rows}


def build_encoder(shape: Shape) -> Encoder:
    """BERT's encoder with shifted positions."""
    embeddings = bert.build_embeddings(shape, first_position=first_position(shape))
    blocks = [bert.build_block(shape) for _ in range(shape.layers)]
    return Encoder(embeddings, blocks, order=range(shape.layers))


def _build_classifier(shape: Shape, outputs: int) -> OutputHead:
    # RoBERTa classifies from the raw sentence row through a layer of its own; its pooler was never trained.
    transform = Transform(nn.Linear(shape.width, shape.width), "tanh")
    layer = nn.Linear(shape.width, outputs)
    rates = {"dropout": shape.head_dropout, "dropout_before": shape.head_dropout}
    return OutputHead(layer, reads="sentence", transform=transform, **rates)


HEADS = {
    "pooler": bert.pooler_plan("roberta."),
    "mlm": bert.masked_language_plan("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "classify": HeadPlan(
        _build_classifier,
        always(pair_of("transform.dense", "classifier.dense") | pair_of("output", "classifier.out_proj")),
    ),
    "tag": bert.linear_plan("classifier", reads="tokens"),
    "span": bert.linear_plan("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    "choice": bert.linear_plan("classifier", reads="pooled", outputs=1),
}

ROBERTA = Member(
    model_type="roberta",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=bert.encoder_names,
    prefix="roberta.",
    heads=HEADS,
    architectures={
        "RobertaForMaskedLM": ("mlm",),
        "RobertaForSequenceClassification": ("classify",),
        "RobertaForTokenClassification": ("tag",),
        "RobertaForQuestionAnswering": ("span",),
        "RobertaForMultipleChoice": ("pooler", "choice"),
        "RobertaModel": ("pooler",),
    },
    # fairseq draws from the whole normal distribution.
    initial=lambda shape: InitialRule(std=lambda _name: shape.initial_std, cut=math.inf),
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)
