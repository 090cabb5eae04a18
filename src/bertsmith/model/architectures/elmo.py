"""ELMo (Peters et al. 2018): two stacks of LSTMs, one for each direction, over word pieces.

Sizes, dropout and initial weights are from the published code (allenai/bilm-tf: bin/train_elmo.py and
bilm/training.py). Three things deviate from it. Tokens are word pieces with a vector each, not convolutions
over characters. The softmax has these vectors, too, and scores all pieces, not a sample of them. Cells and
projections are not clipped at 3, which torch's LSTM cannot do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import (
    Architecture,
    HeadSpec,
    InitialRule,
    Names,
    Pretraining,
    always,
    fill_vector,
    pair_of,
)
from bertsmith.model.encoder_config import (
    FP32,
    MAX_LAYERS,
    ConfigReader,
    Direction,
    EncoderConfig,
    PassSize,
    StepForm,
)

if TYPE_CHECKING:
    from torch import Tensor

    from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Reads
    from bertsmith.model.recurrent.recurrent_encoder import RecurrentEncoder

DIRECTIONS, GATES = 2, 4
PARTS = {
    "weight_ih_l0": "input_weight",
    "weight_hh_l0": "state_weight",
    "bias_ih_l0": "input_bias",
    "bias_hh_l0": "state_bias",
    "weight_hr_l0": "projection_weight",
}
"""Maps torch's names for the parts of an LSTM to the names in our files."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(EncoderConfig):
    """Sizes of LSTMs in two directions; the defaults are ELMo's."""

    views: ClassVar[int] = DIRECTIONS
    direction: Direction = "two-directions"
    cell: int = 4096
    """Width of a direction's cells, which are projected to half of `width` if they are wider than that."""

    @property
    def half(self) -> int:
        """The width of one direction, and of the word vectors."""
        return self.width // DIRECTIONS

    @property
    def projected(self) -> bool:
        """True if the cells are projected."""
        return self.cell > self.half

    def shape_text(self) -> str:
        return f"{super().shape_text()}, two directions of {self.cell:,} cells"

    def own_settings(self) -> tuple[str, ...]:
        """Name the settings that the published ELMo lacks; classes of transformers have none of them."""
        return ("word pieces",)

    @classmethod
    def of_recipe(cls, values: Mapping[str, Any]) -> Self:
        """Return the config for a recipe's model section; word vectors have half of the width."""
        whole = values["embedding_width"] == values["width"]
        narrow = values["width"] // DIRECTIONS if whole else values["embedding_width"]
        return super().of_recipe({**values, "embedding_width": narrow})

    def in_recipe(self) -> dict[str, Any]:
        """Return its values as a recipe's model section has them."""
        return super().in_recipe() | {"embedding_width": "width"}

    # ---- costs

    def operations(self, size: PassSize) -> float:
        inputs = GATES * self.cell * (self.half + self.half)
        outputs = self.cell * self.half if self.projected else 0
        return 2.0 * size.tokens * self.layers * DIRECTIONS * (inputs + outputs)

    def word_products(self) -> int:
        return DIRECTIONS * self.vocabulary * self.half

    def kept_bytes(self, form: StepForm) -> int:
        if form.recompute:  # that keeps their inputs alone
            return self.layers * self.width * FP32
        return self.layers * self.layer_bytes(form)

    def layer_bytes(self, form: StepForm) -> int:
        # For each direction: four gates, cells and mixed states, inputs and outputs; a CPU keeps fp32.
        value = FP32 if form.device == "cpu" else form.value
        of_cells = (GATES + 2) * self.cell * value
        inputs = 2 * self.half * value + self.half * form.dropout_mark
        return DIRECTIONS * (of_cells + inputs)

    def working_bytes(self, form: StepForm) -> int:
        gradients = DIRECTIONS * (GATES * self.cell + 2 * self.half) * form.value
        return gradients + (self.layer_bytes(form) if form.recompute else 0)


# ---- config.json


def read_config(reader: ConfigReader) -> RecurrentConfig:
    """Read the config in a config.json with our own keys."""
    width, cell = reader.size("hidden_size", 1024), reader.size("cell_size", 4096)
    if width % DIRECTIONS:
        what = f"a width of {width} cannot be halved for two directions"
        raise UserError(what, where=reader.where, remedy="make the width even")
    if cell < width // DIRECTIONS:
        what = f"cells of {cell} are narrower than half of the width, {width // DIRECTIONS}"
        raise UserError(what, where=reader.where, remedy="make the cells wider, or the width smaller")
    dropout = reader.rate("dropout", 0.1)
    return RecurrentConfig(
        model_type="elmo",
        vocabulary=reader.size("vocab_size"),
        width=width,
        layers=reader.size("num_hidden_layers", 2, most=MAX_LAYERS),
        cell=cell,
        embedding_width=width // DIRECTIONS,
        positions=reader.size("max_position_embeddings", 512),
        dropout=dropout,
        head_dropout=reader.rate("classifier_dropout", dropout),
        initial_std=reader.number("initializer_range", 0.02),
        pad_id=reader.size("pad_token_id", 0, least=0),
        direction="two-directions",
    )


