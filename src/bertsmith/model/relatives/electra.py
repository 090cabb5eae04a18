"""ELECTRA (Clark et al. 2020): BERT's encoder, narrow embeddings in some sizes, two new heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Transform
from bertsmith.model.member import HeadPlan, Member, Names, always, constant_std, pair_of
from bertsmith.model.relatives import bert
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape


@dataclass(frozen=True, kw_only=True)
class ElectraShape(Shape):
    """A shape with another dropout before the choice."""

    choice_dropout: float = 0.1


def read_shape(settings: Settings) -> ElectraShape:
    """BERT's shape with the embedding width; the summary in front of a choice only as published."""
    for key, published in {
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
    }.items():
        settings.refuse_unless(key, published, published)
    values = {**vars(bert.read_shape(settings)), "embedding_width": settings.size("embedding_size", 128)}
    return ElectraShape(**values, choice_dropout=settings.rate("summary_last_dropout", 0.1))


def write_config(shape: Shape) -> dict[str, Any]:
    """BERT's config with the embedding width."""
    assert isinstance(shape, ElectraShape)
    own = {"embedding_size": shape.embedding_width, "summary_last_dropout": shape.choice_dropout}
    return bert.write_config(shape) | own


def build_encoder(shape: Shape) -> Encoder:
    """BERT's encoder; embeddings are widened only where the sizes differ."""
    differ = shape.embedding_width != shape.width
    widen = nn.Linear(shape.embedding_width, shape.width) if differ else None
    blocks = [bert.build_block(shape) for _ in range(shape.layers)]
    return Encoder(bert.build_embeddings(shape, widen=widen), blocks, order=range(shape.layers))


def encoder_names(shape: Shape) -> Names:
    """BERT's names and the widening layer."""
    widening = pair_of("embeddings.widen", "embeddings_project")
    return bert.encoder_names(shape) | (widening if shape.embedding_width != shape.width else {})


def _build_generator(shape: Shape, _: int) -> MaskedLanguageHead:
    # The generator's transform is an erf GELU whatever the encoder's activation.
    norm = nn.LayerNorm(shape.embedding_width, eps=shape.norm_eps)
    transform = Transform(nn.Linear(shape.width, shape.embedding_width), "gelu", norm)
    return MaskedLanguageHead(transform, shape.vocabulary)


def _build_discriminator(shape: Shape, _: int) -> OutputHead:
    transform = Transform(nn.Linear(shape.width, shape.width), shape.activation)
    return OutputHead(nn.Linear(shape.width, 1), reads="tokens", dropout=0.0, transform=transform)


def _build_classifier(shape: Shape, outputs: int) -> OutputHead:
    transform = Transform(nn.Linear(shape.width, shape.width), "gelu")
    rates = {"dropout": shape.head_dropout, "dropout_before": shape.head_dropout}
    return OutputHead(nn.Linear(shape.width, outputs), reads="sentence", transform=transform, **rates)


def _build_choice(shape: Shape, _: int) -> OutputHead:
    assert isinstance(shape, ElectraShape)
    transform = Transform(nn.Linear(shape.width, shape.width), "gelu")
    rates = {"dropout": shape.choice_dropout}
    return OutputHead(nn.Linear(shape.width, 1), reads="sentence", transform=transform, **rates)


_GENERATOR_NAMES: Names = {
    **pair_of("transform.dense", "generator_predictions.dense"),
    **pair_of("transform.norm", "generator_predictions.LayerNorm"),
    "bias": ("generator_lm_head.bias",),
}


def _two_layer_names(dense: str, output: str) -> Callable[[Shape], Names]:
    return always(pair_of("transform.dense", dense) | pair_of("output", output))


HEADS = {
    "mlm": HeadPlan(_build_generator, always(_GENERATOR_NAMES)),
    "replaced": HeadPlan(
        _build_discriminator,
        _two_layer_names("discriminator_predictions.dense", "discriminator_predictions.dense_prediction"),
    ),
    "classify": HeadPlan(_build_classifier, _two_layer_names("classifier.dense", "classifier.out_proj")),
    "tag": bert.linear_plan("classifier", reads="tokens"),
    "span": bert.linear_plan("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    "choice": HeadPlan(_build_choice, _two_layer_names("sequence_summary.summary", "classifier")),
}

ELECTRA = Member(
    model_type="electra",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="electra.",
    heads=HEADS,
    architectures={
        "ElectraForPreTraining": ("replaced",),
        "ElectraForMaskedLM": ("mlm",),
        "ElectraForSequenceClassification": ("classify",),
        "ElectraForTokenClassification": ("tag",),
        "ElectraForQuestionAnswering": ("span",),
        "ElectraForMultipleChoice": ("choice",),
        "ElectraModel": (),
    },
    initial=constant_std,
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
)
