"""BERT (Devlin et al. 2018): post-norm blocks, learned positions, segments, masked LM, next sentence."""

from collections.abc import Callable
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
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader, direction_keys
from bertsmith.model.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import nn

    from bertsmith.model.embeddings import Embeddings
    from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Pooler, Reads
    from bertsmith.model.transformer.transformer import PostNormBlock, Transformer

# ---- config.json


def read_config(reader: ConfigReader) -> TransformerConfig:
    """Read the config in a config.json with BERT's keys."""
    reader.require("position_embedding_type", "absolute", "absolute")
    reader.require("add_cross_attention", False, False)
    width = reader.size("hidden_size")
    return TransformerConfig(
        model_type=reader.model_type,
        vocabulary=reader.size("vocab_size"),
        width=width,
        layers=reader.size("num_hidden_layers", most=MAX_LAYERS),
        heads=reader.size("num_attention_heads"),
        inner=reader.size("intermediate_size"),
        embedding_width=width,
        positions=reader.size("max_position_embeddings"),
        segments=reader.size("type_vocab_size", 2),
        activation=reader.activation("hidden_act", "gelu"),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        dropout=reader.rate("hidden_dropout_prob", 0.1),
        attention_dropout=reader.rate("attention_probs_dropout_prob", 0.1),
        head_dropout=reader.rate("classifier_dropout", reader.rate("hidden_dropout_prob", 0.1)),
        initial_std=reader.number("initializer_range", 0.02),
        pad_id=reader.size("pad_token_id", 0, least=0),
        direction=reader.direction(),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json with BERT's keys of a config."""
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.inner,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.segments,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.head_dropout,
        "initializer_range": config.initial_std,
        "pad_token_id": config.pad_id,
        **direction_keys(config),
    }


def count_parameters(config: TransformerConfig) -> int:
    """Count the weights of BERT's encoder and pooler, by arithmetic."""
    return count_embeddings(config) + count_blocks(config) + dense(config.width, config.width)


def count_embeddings(config: TransformerConfig) -> int:
    """Count the weights of the tables and their LayerNorm."""
    rows = config.vocabulary + config.positions + config.segments + config.task_types
    return (rows + 2) * config.embedding_width


def count_blocks(config: TransformerConfig) -> int:
    """Count the weights of all blocks."""
    return sum(
        count_attention(config, block) + count_feed_forward(config, block) for block in range(config.blocks)
    )


def count_attention(config: TransformerConfig, block: int) -> int:
    """Count the weights of a block's attention: four products and a LayerNorm."""
    mixed = config.heads_in(block) * config.head_width
    return 3 * dense(config.width, mixed) + dense(mixed, config.width) + 2 * config.width


def count_feed_forward(config: TransformerConfig, block: int) -> int:
    """Count the weights of a block's feed-forward: two products and a LayerNorm."""
    inner = config.inner_in(block)
    return dense(config.width, inner) + dense(inner, config.width) + 2 * config.width


def dense(inputs: int, outputs: int) -> int:
    """Count the weights of a linear layer with its bias."""
    return inputs * outputs + outputs


# ---- the parts


def build_encoder(config: TransformerConfig) -> "Transformer":
    """Build an encoder of BERT's parts."""
    from bertsmith.model.transformer.transformer import Transformer

    blocks = [build_block(config, number) for number in range(config.layers)]
    return Transformer(build_embeddings(config), blocks, order=range(config.layers))


def build_embeddings(
    config: TransformerConfig, *, first_position: int = 0, widen: "nn.Linear | None" = None
) -> "Embeddings":
    """Build word, position and segment tables, and task types if the config has them."""
    from torch import nn

    from bertsmith.model.embeddings import Embeddings, PositionTable, SegmentTable, TaskTypeTable

    width = config.embedding_width
    added: dict[str, PositionTable | SegmentTable | TaskTypeTable] = {
        "position": PositionTable(config.positions, width, first=first_position)
    }
    if config.segments:
        added["segment"] = SegmentTable(config.segments, width)
    if config.task_types:
        added["task_type"] = TaskTypeTable(config.task_types, width)
    words = nn.Embedding(config.vocabulary, width)
    norm = nn.LayerNorm(width, eps=config.norm_eps)
    return Embeddings(words, added, norm=norm, dropout=config.dropout, widen=widen)


def build_block(config: TransformerConfig, number: int) -> "PostNormBlock":
    """Build one post-norm layer."""
    from torch import nn

    from bertsmith.model.attention.rule import AttentionRule
    from bertsmith.model.transformer.transformer import (
        FeedForward,
        Norms,
        PostNormBlock,
        SelfAttention,
        attention_shape,
    )

    rule = AttentionRule(dropout=config.attention_dropout)
    attention = SelfAttention(attention_shape(config, number), rule=rule)
    feed_forward = FeedForward(config.width, config.inner_in(number), config.activation)
    norms = Norms(*(nn.LayerNorm(config.width, eps=config.norm_eps) for _ in range(2)))
    return PostNormBlock(attention, feed_forward, norms, dropout=config.dropout)


# ---- the names of the published weights


def encoder_names(config: TransformerConfig) -> Names:
    """Return the names of encoder weights in BERT's checkpoints."""
    names = embedding_names(config)
    for number in range(config.layers):
        names |= block_names(f"blocks.{number}", f"encoder.layer.{number}")
    return names