def write_config(config: RecurrentConfig) -> dict[str, Any]:
    """Return the config.json of a config."""
    return {
        "model_type": "elmo",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "cell_size": config.cell,
        "max_position_embeddings": config.positions,
        "dropout": config.dropout,
        "classifier_dropout": config.head_dropout,
        "initializer_range": config.initial_std,
        "pad_token_id": config.pad_id,
    }


def count_parameters(config: RecurrentConfig) -> int:
    """Count the weights of the encoder: word vectors, and the gates, biases and projection of each LSTM."""
    gates = GATES * config.cell * (config.half + config.half + 2)
    projection = config.cell * config.half if config.projected else 0
    return config.vocabulary * config.half + config.layers * DIRECTIONS * (gates + projection)


# ---- the parts


def build_encoder(config: RecurrentConfig) -> "RecurrentEncoder":
    """Build word vectors and LSTMs in two directions."""
    from torch import nn

    from bertsmith.model.recurrent.recurrent_encoder import RecurrentEncoder

    words = nn.Embedding(config.vocabulary, config.half)
    return RecurrentEncoder(words, config.layers, config.cell, dropout=config.dropout)


def encoder_names(config: RecurrentConfig) -> Names:
    """Return the names of encoder weights in our files."""
    names: Names = {"table.weight": ("words.weight",)}
    for layer in range(config.layers):
        for ours, theirs in (("forwards", "forward"), ("backwards", "backward")):
            for part, name in PARTS.items():
                if part != "weight_hr_l0" or config.projected:
                    names[f"stack.{layer}.{ours}.{part}"] = (f"layers.{layer}.{theirs}.{name}",)
    return names


def initial(config: RecurrentConfig) -> InitialRule:
    """Return Glorot's deviations for LSTMs, 1 / sqrt(width) for words, and 1 for biases of forget gates."""
    gates = math.sqrt(2 / (2 * config.half + GATES * config.cell))
    stds = {
        "weight_ih_l0": gates,
        "weight_hh_l0": gates,
        "weight_hr_l0": math.sqrt(2 / (config.cell + config.half)),
    }

    def std(name: str) -> float:
        if name.endswith("table.weight"):
            return 1 / math.sqrt(config.half)
        return stds.get(name.rpartition(".")[2], config.initial_std)

    return InitialRule(std, cut=math.inf, vector=fill_bias)


def fill_bias(name: str, vector: "Tensor") -> None:
    """Set a bias to 0, but one of the two of a forget gate to 1 (TensorFlow's LSTMCell)."""
    if not name.endswith(("bias_ih_l0", "bias_hh_l0")):
        return fill_vector(name, vector)
    vector.zero_()
    if name.endswith("bias_ih_l0"):  # torch's order: input, forget, cell, output
        vector.chunk(GATES)[1].fill_(1.0)
    return None


# ---- heads


def _words_head(config: RecurrentConfig, _: int) -> "MaskedLanguageHead":
    from torch import nn

    from bertsmith.model.heads import MaskedLanguageHead

    # As published, half of a state is multiplied directly with the words.
    return MaskedLanguageHead(nn.Dropout(config.dropout), config.vocabulary)


def _linear_head(reads: "Reads", name: str, *, outputs: int = 0) -> HeadSpec[RecurrentConfig]:
    def build(config: RecurrentConfig, wanted: int) -> "OutputHead":
        from torch import nn

        from bertsmith.model.heads import OutputHead

        layer = nn.Linear(config.width, outputs or wanted)
        return OutputHead(layer, reads=reads, dropout=config.head_dropout)

    return HeadSpec(build, always(pair_of("output", name)), labelled=not outputs)


ELMO = Architecture(
    model_type="elmo",
    read_config=read_config,
    write_config=write_config,
    build_encoder=build_encoder,
    encoder_names=encoder_names,
    words_key="table.weight",
    directions=("two-directions",),
    prefix="elmo.",
    heads={
        "mlm": HeadSpec(_words_head, always({"bias": ("decoder.bias",)})),
        "classify": _linear_head("sentence", "classifier"),
        "tag": _linear_head("tokens", "tagger"),
        "span": _linear_head("tokens", "span_outputs", outputs=2),
        "choice": _linear_head("sentence", "chooser", outputs=1),
    },
    # Libraries do not have these classes: the names identify the heads in a folder of ours.
    classes={
        "ElmoForLanguageModelling": ("mlm",),
        "ElmoForSequenceClassification": ("classify",),
        "ElmoForTokenClassification": ("tag",),
        "ElmoForQuestionAnswering": ("span",),
        "ElmoForMultipleChoice": ("choice",),
        "ElmoModel": (),
    },
    initial=initial,
    tied={"decoder.weight": "elmo.words.weight"},
    # Its softmax had 793,471 words; for word pieces, BERT's number is assumed.
    pretraining=Pretraining(30_522, count_parameters, RecurrentConfig, min_segments=0),
)
