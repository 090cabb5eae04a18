"""ELECTRA (Clark et al. 2020): BERT's encoder, narrow embeddings in some sizes, two new heads."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bertsmith.model.architecture import (
    Architecture,
    HeadSpec,
    Names,
    Pretraining,
    always,
    constant_std,
    pair_of,
)
from bertsmith.model.architectures import bert
from bertsmith.model.encoder_config import ConfigReader
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from bertsmith.model.heads import MaskedLanguageHead
    from bertsmith.model.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class ElectraConfig(TransformerConfig):
    """A config with another dropout before the choice."""

    choice_dropout: float = 0.1


def read_config(reader: ConfigReader) -> ElectraConfig:
    """Read BERT's config with the embedding width; the summary in front of a choice only as published."""
    for key, published in {
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
    }.items():
        reader.require(key, published, published)
    values = {**vars(bert.read_config(reader)), "embedding_width": reader.size("embedding_size", 128)}
    return ElectraConfig(**values, choice_dropout=reader.rate("summary_last_dropout", 0.1))


def write_config(config: ElectraConfig) -> dict[str, Any]:
    """Return BERT's config with the embedding width."""
    own = {"embedding_size": config.embedding_width, "summary_last_dropout": config.choice_dropout}
    return bert.write_config(config) | own


def generator_config(config: ElectraConfig, size: float) -> ElectraConfig:
    """Return the config of the masked LM that a discriminator learns from, at a fraction of its width.

    The embeddings keep their width, because both share them.
    """
    # run_pretraining.py uses heads of 64 and four times the width, the same values for its own sizes.
    width, inner = round(config.width * size), round(config.inner * size)
    return replace(config, width=max(1, width), inner=max(1, inner), heads=max(1, round(config.heads * size)))


def count_parameters(config: ElectraConfig) -> int:
    """Count the weights of the encoder, which lacks a pooler."""
    differ = config.embedding_width != config.width
    widen = bert.dense(config.embedding_width, config.width) if differ else 0
    return bert.count_embeddings(config) + widen + bert.count_blocks(config)


def build_encoder(config: ElectraConfig) -> "Transformer":
    """Build BERT's encoder; embeddings are widened only if the sizes differ."""
    from torch import nn

    from bertsmith.model.transformer.transformer import Transformer

    differ = config.embedding_width != config.width
    widen = nn.Linear(config.embedding_width, config.width) if differ else None
    blocks = [bert.build_block(config, number) for number in range(config.layers)]
    return Transformer(bert.build_embeddings(config, widen=widen), blocks, order=range(config.layers))


def encoder_names(config: ElectraConfig) -> Names:
    """Return BERT's names and the widening layer."""
    widening = pair_of("embeddings.widen", "embeddings_project")
    return bert.encoder_names(config) | (widening if config.embedding_width != config.width else {})


def _build_generator(config: ElectraConfig, _: int) -> "MaskedLanguageHead":
    from torch import nn

    from bertsmith.model.heads import MaskedLanguageHead, Transform

    # The generator's transform is an erf GELU whatever the encoder's activation.
    norm = nn.LayerNorm(config.embedding_width, eps=config.norm_eps)
    transform = Transform(nn.Linear(config.width, config.embedding_width), "gelu", norm)
    return MaskedLanguageHead(transform, config.vocabulary)


_GENERATOR_NAMES: Names = {
    **pair_of("transform.dense", "generator_predictions.dense"),
    **pair_of("transform.norm", "generator_predictions.LayerNorm"),
    "bias": ("generator_lm_head.bias",),
}


def choice_rate(config: ElectraConfig) -> float:
    """Return the dropout before the choice."""
    return config.choice_dropout


HEADS: dict[str, HeadSpec[ElectraConfig]] = {
    "mlm": HeadSpec(_build_generator, always(_GENERATOR_NAMES)),
    "replaced": bert.two_layer_head(
        "discriminator_predictions.dense",
        "discriminator_predictions.dense_prediction",
        reads="tokens",
        outputs=1,
        rate=bert.no_rate,
    ),
    "classify": bert.two_layer_head(
        "classifier.dense", "classifier.out_proj", activation=lambda _: "gelu", rate_before=bert.head_rate
    ),
    "tag": bert.linear_head("classifier", reads="tokens"),
    "span": bert.linear_head("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    "choice": bert.two_layer_head(
        "sequence_summary.summary", "classifier", activation=lambda _: "gelu", outputs=1, rate=choice_rate
    ),
}

ELECTRA = Architecture(
    model_type="electra",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="electra.",
    heads=HEADS,
    classes={
        "ElectraForPreTraining": ("replaced",),
        "ElectraForMaskedLM": ("mlm",),
        "ElectraForSequenceClassification": ("classify",),
        "ElectraForTokenClassification": ("tag",),
        "ElectraForQuestionAnswering": ("span",),
        "ElectraForMultipleChoice": ("choice",),
        "ElectraModel": (),
    },
    causal_classes={"ElectraForMaskedLM": "ElectraForCausalLM"},
    initial=constant_std,
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    pretraining=Pretraining(
        30_522,  # BERT's uncased WordPiece
        count_parameters,
        ElectraConfig,
        generator_config=generator_config,
    ),
)
