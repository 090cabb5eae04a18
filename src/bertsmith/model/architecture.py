"""Description of an architecture: its config, its parts, the published names of its weights.

A recipe reads the properties of an architecture (its heads, the limits of its config.json, the number of
weights of a size), and `bertsmith recipe` never loads torch. So the files of `architectures/` import torch,
and everything that needs it, only in the functions that build modules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from bertsmith.model.encoder_config import ConfigReader, Direction, EncoderConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bertsmith.model.encoder import Encoder

Config = TypeVar("Config", bound=EncoderConfig)
Taken = TypeVar("Taken", bound=EncoderConfig, contravariant=True)
Names = dict[str, tuple[str, ...]]
"""Maps our parameter names to the published tensors that are stacked in them."""


def fill_vector(name: str, vector: "Tensor") -> None:
    """Set a bias to 0 and a LayerNorm's scales to 1."""
    vector.fill_(0.0 if name.endswith("bias") else 1.0)


@dataclass(frozen=True, slots=True)
class InitialRule:
    """Sampling of initial matrices; the standard deviation may depend on the parameter's name."""

    std: Callable[[str], float]
    cut: float = 2.0
    """Samples beyond this many standard deviations are sampled again (TensorFlow's truncated_normal: 2)."""
    vector: "Callable[[str, Tensor], None]" = fill_vector
    """Sets the initial values of a vector, by the parameter's name."""


@dataclass(frozen=True, slots=True)
class HeadSpec(Generic[Taken]):
    """One head of an architecture: how to build it, and the published names of its weights."""

    build: "Callable[[Taken, int], nn.Module]"
    """Builds it from the config and the number of outputs (ignored if the head fixes it)."""
    names: Callable[[Taken], Names]
    needs: tuple[str, ...] = ()
    """Other heads that it depends on."""
    labelled: bool = False
    """True if each output is a label of the task, as id2label names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Generic[Config]):
    """A member of the family: one file, and one entry of the registry."""

    model_type: str
    """Its name in config.json and in recipes."""
    read_config: Callable[[ConfigReader], Config]
    write_config: Callable[[Config], dict[str, Any]]
    build_encoder: "Callable[[Config], Encoder]"
    encoder_names: Callable[[Config], Names]
    """Names relative to the prefix."""
    words_key: str = "embeddings.words.weight"
    """Our name of the word embeddings in the encoder."""
    transposed: Callable[[str], bool] = lambda _: False
    """True for published weights that are stored as [inputs, outputs]."""
    directions: tuple[Direction, ...] = ("both", "left-to-right", "right-to-left")
    """Sides that its models can see and its config.json can express."""
    prefix: str
    """Prefix of encoder weights in a file that also has heads."""
    heads: Mapping[str, HeadSpec[Config]]
    classes: Mapping[str, tuple[str, ...]]
    """Heads of each published class, richest first."""
    causal_classes: Mapping[str, str] = field(default_factory=dict)
    """Names in transformers of the published classes for models that see only earlier tokens."""
    initial: Callable[[Config], InitialRule]
    tied: Mapping[str, str]
    """First name of each weight that has a second published name."""
    next_label: int = 0
    """Output of the next-sentence head for "B follows A": 0 in BERT, 1 in ERNIE."""
    pretraining: "Pretraining[Config] | None" = None
    """Requirements of training from scratch; None if a run can only continue from a model folder."""

    def names_of_head(self, head: str, config: Config) -> set[str]:
        """Return all published names of a head's weights."""
        return published_in(self.heads[head].names(config))

    def words_name(self, config: Config) -> str:
        """Return the published name of the word embeddings."""
        return self.prefix + self.encoder_names(config)[self.words_key][0]

    def decoder_name(self, config: Config) -> str:
        """Return the published name of the masked words' decoder, the second name of the word embeddings."""
        words = self.words_name(config)
        return next(second for second, first in self.tied.items() if first == words)

    def has_pair_head(self) -> bool:
        """True if it has a head for sentence pairs."""
        return not self.heads.keys().isdisjoint(("nsp", "sop"))


@dataclass(frozen=True, slots=True)
class Pretraining(Generic[Config]):
    """Properties that a recipe needs to train an architecture from scratch."""

    vocabulary: int
    """Entries of the published vocabulary; the vocabulary of a run is its store's."""
    count_parameters: Callable[[Config], int]
    """Counts the weights of the encoder and its pooler by arithmetic, without pre-training heads."""
    config_class: type[Config]
    min_segments: int = 1
    own_head_dropout: bool = False
    """True if the dropout before a task's output layer has a separate published rate (ALBERT, DistilBERT,
    ModernBERT); elsewhere it is the encoder's."""
    generator_config: Callable[[Config, float], Config] | None = None
    """Config of the generator at a fraction of the size, for architectures that learn from one (ELECTRA)."""
    generator_part: Literal["width", "layers"] = "width"
    """Part of the generator that is scaled by the fraction."""


def published_in(names: Names) -> set[str]:
    """Return all published names among these."""
    return {name for theirs in names.values() for name in theirs}


def pair_of(ours: str, *theirs: str, bias: bool = True) -> Names:
    """Return the names of a layer's weight and bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs) for kind in kinds}


def always(names: Names) -> Callable[[EncoderConfig], Names]:
    """Return names that do not depend on the config."""
    return lambda _config: names


def constant_std(config: EncoderConfig) -> InitialRule:
    """Return a truncated normal with one standard deviation for all matrices, as published for BERT."""
    return InitialRule(std=lambda _name: config.initial_std)


def with_prefix(names: Names, prefix: str) -> Names:
    """Return names with a prefix before the published ones."""
    return {ours: tuple(prefix + name for name in theirs) for ours, theirs in names.items()}
