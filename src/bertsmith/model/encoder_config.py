"""The numbers and costs of an encoder, as frozen data, and the reader of config.json."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from bertsmith.core.errors import UserError
from bertsmith.model.kernels.activations import ACTIVATIONS

Direction = Literal["both", "left-to-right", "right-to-left", "two-directions"]
"""Tokens that a token sees besides itself: all, earlier ones, or later ones.

In two directions, half of its state sees earlier tokens, and half later ones.
"""
FP32, BF16 = 4, 2
Part = TypeVar("Part")


class PassSize(NamedTuple):
    """Size of one forward pass."""

    tokens: int
    sequences: int
    """Number of sequences, of equal length: attention costs the square of a length."""
    predicted: int = 0
    """Number of tokens with scored words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """The settings of a training step that decide how many bytes a layer keeps for each token."""

    longest: int
    """Tokens of the longest sequence."""
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16", "fp16"]
    recompute: bool
    """True if layers are computed again in the backward pass."""

    @property
    def value(self) -> int:
        """Return the bytes of a number that a product gives."""
        return FP32 if self.precision == "fp32" else BF16

    @property
    def dropout_mark(self) -> int:
        """Return the bytes that dropout keeps for each number: on a CPU its factor, on a GPU its mask."""
        return self.value if self.device == "cpu" else 1


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ABC):
    """The numbers that every kind of encoder has, and its costs."""

    positions_from_pad_id: ClassVar[bool] = False
    """True if positions are counted from the padding id on (RoBERTa)."""
    views: ClassVar[int] = 1
    """States that a word is predicted from."""
    model_type: str
    vocabulary: int
    width: int
    layers: int
    embedding_width: int
    """Width of the embeddings: narrow in ALBERT and ELECTRA, which widen them; elsewhere `width`."""
    positions: int
    """Longest text of the model, in tokens."""
    segments: int = 0
    """Number of segments that it distinguishes."""
    dropout: float = 0.1
    head_dropout: float = 0.1
    """Dropout before the output layer of a task head."""
    initial_std: float = 0.02
    pad_id: int = 0
    tied: bool = True
    """True if the word embeddings are also the decoder of masked words; else it has its own weights."""
    direction: Direction = "both"
    """Visible side: one side only if the model was trained to predict the next or the previous token."""

    @abstractmethod
    def operations(self, size: PassSize) -> float:
        """Return the operations of all layers in a forward pass."""

    def word_products(self) -> int:
        """Return the multiplications that score all words for one predicted token."""
        return (self.width + self.vocabulary) * self.embedding_width

    @abstractmethod
    def kept_bytes(self, form: StepForm) -> int:
        """Return the bytes that all layers keep for each token until the backward pass."""

    @abstractmethod
    def working_bytes(self, form: StepForm) -> int:
        """Return the bytes for each token of the gradients in a layer, and of its recomputed values."""

    @abstractmethod
    def layer_bytes(self, form: StepForm) -> int:
        """Return the bytes for each token of its widest layer."""

    def first_token_sees(self) -> str:
        """Return the part of a text that its first token sees; empty if it sees all."""
        little = {
            "left-to-right": "nothing of the text",
            "two-directions": "the text in half of its state only",
        }
        return little.get(self.direction, "")

    def shape_text(self) -> str:
        """Return its sizes in words."""
        return f"{self.layers} layers, width {self.width}"

    def checked(self, reader: "ConfigReader") -> Self:
        """Return the config with the layers that a file lists; raise if its numbers do not fit together."""
        if self.positions < 1:
            what = "max_position_embeddings leaves no position"
            raise UserError(what, where=reader.where, remedy="correct it")
        return self

    def own_settings(self) -> tuple[str, ...]:
        """Return the settings, by their names in a recipe, that published classes lack.

        With any, config.json names our own type, and other tools do not open the folder.
        """
        return ()

    def own_keys(self) -> dict[str, Any]:
        """Return the keys of config.json for layers that differ, which published types lack."""
        return {}

    def subset(self, layers: Sequence[int], *, where: str = "distill.layers") -> Self:  # noqa: ARG002 - others do
        """Return the config of a network with only these layers; `where` names the option for them."""
        return need(None, "layers that can be left out")

    @classmethod
    def of_recipe(cls, values: Mapping[str, Any]) -> Self:
        """Return the config for the values of a recipe's model section."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def in_recipe(self) -> dict[str, Any]:
        """Return its values as a recipe's model section has them."""
        narrow = self.embedding_width != self.width
        return {
            **vars(self),
            "type": self.model_type,
            "embedding_width": self.embedding_width if narrow else "width",
        }


