"""ALBERT (Lan et al. 2019): factorised embeddings, shared layers, sentence-order prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from bertsmith.core.errors import UserError
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
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from bertsmith.model.transformer.transformer import Transformer


Sharing = Literal["all", "attention", "ffn"]
SHARED_PARTS = {
    "attention": ("attention", "attention_norm"),
    "ffn": ("feed_forward", "feed_forward_norm"),
}
"""Sub-layer with its norm that the layers of a group share, if they do not share the whole layer."""


@dataclass(frozen=True, kw_only=True)
class AlbertConfig(TransformerConfig):
    """A config with groups of layers that share their weights, or some of them."""

    groups: int = 1
    blocks_per_group: int = 1
    sharing: Sharing = "all"

    def group_of_layers(self) -> list[int]:
        """The group of each layer; layers in a row share one."""
        # In floating point, like transformers: whole numbers would differ if groups divide unevenly.
        return [int(layer / (self.layers / self.groups)) for layer in range(self.layers)]

    @property
    def blocks(self) -> int:
        """Number of blocks; layers that share all their weights are one block."""
        return self.groups * self.blocks_per_group if self.sharing == "all" else self.layers

    def order(self) -> list[int]:
        """Block of each step; a group runs its blocks in turn."""
        if self.sharing != "all":
            return list(range(self.layers))
        return [
            group * self.blocks_per_group + block
            for group in self.group_of_layers()
            for block in range(self.blocks_per_group)
        ]

    def subset(self, layers: Sequence[int], *, where: str = "distill.layers") -> Self:
        """Return the config of a network with only these layers, if all of them share their weights."""
        fewer = super().subset(layers, where=where)
        if self.groups > 1:
            what = f"layers that share their weights in {self.groups} groups cannot be removed"
            raise UserError(what, where=where, remedy="use a model that shares all of its layers, or none")
        return fewer

    @classmethod
    def of_recipe(cls, values: Mapping[str, Any]) -> Self:
        """Return the config for the values of a recipe's model section."""
        apart, sharing = values["sharing"] == "none", values["sharing"]
        groups = values["layers"] if apart else values["groups"]
        told = {"groups": groups, "sharing": "all" if sharing in ("auto", "none") else sharing}
        return super().of_recipe({**values, **told})

    def in_recipe(self) -> dict[str, Any]:
        """Return its values as a recipe's model section has them."""
        return super().in_recipe() | {"sharing": "auto" if self.sharing == "all" else self.sharing}


def read_config(reader: ConfigReader) -> AlbertConfig:
    """Return BERT's config with the embedding width and the sharing."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu_new"}
    common = bert.read_config(ConfigReader(rates | dict(reader.values), reader.where, reader.used))
    values = {**vars(common), "embedding_width": reader.size("embedding_size", 128)}
    values["head_dropout"] = reader.rate("classifier_dropout_prob", 0.1)
    # transformers supports groups that share whole layers. If only a part is shared, a file has each whole
    # layer, and these keys are ours.
    sharing = cast("Sharing", reader.word("shared_parts", "all", choices=("all", *SHARED_PARTS)))
    if sharing != "all":
        reader.require("num_hidden_groups", common.layers, common.layers)
        reader.require("inner_group_num", 1, 1)
        groups = reader.size("shared_groups", 1, most=common.layers)
        return AlbertConfig(**values, groups=groups, sharing=sharing)
    groups = reader.size("num_hidden_groups", 1, most=common.layers)
    return AlbertConfig(
        **values,
        groups=groups,
        blocks_per_group=reader.size("inner_group_num", 1, most=MAX_LAYERS // groups),
    )


def write_config(config: AlbertConfig) -> dict[str, Any]:
    """Return BERT's config with ALBERT's keys."""
    written = bert.write_config(config)
    written["classifier_dropout_prob"] = written.pop("classifier_dropout")
    written["embedding_size"] = config.embedding_width
    written["num_hidden_groups"], written["inner_group_num"] = config.groups, config.blocks_per_group
    if config.sharing != "all":
        written["num_hidden_groups"] = config.layers
        written |= {"shared_parts": config.sharing, "shared_groups": config.groups}
    return written


def count_parameters(config: AlbertConfig) -> int:
    """Count the weights of the encoder and its pooler: shared blocks count once."""
    blocks = bert.count_blocks(config)
    if config.sharing != "all":
        count = bert.count_attention if config.sharing == "attention" else bert.count_feed_forward
        blocks -= (config.layers - config.groups) * count(config, 0)
    widen, pooler = bert.dense(config.embedding_width, config.width), bert.dense(config.width, config.width)
    return bert.count_embeddings(config) + widen + blocks + pooler


def build_encoder(config: AlbertConfig) -> "Transformer":
    """Build narrow embeddings, widened, and one block for each distinct one; some may share parts."""
    from torch import nn

    from bertsmith.model.transformer.transformer import Transformer

    embeddings = bert.build_embeddings(config, widen=nn.Linear(config.embedding_width, config.width))
    blocks = [bert.build_block(config, number) for number in range(config.blocks)]
    if config.sharing != "all":
        groups = config.group_of_layers()
        for block, group in zip(blocks, groups, strict=True):
            for part in SHARED_PARTS[config.sharing]:
                setattr(block, part, getattr(blocks[groups.index(group)], part))
    return Transformer(embeddings, blocks, order=config.order())


def encoder_names(config: AlbertConfig) -> Names:
    """Return the names of encoder weights in ALBERT's checkpoints."""
    names = bert.embedding_names(config) | pair_of("embeddings.widen", "encoder.embedding_hidden_mapping_in")
    for number in range(config.blocks):
        group, block = divmod(number, config.blocks_per_group)
        ours, theirs = f"blocks.{number}", f"encoder.albert_layer_groups.{group}.albert_layers.{block}"
        projections = (f"{theirs}.attention.{part}" for part in ("query", "key", "value"))
        names |= {
            **pair_of(f"{ours}.attention.project", *projections),
            **pair_of(f"{ours}.attention.output", f"{theirs}.attention.dense"),
            **pair_of(f"{ours}.attention_norm", f"{theirs}.attention.LayerNorm"),
            **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.ffn"),
            **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.ffn_output"),
            **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.full_layer_layer_norm"),
        }
    return names


HEADS = {
    "pooler": HeadSpec(bert.build_pooler, always(pair_of("dense", "albert.pooler"))),
    "mlm": bert.masked_language_head("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
    "sop": bert.linear_head("sop_classifier.classifier", reads="pooled", outputs=2),
    "classify": bert.linear_head("classifier", reads="pooled"),
    "tag": bert.linear_head("classifier", reads="tokens"),
    "span": bert.linear_head("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    "choice": bert.linear_head("classifier", reads="pooled", outputs=1),
}

ALBERT = Architecture(
    model_type="albert",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="albert.",
    heads=HEADS,
    classes={
        "AlbertForPreTraining": ("pooler", "mlm", "sop"),
        "AlbertForMaskedLM": ("mlm",),
        "AlbertForSequenceClassification": ("pooler", "classify"),
        "AlbertForTokenClassification": ("tag",),
        "AlbertForQuestionAnswering": ("span",),
        "AlbertForMultipleChoice": ("pooler", "choice"),
        "AlbertModel": ("pooler",),
    },
    initial=constant_std,
    tied={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    pretraining=Pretraining(30_000, count_parameters, AlbertConfig, own_head_dropout=True),  # SentencePiece
)
