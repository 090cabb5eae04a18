"""The base class of encoders: packed tokens in, packed hidden states out; and its parts by their purpose.

Shapes: T packed tokens, R of them that are requested, P predicted ones, D model width, S sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.model.attention.watched import AttentionHeads
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.encoder_config import Direction, EncoderConfig, need
from bertsmith.packed import ALL, Layout, PackedBatch, Rows

Stream = Callable[[PackedBatch], Tensor]
"""Reads a text's next tokens with their positions, keeps data for later ones, returns their states."""
Sentence = Literal["first", "last", "mean", "ends"]
"""Kind of state that represents a sequence; SENTENCE_STATES has a function for each."""


class Depth(NamedTuple):
    """Parts of an encoder that learn at one rate."""

    layer: nn.Module
    """The part that FSDP shards and that is compiled by itself."""
    also: tuple[nn.Module, ...] = ()


class Stack(NamedTuple):
    """Number of matrices of equal height in one parameter."""

    computed: int = 1
    """Number of matrices as they are multiplied: Muon takes a step for each."""
    published: int = 1
    """Number of matrices in model files: LAMB compares the length of each."""


class NamedLinear(NamedTuple):
    """A linear layer that may be replaced: with adapters, or with weights of few bits."""

    name: str
    """Its name in the encoder."""
    linear: nn.Linear
    targets: tuple[str, ...]
    """The recipe's words (lora.targets) for the matrices stacked in it."""
    activation: str = ""
    """Activation that computes its inputs, if they are nothing else."""


class WordView(NamedTuple):
    """A state that a word is predicted from."""

    offset: int = 0
    """Rows from the word to that state."""
    columns: tuple[int, int] | None = None
    """First and last of its numbers, the last exclusive; all if None."""

    def rows(self, rows_P: Tensor) -> Tensor:
        """Return the rows that predict the words at these rows [P]."""
        # Filler points at row 0, so the row before it may not exist.
        return (rows_P + self.offset).clamp(min=0) if self.offset else rows_P

    def of(self, hidden_PD: Tensor) -> Tensor:
        """Return what is read of the states at these rows."""
        return hidden_PD if self.columns is None else hidden_PD[:, slice(*self.columns)]


BESIDE: dict[Direction, int] = {"both": 0, "left-to-right": -1, "right-to-left": 1}
"""Rows from a word to the row that sees all of its side, but not the word."""


