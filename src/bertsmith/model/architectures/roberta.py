"""RoBERTa (Liu et al. 2019), XLM-RoBERTa, CamemBERT: BERT without segments; positions from the pad id on."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bertsmith.model.architecture import Architecture, HeadSpec, InitialRule, Pretraining
from bertsmith.model.architectures import bert
from bertsmith.model.encoder_config import ConfigReader
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from bertsmith.model.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(TransformerConfig):
    """A config with the padding id second in the vocabulary."""

    positions_from_pad_id: ClassVar[bool] = True
    pad_id: int = 1


def first_position(config: RobertaConfig) -> int:
    """Return the row of the first token in the position table (fairseq: padding id + 1)."""
    return config.pad_id + 1


def read_config(reader: ConfigReader) -> RobertaConfig:
    """Return BERT's config without the position rows that are not used."""
    values = vars(bert.read_config(reader)) | {"pad_id": reader.size("pad_token_id", 1, least=0)}
    config = RobertaConfig(**values)
    return replace(config, positions=config.positions - first_position(config))


def write_config(config: RobertaConfig) -> dict[str, Any]:
    """Return BERT's config with RoBERTa's count of positions."""
    rows = config.positions + first_position(config)
    return bert.write_config(config) | {"max_position_embeddings": rows}


def count_parameters(config: RobertaConfig) -> int:
    """Count the weights of BERT's encoder and pooler, and of the unused position rows."""
    return bert.count_parameters(config) + first_position(config) * config.embedding_width


def build_encoder(config: RobertaConfig) -> "Transformer":
    """Build BERT's encoder with shifted positions."""
    from bertsmith.model.transformer.transformer import Transformer

    embeddings = bert.build_embeddings(config, first_position=first_position(config))
    blocks = [bert.build_block(config, number) for number in range(config.layers)]
    return Transformer(embeddings, blocks, order=range(config.layers))


HEADS: dict[str, HeadSpec[RobertaConfig]] = {
    "pooler": bert.pooler_head("roberta."),
    "mlm": bert.masked_language_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    # From the raw sentence row through a separate layer: the pooler was never trained.
    "classify": bert.two_layer_head(
        "classifier.dense", "classifier.out_proj", activation=lambda _: "tanh", rate_before=bert.head_rate
    ),
    "tag": bert.linear_head("classifier", reads="tokens"),
    "span": bert.linear_head("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    "choice": bert.linear_head("classifier", reads="pooled", outputs=1),
}


def published_classes(name: str) -> dict[str, tuple[str, ...]]:
    """Return the published classes of RoBERTa and of models that are RoBERTa by another name."""
    return {
        f"{name}ForMaskedLM": ("mlm",),
        f"{name}ForSequenceClassification": ("classify",),
        f"{name}ForTokenClassification": ("tag",),
        f"{name}ForQuestionAnswering": ("span",),
        f"{name}ForMultipleChoice": ("pooler", "choice"),
        f"{name}Model": ("pooler",),
    }


ROBERTA = Architecture(
    model_type="roberta",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=bert.encoder_names,
    prefix="roberta.",
    heads=HEADS,
    classes=published_classes("Roberta"),
    causal_classes={"RobertaForMaskedLM": "RobertaForCausalLM"},
    # fairseq samples from the whole normal distribution.
    initial=lambda config: InitialRule(std=lambda _name: config.initial_std, cut=math.inf),
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    pretraining=Pretraining(50_265, count_parameters, RobertaConfig),  # byte-level BPE, with special tokens
)

# The same network under other names of model and classes; what differs is the text and the vocabulary
# (Conneau et al. 2019: a hundred languages; Martin et al. 2019: French).
XLM_ROBERTA = replace(
    ROBERTA, model_type="xlm-roberta", classes=published_classes("XLMRoberta"), pretraining=None
)
CAMEMBERT = replace(ROBERTA, model_type="camembert", classes=published_classes("Camembert"), pretraining=None)
