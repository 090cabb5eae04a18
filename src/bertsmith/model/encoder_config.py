"""The numbers of an encoder as frozen data, and the reader of the config.json they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bertsmith.core.errors import UserError
from bertsmith.model.activations import ACTIVATIONS

Direction = Literal["both", "left-to-right", "right-to-left"]
"""Which tokens of its sequence a token sees besides itself: all, those before it, or those behind it."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes, activation and rates of an encoder; the defaults are those of BERT (Devlin et al. 2018)."""

    model_type: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    """Width inside the feed-forward layer; of the widest one where they differ."""
    embedding_width: int
    """ALBERT and ELECTRA keep narrow embeddings and widen them; elsewhere equal to `width`."""
    positions: int
    """The longest text the model takes, in tokens."""
    segments: int = 2
    task_types: int = 0
    """ERNIE's task embeddings; 0 where there are none."""
    activation: str = "gelu"
    norm_eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    head_dropout: float = 0.1
    """Before the output layer of a task head."""
    initial_std: float = 0.02
    pad_id: int = 0
    tied: bool = True
    """Whether the word embeddings are also the decoder of masked words; else that has weights of its own."""
    direction: Direction = "both"
    """One side only where the model was trained to predict the next or the previous token."""
    layer_heads: tuple[int, ...] = ()
    """How many heads each block has left where some were pruned; empty where each has `heads`."""
    layer_inner: tuple[int, ...] = ()
    """The width inside of each block's feed-forward where they differ; empty where each has `inner`."""

    @property
    def head_width(self) -> int:
        """The width of a head: pruning takes heads away, and leaves the others as they are."""
        return self.width // self.heads

    @property
    def blocks(self) -> int:
        """How many blocks there are; fewer than layers where these share them (ALBERT)."""
        return self.layers

    def order(self) -> Sequence[int]:
        """Which block each layer runs."""
        return range(self.layers)

    def heads_in(self, block: int) -> int:
        """How many heads a block has."""
        return self.layer_heads[block] if self.layer_heads else self.heads

    def inner_in(self, block: int) -> int:
        """The width inside of a block's feed-forward."""
        return self.layer_inner[block] if self.layer_inner else self.inner

    def expanded_in(self, block: int) -> int:
        """How many values the first product of a block's feed-forward gives each token."""
        return self.inner_in(block)

    def seen_tokens(self, length: float, layer: int) -> float:  # noqa: ARG002 - layers differ elsewhere
        """How many tokens a token of a sequence sees in a layer."""
        return length


OWN_TYPE = "bertsmith"
"""The model_type in config.json where no published class has the network: other tools do not open it."""
MAX_SIZE = 2**24
"""No size in any published config comes near it; a larger one is a broken or hostile file."""
MAX_LAYERS = 1024
MAX_NUMBER = 1e30


@dataclass(slots=True)
class ConfigReader:
    """The keys of one config.json, and which of them were read."""

    values: Mapping[str, Any]
    where: str
    used: set[str] = field(default_factory=set)

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number within bounds; without a default the key must be there."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, f"is {value!r}", f"a whole number from {least} to {most} is expected")
        return value

    def number(self, key: str, default: float) -> float:
        """A non-negative number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
            raise self._wrong(key, f"is {value!r}", "a non-negative number is expected")
        return float(value)

    def rate(self, key: str, default: float) -> float:
        """A fraction such as a dropout rate, from 0 to 1."""
        value = self.number(key, default)
        if value > 1:
            raise self._wrong(key, f"is {value!r}", "a rate from 0 to 1 is expected")
        return value

    def word(self, key: str, default: str, *, choices: tuple[str, ...]) -> str:
        """One of the given words."""
        value = self._get(key, default)
        if value not in choices:
            raise self._wrong(key, f"is {value!r}", f"known: {', '.join(choices)}")
        return str(value)

    def activation(self, key: str, default: str) -> str:
        """The name of an activation; a bare "gelu" is the erf form."""
        return self.word(key, default, choices=tuple(ACTIVATIONS))

    def direction(self) -> Direction:
        """Which side the model sees: `is_decoder` is what transformers calls left to right."""
        if self.switch("is_decoder", False):
            return "left-to-right"
        # transformers knows no model that reads from right to left, so this key is ours.
        backwards = self.word("attention_direction", "both", choices=("both", "right-to-left"))
        return "right-to-left" if backwards == "right-to-left" else "both"

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, f"is {value!r}", "true or false is expected")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """An object, empty where the file has none."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, f"is {value!r}", "an object is expected")
        return value or {}

    @property
    def model_type(self) -> str:
        """The published type: that of the file, or the one that a type of our own comes from."""
        named = self.values.get("model_type")
        self.used.add("base_model_type")
        # A ModernBERT with settings of our own does not name its base.
        return str(self.values.get("base_model_type", "modernbert") if named == OWN_TYPE else named)

    def sizes(self, key: str, *, count: int, most: int) -> tuple[int, ...]:
        """So many whole numbers from 1 on, or none at all."""
        value = self._get(key, None)
        if value is None:
            return ()
        whole = isinstance(value, list) and all(type(each) is int and 1 <= each <= most for each in value)
        if not whole or len(value) != count:
            raise self._wrong(key, f"is {value!r}", f"{count} whole numbers from 1 to {most} are expected")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of words, empty where the file has none."""
        value = self._get(key, None)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
        ):
            raise self._wrong(key, f"is {value!r}", "a list of words is expected")
        return tuple(value or ())

    def rest(self) -> dict[str, Any]:
        """The keys nobody read: labels, notes of other tools."""
        return {key: value for key, value in self.values.items() if key not in self.used}

    def require(self, key: str, default: Any, wanted: Any) -> None:
        """Stop at a setting that would make another model than the one we build."""
        value = self._get(key, default)
        if value != wanted:
            raise self._wrong(key, f"is {value!r}", f"only {wanted!r} is supported")

    def _get(self, key: str, default: Any) -> Any:
        """The value, or the default where there is none; null is none, as in published files."""
        self.used.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, what: str, remedy: str) -> UserError:
        what = "is missing" if self.values.get(key) is None else what
        return UserError(f"{key} {what}", where=self.where, remedy=remedy)


def direction_keys(config: EncoderConfig) -> dict[str, Any]:
    """What config.json says of a model that sees one side only; nothing of one that sees both."""
    if config.direction == "left-to-right":
        return {"is_decoder": True}
    return {"attention_direction": config.direction} if config.direction == "right-to-left" else {}


def with_layer_shapes(config: EncoderConfig, reader: ConfigReader) -> EncoderConfig:
    """The config with the heads and widths of each layer, where a file that was pruned lists them."""
    heads = reader.sizes("heads_per_layer", count=config.blocks, most=config.heads)
    inner = reader.sizes("intermediate_sizes", count=config.blocks, most=config.inner)
    return replace(config, layer_heads=heads, layer_inner=inner)


def layer_shape_keys(config: EncoderConfig) -> dict[str, Any]:
    """What config.json says where layers differ, which no published type can say; or nothing."""
    keys = {"heads_per_layer": list(config.layer_heads), "intermediate_sizes": list(config.layer_inner)}
    said = {key: sizes for key, sizes in keys.items() if sizes}
    return {"model_type": OWN_TYPE, "base_model_type": config.model_type, **said} if said else {}


def layer_shape_settings(config: EncoderConfig) -> tuple[str, ...]:
    """In words, what of the layers' shapes no published class has."""
    differs = {"pruned heads": config.layer_heads, "feed-forward widths by layer": config.layer_inner}
    return tuple(name for name, sizes in differs.items() if sizes)
