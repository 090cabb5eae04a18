"""ALBERT (Lan et al. 2019): factorised embeddings, shared layers, sentence-order prediction."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import Pooler
from bertsmith.model.member import HeadPlan, Member, Names, always, constant_std, pair_of
from bertsmith.model.relatives import bert
from bertsmith.model.settings import MOST_LAYERS, Settings
from bertsmith.model.shape import Shape


@dataclass(frozen=True, kw_only=True)
class AlbertShape(Shape):
    """A shape with groups of layers that share one set of weights."""

    groups: int = 1
    blocks_per_group: int = 1

    def order(self) -> list[int]:
        """Which block each step runs: layers in a row share a group, a group runs its blocks in turn."""
        # In floating point, as transformers does it: whole numbers would differ where groups divide unevenly.
        of_layer = [int(layer / (self.layers / self.groups)) for layer in range(self.layers)]
        return [
            group * self.blocks_per_group + block
            for group in of_layer
            for block in range(self.blocks_per_group)
        ]


def read_shape(settings: Settings) -> AlbertShape:
    """BERT's shape with the embedding width and the sharing."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu_new"}
    common = bert.read_shape(Settings(rates | dict(settings.values), settings.where, settings.used))
    values = {**vars(common), "embedding_width": settings.size("embedding_size", 128)}
    values["head_dropout"] = settings.rate("classifier_dropout_prob", 0.1)
    groups = settings.size("num_hidden_groups", 1, most=common.layers)
    return AlbertShape(
        **values,
        groups=groups,
        blocks_per_group=settings.size("inner_group_num", 1, most=MOST_LAYERS // groups),
    )


def write_config(shape: Shape) -> dict[str, Any]:
    """BERT's config with ALBERT's keys."""
    assert isinstance(shape, AlbertShape)
    config = bert.write_config(shape)
    config["classifier_dropout_prob"] = config.pop("classifier_dropout")
    config["embedding_size"] = shape.embedding_width
    config["num_hidden_groups"], config["inner_group_num"] = shape.groups, shape.blocks_per_group
    return config


def build_encoder(shape: Shape) -> Encoder:
    """Narrow embeddings, widened, and as many blocks as there are different ones."""
    assert isinstance(shape, AlbertShape)
    embeddings = bert.build_embeddings(shape, widen=nn.Linear(shape.embedding_width, shape.width))
    blocks = [bert.build_block(shape) for _ in range(shape.groups * shape.blocks_per_group)]
    return Encoder(embeddings, blocks, order=shape.order())


def encoder_names(shape: Shape) -> Names:
    """Encoder weights as ALBERT's checkpoints call them."""
    assert isinstance(shape, AlbertShape)
    names = bert.embedding_names(shape) | pair_of("embeddings.widen", "encoder.embedding_hidden_mapping_in")
    for number in range(shape.groups * shape.blocks_per_group):
        group, block = divmod(number, shape.blocks_per_group)
        names |= _block_names(
            f"blocks.{number}", f"encoder.albert_layer_groups.{group}.albert_layers.{block}"
        )
    return names


def _block_names(ours: str, theirs: str) -> Names:
    projections = (f"{theirs}.attention.{part}" for part in ("query", "key", "value"))
    return {
        **pair_of(f"{ours}.attention.project", *projections),
        **pair_of(f"{ours}.attention.output", f"{theirs}.attention.dense"),
        **pair_of(f"{ours}.attention_norm", f"{theirs}.attention.LayerNorm"),
        **pair_of(f"{ours}.feed_forward.expand", f"{theirs}.ffn"),
        **pair_of(f"{ours}.feed_forward.contract", f"{theirs}.ffn_output"),
        **pair_of(f"{ours}.feed_forward_norm", f"{theirs}.full_layer_layer_norm"),
    }


HEADS = {
    "pooler": HeadPlan(lambda shape, _: Pooler(shape.width), always(pair_of("dense", "albert.pooler"))),
    "mlm": bert.masked_language_plan("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
    "sop": bert.linear_plan("sop_classifier.classifier", reads="pooled", outputs=2),
    "classify": bert.linear_plan("classifier", reads="pooled"),
    "tag": bert.linear_plan("classifier", reads="tokens"),
    "span": bert.linear_plan("qa_outputs", reads="tokens", outputs=2, rate=bert.no_rate),
    "choice": bert.linear_plan("classifier", reads="pooled", outputs=1),
}

ALBERT = Member(
    model_type="albert",
    read_shape=read_shape,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="albert.",
    heads=HEADS,
    architectures={
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
)