class Encoder(nn.Module, ABC):
    """A network that gives each packed token a state; every kind of encoder is one."""

    compilable: ClassVar[bool] = True
    """True if torch.compile can trace it as one graph."""

    def __init__(self, sentence: Sentence = "first") -> None:
        super().__init__()
        self.sentence = sentence
        self.direction: Direction = "both"
        self.recompute = False
        """Gradient checkpointing: keep each layer's input and recompute the rest in the backward pass."""

    @property
    @abstractmethod
    def words(self) -> nn.Embedding:
        """Return the word embeddings; a tied head of words has them as its decoder."""

    @abstractmethod
    def put_words(self, table: nn.Embedding) -> None:
        """Replace the word embeddings."""

    def share_tables(self, other: "Encoder") -> None:
        """Use the tables of another encoder of the same kind."""
        self.put_words(other.words)

    @property
    @abstractmethod
    def layers(self) -> int:
        """Return the number of layers that a batch passes; layers may share weights."""

    @property
    def shares_layers(self) -> bool:
        """True if layers share weights."""
        return False

    @abstractmethod
    def forward(self, batch: PackedBatch, *, rows: Rows = ALL) -> Tensor:
        """Return the last states of the requested rows [R, D]; others need not be computed."""

    @abstractmethod
    def hidden_states(self, batch: PackedBatch) -> list[Tensor]:
        """Return the states [T, D] before the first layer and after each; `forward` returns the last."""

    def after(self, states_TD: Tensor) -> Tensor:
        """Return the states that a head would read if the encoder ended with these."""
        return states_TD

    @abstractmethod
    def depths(self) -> list[Depth]:
        """Return all parts, the last layer first and the tables last; each weight is in one of them."""

    @abstractmethod
    def matrices(self) -> dict[nn.Parameter, Stack]:
        """Return the matrices of its layers, without tables."""

    def linears(self) -> list[NamedLinear]:
        """Return the linear layers that may be replaced, as they run; a shared one comes again."""
        return []

    def put_linears(self, layers: Iterable[nn.Linear]) -> None:
        """Replace the layers of `linears`, in their order."""
        for each, layer in zip(self.linears(), list(layers), strict=True):
            self.set_submodule(each.name, layer)

    def keep_layers(self, kept: Sequence[int], config: EncoderConfig) -> None:  # noqa: ARG002 - others do
        """Drop all other layers, as in this config; a layer that is named twice becomes two."""
        need(None, "layers that can be left out")

    # ---- what not every kind has: None where it is missing (`encoder_config.need` refuses that)

    @property
    def heads(self) -> AttentionHeads | None:
        """The attention heads."""
        return None

    @property
    def input(self) -> Embeddings | None:
        """Return the vectors that are added up for each token; None if these are only word vectors."""
        return None

    def recordable(self, device: torch.device) -> bool:  # noqa: ARG002 - it depends on it elsewhere
        """True if training steps in half precision can be recorded as CUDA graphs."""
        return False

    def look(self, direction: Direction) -> None:
        """Let each token see both sides or one only, in training and afterwards."""
        if direction != self.direction:
            what = f"this encoder reads {self.direction}, and cannot be made to read {direction}"
            raise UserError(what, key="examples.objective", remedy="choose another objective or model")

    def word_views(self) -> tuple[WordView, ...]:
        """Return the states that a word is predicted from; `Network.word_scores` combines several."""
        return (WordView(BESIDE[self.direction]),)

    def predicting_rows(self, rows_P: Tensor) -> Tensor:
        """Return the rows that predict the words at these rows [R]: each view's, one after another."""
        rows = [view.rows(rows_P) for view in self.word_views()]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def by_view(self, hidden_RD: Tensor) -> list[Tensor]:
        """Return each view's part [P] of the states at `predicting_rows`."""
        views = self.word_views()
        parts = zip(hidden_RD.chunk(len(views)), views, strict=True)
        return [view.of(hidden_PD) for hidden_PD, view in parts]

    def stream(self) -> Stream | None:
        """Return a reader for a text that grows; None if a new token changes the states before it."""
        return None

    def sentence_rows(self, layout: Layout) -> Rows:
        """Return the rows that `sentence_states` reads."""
        rows = {"first": first_rows, "last": last_rows}.get(self.sentence)
        return ALL if rows is None else rows(layout)

    def sentence_states(self, hidden_TD: Tensor, layout: Layout) -> Tensor:
        """Return each sequence's state [S, D]: its first row ([CLS]), its last, halves of both, or the mean.

        A causal encoder must use "last": its first row sees no text, and a head on it would be a constant.
        """
        return SENTENCE_STATES[self.sentence](hidden_TD, layout)

    def sentences(self, batch: PackedBatch) -> Tensor:
        """Return the state of each sequence of a batch [S, D], and compute no others."""
        rows = self.sentence_rows(batch.layout)
        hidden_RD: Tensor = self(batch, rows=rows)
        # A compiled graph makes a new slice of all rows: never `is ALL`.
        return self.sentence_states(hidden_RD, batch.layout) if isinstance(rows, slice) else hidden_RD

    def with_sentences(self, batch: PackedBatch, rows_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of these rows [P, D] and of each sequence [S, D], from one pass."""
        rows_S = self.sentence_rows(batch.layout)
        if isinstance(rows_S, slice):  # the mean of all rows (as in some ModernBERTs)
            hidden_TD = self(batch)
            return hidden_TD[rows_P], self.sentence_states(hidden_TD, batch.layout)
        hidden_RD = self(batch, rows=torch.cat((rows_P, rows_S)))
        return hidden_RD[: len(rows_P)], hidden_RD[len(rows_P) :]


def encoders_in(module: nn.Module) -> list[Encoder]:
    """Return every encoder in a module."""
    return [part for part in module.modules() if isinstance(part, Encoder)]


def layers_in(module: nn.Module) -> list[nn.Module]:
    """Return the layers of every encoder in a module, each once, the first one first."""
    return [depth.layer for encoder in encoders_in(module) for depth in encoder.depths()[-2::-1]]


def can_compile(module: nn.Module) -> bool:
    """True if every encoder in a module can be compiled as one graph."""
    return all(encoder.compilable for encoder in encoders_in(module))


def first_rows(layout: Layout) -> Tensor:
    """Return the row at which each sequence begins [S]."""
    # An empty sequence that only pads the layout points past the last row: any row will do, unread.
    return torch.minimum(layout.starts_S1[:-1], layout.starts_S1[-1] - 1)


def last_rows(layout: Layout) -> Tensor:
    """Return the row at which each sequence ends [S]."""
    return (layout.starts_S1[1:] - 1).clamp(min=0)


def first_of_rows(values_TD: Tensor, layout: Layout) -> Tensor:
    """Return the first row of each sequence [S, D]."""
    return values_TD[first_rows(layout)]


def last_of_rows(values_TD: Tensor, layout: Layout) -> Tensor:
    """Return the last row of each sequence [S, D]."""
    return values_TD[last_rows(layout)]


def mean_of_rows(values_TD: Tensor, layout: Layout) -> Tensor:
    """Return the mean of each sequence's rows [S, D], summed in fp32 or better; 0 for an empty one."""
    exact_TD = values_TD if values_TD.dtype == torch.float64 else values_TD.float()
    # segment_reduce sums in a fixed order; index_add would not on CUDA.
    sums_SD = torch.segment_reduce(
        exact_TD, "sum", offsets=layout.starts_S1.long(), axis=0, initial=0.0, unsafe=True
    )
    lengths_S = (layout.starts_S1[1:] - layout.starts_S1[:-1]).clamp(min=1)
    return (sums_SD / lengths_S[:, None]).to(values_TD.dtype)


def root_mean_of_rows(values_TD: Tensor, layout: Layout) -> Tensor:
    """Return the sum of each sequence's rows over the square root of their number [S, D]."""
    lengths_S = layout.starts_S1[1:] - layout.starts_S1[:-1]
    return mean_of_rows(values_TD, layout) * lengths_S[:, None].sqrt()


def largest_of_rows(values_TD: Tensor, layout: Layout) -> Tensor:
    """Return the element-wise largest of each sequence's rows [S, D]."""
    return torch.segment_reduce(values_TD, "max", offsets=layout.starts_S1.long(), axis=0, unsafe=True)


def ends_of_rows(values_TD: Tensor, layout: Layout) -> Tensor:
    """Return the first half of each sequence's last row, and the second half of its first row [S, D]."""
    forwards_TE, backwards_TE = values_TD.chunk(2, -1)
    return torch.cat((forwards_TE[last_rows(layout)], backwards_TE[first_rows(layout)]), -1)


SENTENCE_STATES = {
    "first": first_of_rows,
    "last": last_of_rows,
    "mean": mean_of_rows,
    "ends": ends_of_rows,
}