OWN_TYPE = "bertsmith"
"""The model_type of networks that no published class implements, so that other tools refuse them."""
MAX_SIZE = 2**24
"""Maximum size; published configs do not come near it, so a larger one is a broken or hostile file."""
MAX_LAYERS = 1024
MAX_NUMBER = 1e30


@dataclass(slots=True)
class ConfigReader:
    """The keys of one config.json, and which of them were read."""

    values: Mapping[str, Any]
    where: str
    used: set[str] = field(default_factory=set)

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number within bounds; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, f"is {value!r}", f"a whole number from {least} to {most} is expected")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a non-negative number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
            raise self._wrong(key, f"is {value!r}", "a non-negative number is expected")
        return float(value)

    def rate(self, key: str, default: float) -> float:
        """Return a fraction from 0 to 1, for example a dropout rate."""
        value = self.number(key, default)
        if value > 1:
            raise self._wrong(key, f"is {value!r}", "a rate from 0 to 1 is expected")
        return value

    def word(self, key: str, default: str, *, choices: tuple[str, ...]) -> str:
        """Return one of the given words."""
        value = self._get(key, default)
        if value not in choices:
            raise self._wrong(key, f"is {value!r}", f"supported: {', '.join(choices)}")
        return str(value)

    def activation(self, key: str, default: str) -> str:
        """Return the name of an activation; a bare "gelu" is the erf form."""
        return self.word(key, default, choices=tuple(ACTIVATIONS))

    def direction(self) -> Direction:
        """Return the side that the model sees; `is_decoder` is transformers' key for left to right."""
        if self.switch("is_decoder", False):
            return "left-to-right"
        # transformers does not have models that read from right to left, so this key is ours.
        backwards = self.word("attention_direction", "both", choices=("both", "right-to-left"))
        return "right-to-left" if backwards == "right-to-left" else "both"

    def switch(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, f"is {value!r}", "true or false is expected")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty if the file lacks it."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, f"is {value!r}", "an object is expected")
        return value or {}

    @property
    def model_type(self) -> str:
        """Return the published type: the file's, or the one that our own type is based on."""
        named = self.values.get("model_type")
        self.used.add("base_model_type")
        # A ModernBERT with settings of our own does not name its base.
        return str(self.values.get("base_model_type", "modernbert") if named == OWN_TYPE else named)

    def sizes(self, key: str, *, count: int, most: int) -> tuple[int, ...]:
        """Return `count` whole numbers from 1 to `most`, or () if the key is missing."""
        value = self._get(key, None)
        if value is None:
            return ()
        whole = isinstance(value, list) and all(type(each) is int and 1 <= each <= most for each in value)
        if not whole or len(value) != count:
            raise self._wrong(key, f"is {value!r}", f"{count} whole numbers from 1 to {most} are expected")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of words; empty if the file lacks it."""
        value = self._get(key, None)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
        ):
            raise self._wrong(key, f"is {value!r}", "a list of words is expected")
        return tuple(value or ())

    def rest(self) -> dict[str, Any]:
        """Return the keys that were not read: labels, notes of other tools."""
        return {key: value for key, value in self.values.items() if key not in self.used}

    def require(self, key: str, default: Any, wanted: Any) -> None:
        """Raise at a setting that would make another model than the one we build."""
        value = self._get(key, default)
        if value != wanted:
            raise self._wrong(key, f"is {value!r}", f"only {wanted!r} is supported")

    def _get(self, key: str, default: Any) -> Any:
        """Return the value, or the default if it is missing or null, as in published files."""
        self.used.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, what: str, remedy: str) -> UserError:
        what = "is missing" if self.values.get(key) is None else what
        return UserError(f"{key} {what}", where=self.where, remedy=remedy)


def direction_keys(config: EncoderConfig) -> dict[str, Any]:
    """Return the keys of config.json for a model that sees one side only; {} for one that sees both."""
    if config.direction == "left-to-right":
        return {"is_decoder": True}
    return {"attention_direction": config.direction} if config.direction == "right-to-left" else {}


def need(part: Part | None, what: str) -> Part:
    """Return a part that not every kind of encoder has; raise a UserError if it is missing."""
    if not part:
        remedy = "use a Transformer, for example a BERT"
        raise UserError(f"this kind of model has no {what}", remedy=remedy)
    return part