def embedding_names(config: TransformerConfig) -> Names:
    """Return the names of the tables and their LayerNorm."""
    names: Names = {"embeddings.words.weight": ("embeddings.word_embeddings.weight",)}
    names["embeddings.added.position.weight"] = ("embeddings.position_embeddings.weight",)
    if config.segments:
        names["embeddings.added.segment.weight"] = ("embeddings.token_type_embeddings.weight",)
    if config.task_types:
        names["embeddings.added.task_type.weight"] = ("embeddings.task_type_embeddings.weight",)
    return names | pair_of("embeddings.norm", "embeddings.LayerNorm")


def block_names(ours: str, theirs: str) -> Names:
    """Return the names of one layer."""
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


def pooler_head(prefix: str) -> HeadSpec[TransformerConfig]:
    """Return BERT's pooler, stored with the encoder."""
    return HeadSpec(build_pooler, always(pair_of("dense", f"{prefix}pooler.dense")))


def build_pooler(config: TransformerConfig, _: int) -> "Pooler":
    """Build a dense tanh layer on the sentence row."""
    from bertsmith.model.heads import Pooler

    return Pooler(config.width)


def masked_language_head(dense: str, norm: str, bias: str) -> HeadSpec[TransformerConfig]:
    """Return the masked-LM head under an architecture's names; the transform ends in the embedding width."""
    names = {**pair_of("transform.dense", dense), **pair_of("transform.norm", norm), "bias": (bias,)}
    return HeadSpec(build_masked_language_head, always(names))


def build_masked_language_head(config: TransformerConfig, _: int) -> "MaskedLanguageHead":
    """Build dense, activation and LayerNorm, with the word embeddings as decoder."""
    from torch import nn

    from bertsmith.model.heads import MaskedLanguageHead, Transform

    dense = nn.Linear(config.width, config.embedding_width)
    norm = nn.LayerNorm(config.embedding_width, eps=config.norm_eps)
    return MaskedLanguageHead(Transform(dense, config.activation, norm), config.vocabulary)


def head_rate(config: TransformerConfig) -> float:
    """Return the dropout before a task's output layer."""
    return config.head_dropout


def no_rate(_: TransformerConfig) -> float:
    """Return 0: no dropout."""
    return 0.0


def linear_head(
    name: str, *, reads: "Reads", outputs: int = 0, rate: Callable[[Any], float] = head_rate
) -> HeadSpec[TransformerConfig]:
    """Return a head of dropout and one linear layer; `outputs` 0: one for each label of the task."""

    def build(config: TransformerConfig, wanted: int) -> "OutputHead":
        from torch import nn

        from bertsmith.model.heads import OutputHead

        return OutputHead(nn.Linear(config.width, outputs or wanted), reads=reads, dropout=rate(config))

    needs = ("pooler",) if reads == "pooled" else ()
    return HeadSpec(build, always(pair_of("output", name)), needs=needs, labelled=not outputs)


def own_activation(config: TransformerConfig) -> str:
    """Return the encoder's activation."""
    return config.activation


def two_layer_head(
    dense: str,
    output: str,
    *,
    activation: Callable[[Any], str] = own_activation,
    reads: "Reads" = "sentence",
    outputs: int = 0,
    rate: Callable[[Any], float] = head_rate,
    rate_before: Callable[[Any], float] = no_rate,
) -> HeadSpec[TransformerConfig]:
    """Return a head of a dense layer with an activation, then a linear one; `outputs` 0: one per label."""

    def build(config: TransformerConfig, wanted: int) -> "OutputHead":
        from torch import nn

        from bertsmith.model.heads import OutputHead, Transform

        transform = Transform(nn.Linear(config.width, config.width), activation(config))
        rates = {"dropout": rate(config), "dropout_before": rate_before(config)}
        layer = nn.Linear(config.width, outputs or wanted)
        return OutputHead(layer, reads=reads, transform=transform, **rates)

    names = pair_of("transform.dense", dense) | pair_of("output", output)
    return HeadSpec(build, always(names), labelled=not outputs)


def pretraining_and_task_heads(prefix: str) -> dict[str, HeadSpec[TransformerConfig]]:
    """Return the heads of BERT and of architectures that kept them (ERNIE)."""
    return {
        "pooler": pooler_head(prefix),
        "mlm": masked_language_head(
            "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
        ),
        "nsp": linear_head("cls.seq_relationship", reads="pooled", outputs=2, rate=no_rate),
        "classify": linear_head("classifier", reads="pooled"),
        "tag": linear_head("classifier", reads="tokens"),
        "span": linear_head("qa_outputs", reads="tokens", outputs=2, rate=no_rate),
        "choice": linear_head("classifier", reads="pooled", outputs=1),
    }


def published_classes(name: str) -> dict[str, tuple[str, ...]]:
    """Return the published classes of BERT and of architectures that kept its heads."""
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
    """Return the second name of the word embedding table: the decoder of the masked-LM head."""
    return {
        "cls.predictions.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


BERT = Architecture(
    model_type="bert",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    prefix="bert.",
    heads=pretraining_and_task_heads("bert."),
    classes=published_classes("Bert"),
    causal_classes={"BertForMaskedLM": "BertLMHeadModel"},
    initial=constant_std,
    tied=tied_names("bert."),
    pretraining=Pretraining(30_522, count_parameters, TransformerConfig),  # uncased English WordPiece
)
