"""The model section of a recipe: the architecture of a run that starts from scratch."""

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.modernbert import Norm
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder_config import MAX_LAYERS, ConfigReader, EncoderConfig
from bertsmith.model.kernels.activations import ACTIVATIONS
from bertsmith.model.transformer.transformer_config import TransformerConfig
from bertsmith.recipe.section import Count, Fraction, RuleError, Section
from bertsmith.recipe.toml_text import value_text

if TYPE_CHECKING:
    ModelType = str
    Activation = str
else:  # from the tables, so that a new architecture or activation is listed in one place only
    ModelType = Literal[tuple(ARCHITECTURES)]
    Activation = Literal[tuple(ACTIVATIONS)]


class ModelSection(Section):
    """The architecture; the defaults are BERT-Base (Devlin et al. 2018)."""

    type: ModelType = "bert"
    """Architecture; xlm-roberta, camembert and deberta-v2 only continue from a model folder (start.model)."""
    layers: Count = 12
    """Number of layers."""
    width: Count = 768
    """Width of the hidden states."""
    heads: Count = 12
    """Attention heads per layer."""
    inner: Count = 3072
    """Width inside the feed-forward layer: four times the width in every published size except ModernBERT's,
    whose value is the width of each of two halves.
    """
    cell: Count = 4096
    """Width of the LSTM cells of a direction (elmo); their states are projected to half of the width."""
    embedding_width: Count | Literal["width"] = "width"
    """Width of the word embeddings: 128 in ALBERT and ELECTRA-Small, elsewhere the hidden width (in ELMo half
    of it, one direction's width).
    """
    positions: Count = 512
    """Longest sequence in tokens."""
    segments: Annotated[int, Field(ge=0)] = 2
    """Number of segment embeddings: 2 in BERT, 1 in RoBERTa (unused), 0 in DistilBERT and ModernBERT."""
    task_types: Annotated[int, Field(ge=0)] = 0
    """Number of ERNIE 2.0's task embeddings; 0 leaves them out."""
    activation: Activation = "gelu"
    """gelu: the erf form of BERT's first release; gelu_new: the tanh form of its later code and of ALBERT;
    relu2: the squared ReLU (Primer); the others exist for continuing from model folders."""
    dropout: Fraction = 0.1
    """Dropout after embeddings, attention and feed-forward; in ModernBERT inside the feed-forward."""
    attention_dropout: Fraction = 0.1
    """Dropout of attention probabilities; in ModernBERT also of the output of attention."""
    norm_eps: Annotated[float, Field(gt=0, lt=1e30)] = 1e-12
    """Epsilon of LayerNorm: 1e-12 in BERT, 1e-5 in RoBERTa and ModernBERT."""
    initial_std: Annotated[float, Field(gt=0, lt=1e30)] = 0.02
    """Standard deviation of the initial weights."""
    sharing: Literal["auto", "all", "attention", "ffn", "none"] = "auto"
    """Weights that layers share, for model.type = albert (its section 4.5): whole layers, the attention or
    the feed-forward with its LayerNorm, or none; auto is all in ALBERT."""
    groups: Count = 1
    """Groups of neighbouring layers that share weights: 1 in ALBERT, which shares all layers."""
    global_layers: Count | tuple[Annotated[int, Field(ge=0)], ...] = 3
    """Layers of a ModernBERT with global attention: every n-th from the first on, or a list of layer numbers
    from 0 such as [0, 5]. The others see `local_attention` tokens; with 1, all layers are global."""
    local_attention: Count = 128
    """Tokens that a local layer of a ModernBERT sees, both sides together."""
    global_theta: Annotated[float, Field(gt=0, lt=1e30)] = 160_000.0
    """Base of the rotary positions in a ModernBERT's global layers: 10,000 in training on 1,024 tokens,
    160,000 on 8,192."""
    local_theta: Annotated[float, Field(gt=0, lt=1e30)] = 10_000.0
    """Base of the rotary positions in a ModernBERT's local layers."""
    gated: bool | Literal["auto"] = "auto"
    """Multiply one half of the feed-forward's inner values by the other (GeGLU); auto is true in ModernBERT.

    This and the next three are for model.type = modernbert; only bertsmith can open a model with values other
    than ModernBERT's own.
    """
    norm: Norm = "layernorm"
    """layernorm, or rmsnorm, without gains and without subtracting the mean (Zhang & Sennrich 2019)."""
    qk_norm: bool = False
    """Scale the queries and keys of each head to a root mean square of 1, without gains."""
    sandwich_norm: bool = False
    """Normalise the output of each sub-layer, too, before it is added (CogView)."""

    @model_validator(mode="after")
    def heads_divide_width(self) -> "ModelSection":
        if "heads" in keys_of(self.type) and self.width % self.heads:
            raise RuleError(
                f"model.heads = {self.heads} does not divide model.width = {self.width}",
                keys=("model.heads", "model.width"),
                remedy="make the width a multiple of the heads: BERT's is 64 times as large",
            )
        return self

    @model_validator(mode="after")
    def layers_can_share(self) -> "ModelSection":
        if "sharing" not in keys_of(self.type) and (self.groups > 1 or self.sharing not in ("auto", "none")):
            key = "groups" if self.groups > 1 else "sharing"
            raise RuleError(
                f"model.{key} = {getattr(self, key)}, but model.type = {self.type} does not share weights",
                keys=(f"model.{key}", "model.type"),
                remedy="set model.type to albert",
            )
        if self.groups > self.layers:
            raise RuleError(
                f"model.groups = {self.groups} is more than model.layers = {self.layers}",
                keys=("model.groups", "model.layers"),
                remedy="use fewer groups, or set model.sharing to none",
            )
        return self

    @model_validator(mode="after")
    def has_the_parts(self) -> "ModelSection":
        lacking = type(self).model_fields.keys() - keys_of(self.type) - {"type", "sharing", "groups"}
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            if key in lacking and value != field.default:
                others = (each for each in ARCHITECTURES if key in keys_of(each))
                raise RuleError(
                    f"model.{key} = {value_text(value)} is not supported by model.type = {self.type}",
                    keys=(f"model.{key}", "model.type"),
                    remedy=f"set model.type to {next(others)}",
                )
        if isinstance(self.global_layers, tuple) and any(each >= self.layers for each in self.global_layers):
            raise RuleError(
                f"model.global_layers names {max(self.global_layers)}, but the last of model.layers = "
                f"{self.layers} layers is {self.layers - 1}",
                keys=("model.global_layers", "model.layers"),
                remedy="count the layers from 0",
            )
        return self

    @model_validator(mode="after")
    def can_be_saved(self) -> "ModelSection":
        architecture = ARCHITECTURES[self.type]
        if architecture.pretraining is None:
            return self
        if self.layers > MAX_LAYERS:  # before anything lists all of them
            what = f"model.layers = {self.layers} is more than a saved model may have"
            raise RuleError(what, keys=("model.layers",), remedy=f"set it to {MAX_LAYERS} or less")
        if self.segments < architecture.pretraining.min_segments:
            raise self._lost("segments", f"{architecture.pretraining.min_segments} or more")
        # Read back the config.json that would be written, which lacks some keys.
        config = self.encoder_config(architecture.pretraining.vocabulary)
        try:
            saved = architecture.read_config(ConfigReader(architecture.write_config(config), "config.json"))
        except UserError as error:  # a size that exceeds the limit for any file
            what = f"a saved model of model.type = {self.type} could not be opened: {error.what}"
            raise RuleError(what, keys=("model.type",), remedy=error.remedy) from error
        own = keys_of(self.type) - {"sharing", "groups"}
        for key in [each for each in type(self).model_fields if each in own]:
            if getattr(saved, key) != getattr(config, key):
                raise self._lost(key, "width" if key == "embedding_width" else getattr(saved, key))
        return self

    def _lost(self, key: str, kept: object) -> RuleError:
        what = f"model.{key} = {getattr(self, key)} would be lost in a saved model"
        return RuleError(
            f"{what} of model.type = {self.type}",
            keys=(f"model.{key}", "model.type"),
            remedy=f"set model.{key} to {kept}",
        )

    def encoder_config(self, vocabulary: int, **own: int) -> EncoderConfig:
        """Build the config of a new encoder; `own` sets fields that are not recipe keys (`pad_id`)."""
        pretraining = ARCHITECTURES[self.type].pretraining
        assert pretraining is not None, "a recipe rejects what cannot start from scratch"
        values = self.model_dump() | own | {"model_type": self.type, "vocabulary": vocabulary}
        if not pretraining.own_head_dropout:
            values["head_dropout"] = self.dropout
        if self.embedding_width == "width":
            values["embedding_width"] = self.width
        config: EncoderConfig = pretraining.config_class.of_recipe(values)
        return config


def keys_of(model_type: str) -> set[str]:
    """Return the fields of an encoder config of this type."""
    pretraining = ARCHITECTURES[model_type].pretraining
    config_class = TransformerConfig if pretraining is None else pretraining.config_class
    return {each.name for each in fields(config_class)}
