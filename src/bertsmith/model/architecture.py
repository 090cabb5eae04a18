"""What an architecture says of itself: its config, its parts, the published names of its weights.

Recipes ask an architecture what it can do (which heads it has, what its config.json can say, how many weights
a size has), and `bertsmith recipe` never loads torch. So the files of `architectures/` import torch, and all
that is made of it, only in the functions that build modules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.model.encoder_config import ConfigReader, EncoderConfig, layer_shape_settings

if TYPE_CHECKING:
    from torch import nn

    from bertsmith.model.encoder import Encoder

Names = dict[str, tuple[str, ...]]
"""Our parameter name -> the published names whose tensors, one below the other, make it up."""


@dataclass(frozen=True, slots=True)
class InitialRule:
    """How initial matrices are sampled; the standard deviation may depend on the parameter's name."""

    std: Callable[[str], float]
    cut: float = 2.0
    """Samples beyond this many standard deviations are sampled again (TensorFlow's truncated_normal: 2)."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head of an architecture: how to build it, and the published names of its weights."""

    build: "Callable[[EncoderConfig, int], nn.Module]"
    """From the config and the number of outputs (ignored where the head fixes it)."""
    names: Callable[[EncoderConfig], Names]
    needs: tuple[str, ...] = ()
    """Other heads it stands on."""
    labelled: bool = False
    """Whether each output is a label of the task, as id2label names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A member of the family: one file, and one entry of the registry."""

    model_type: str
    """Its name in config.json and in recipes."""
    read_config: Callable[[ConfigReader], EncoderConfig]
    write_config: Callable[[EncoderConfig], dict[str, Any]]
    build_encoder: "Callable[[EncoderConfig], Encoder]"
    encoder_names: Callable[[EncoderConfig], Names]
    """Relative to the prefix."""
    prefix: str
    """What stands before encoder weights in a file that also has heads."""
    heads: Mapping[str, HeadSpec]
    classes: Mapping[str, tuple[str, ...]]
    """The published class -> the heads it holds, richest first."""
    initial: Callable[[EncoderConfig], InitialRule]
    tied: Mapping[str, str]
    """Published second names of a weight -> its first name."""
    own_settings: Callable[[EncoderConfig], tuple[str, ...]] = layer_shape_settings
    """The settings of a config, by their names in a recipe, that no published class has: config.json then
    names a type of our own, and no other tool opens the folder."""
    next_label: int = 0
    """Which output of the next-sentence head says that B follows A: 0 in BERT, 1 in ERNIE."""
    pretraining: "Pretraining | None" = None
    """What a recipe needs to train one from scratch; None where it can only resume from a model folder."""

    def names_of_head(self, head: str, config: EncoderConfig) -> set[str]:
        """All published names of a head's weights."""
        return published_in(self.heads[head].names(config))

    def words_name(self, config: EncoderConfig) -> str:
        """The published name of the word embeddings."""
        return self.prefix + self.encoder_names(config)["embeddings.words.weight"][0]

    def decoder_name(self, config: EncoderConfig) -> str:
        """The published name of the masked words' decoder: the second one of the word embeddings."""
        words = self.words_name(config)
        return next(second for second, first in self.tied.items() if first == words)

    def has_pair_head(self) -> bool:
        """Whether it has a head for sentence pairs."""
        return not self.heads.keys().isdisjoint(("nsp", "sop"))


@dataclass(frozen=True, slots=True)
class Pretraining:
    """What a recipe needs to know to train an architecture from scratch."""

    vocabulary: int
    """Entries of the published vocabulary: a recipe leaves the vocabulary to the store it is run on."""
    count_parameters: Callable[[EncoderConfig], int]
    """The weights of the encoder and its pooler, by arithmetic alone; pre-training heads are not counted."""
    config_class: type[EncoderConfig] = EncoderConfig
    min_segments: int = 1
    shares_layers: bool = False
    """Whether its layers can share weights (ALBERT)."""
    own_head_dropout: bool = False
    """Whether the dropout before a task's output layer has a published rate of its own (ALBERT, DistilBERT,
    ModernBERT); elsewhere it is the encoder's."""
    generator_config: Callable[[EncoderConfig, float], EncoderConfig] | None = None
    """The config of the generator, at a fraction of the size, where it can learn from one (ELECTRA)."""
    generator_part: Literal["width", "layers"] = "width"
    """What of the generator is that fraction."""


def published_in(names: Names) -> set[str]:
    """All published names among these."""
    return {name for theirs in names.values() for name in theirs}


def pair_of(ours: str, *theirs: str, bias: bool = True) -> Names:
    """The names of a layer's weight and bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs) for kind in kinds}


def always(names: Names) -> Callable[[EncoderConfig], Names]:
    """Names that do not depend on the config."""
    return lambda _config: names


def constant_std(config: EncoderConfig) -> InitialRule:
    """Truncated normal with one standard deviation for all matrices, as published for BERT."""
    return InitialRule(std=lambda _name: config.initial_std)


def with_prefix(names: Names, prefix: str) -> Names:
    """The same names with a prefix before the published ones."""
    return {ours: tuple(prefix + name for name in theirs) for ours, theirs in names.items()}
