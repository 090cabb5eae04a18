"""Recurrent encoders: LSTMs over packed rows, whose two directions never meet (ELMo; Peters et al. 2018).

Shapes: T packed tokens, S sequences, S1 = S + 1 boundaries, N steps of the longest sequence, E width of a
direction, D = 2E width of a state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from bertsmith.model.elementwise import Dropout
from bertsmith.model.encoder import ALL, Depth, Encoder, Rows, Stack, WordView
from bertsmith.packed import Layout, PackedBatch

GATES = 4


@dataclass(frozen=True, slots=True)
class ReadingOrder:
    """The order in which an LSTM reads packed rows: the first ones of all sequences, then the second ones.

    Sequences never meet: a step computes one row of each that is long enough, the longest sequence first.
    """

    rows_T: Tensor
    """Packed row that is read at each place."""
    places_T: Tensor
    """Place at which each packed row is read: the inverse of `rows_T`."""
    sizes_N: Tensor
    """Number of rows in each step, on the CPU, where torch reads it."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device, *, backwards: bool = False) -> "ReadingOrder":
        """Return the order for this layout; a GPU waits for it once."""
        starts_S1 = layout.starts_S1.cpu().long()
        lengths_S = starts_S1.diff()
        # Ranks by length keep the order the same within each group of equal length.
        ranks_S = lengths_S.argsort(descending=True, stable=True).argsort()
        steps_T = torch.arange(int(starts_S1[-1])) - starts_S1[:-1].repeat_interleave(lengths_S)
        if backwards:
            steps_T = (lengths_S - 1).repeat_interleave(lengths_S) - steps_T
        keys_T = steps_T * len(lengths_S) + ranks_S.repeat_interleave(lengths_S)
        rows_T = keys_T.argsort().to(device)
        return cls(rows_T, rows_T.argsort(), steps_T.bincount())

    def read(self, lstm: nn.LSTM, values_TE: Tensor) -> Tensor:
        """Return the LSTM's state at each packed row."""
        states: Tensor = lstm(PackedSequence(values_TE[self.rows_T], self.sizes_N))[0].data
        return states[self.places_T]


class RecurrentLayer(nn.Module):
    """One LSTM in each direction; the halves of its states and of its inputs are the directions."""

    def __init__(self, width: int, cell: int, *, dropout: float, residual: bool) -> None:
        super().__init__()
        # As in the published code, what is as wide as the cell is not projected.
        projected = width if width < cell else 0
        self.forwards = nn.LSTM(width, cell, proj_size=projected)
        self.backwards = nn.LSTM(width, cell, proj_size=projected)
        self.dropout, self.residual = Dropout(dropout), residual

    def forward(self, states_TD: Tensor, forwards: ReadingOrder, backwards: ReadingOrder) -> Tensor:
        shown_TD = self.dropout(states_TD)
        left_TE, right_TE = shown_TD.chunk(2, -1)
        read_TD = torch.cat(
            (forwards.read(self.forwards, left_TE), backwards.read(self.backwards, right_TE)), -1
        )
        return read_TD + shown_TD if self.residual else read_TD


class RecurrentEncoder(Encoder):
    """Word vectors and layers of LSTMs in two directions, of which no state knows both sides of its token.

    The first half of a state has read its sequence from the left up to its token, the second half from the
    right. As published, layers but the first add their inputs, and all states are as wide.
    """

    compilable = False

    def __init__(self, words: nn.Embedding, layers: int, cell: int, *, dropout: float) -> None:
        super().__init__("ends")
        self.direction = "two-directions"
        self.table = words
        width = words.embedding_dim
        self.stack = nn.ModuleList(
            RecurrentLayer(width, cell, dropout=dropout, residual=number > 0) for number in range(layers)
        )

    def forward(self, batch: PackedBatch, *, rows: Rows = ALL) -> Tensor:
        """Return the last states of the requested rows [R, D]; an LSTM computes all others, too."""
        return self.hidden_states(batch)[-1][rows]

    def hidden_states(self, batch: PackedBatch) -> list[Tensor]:
        """Return the word vectors, twice beside each other, and the states after each layer [T, D]."""
        device = batch.tokens_T.device
        orders = tuple(ReadingOrder.of(batch.layout, device, backwards=each) for each in (False, True))
        vectors_TE = self.table(batch.tokens_T)
        states = [torch.cat((vectors_TE, vectors_TE), -1)]
        for layer in self.stack:
            if self.recompute and self.training:
                states.append(checkpoint(layer, states[-1], *orders, use_reentrant=False))
            else:
                states.append(layer(states[-1], *orders))
        return states

    def word_views(self) -> tuple[WordView, ...]:
        """Return the state before a word, which knows all on its left, and the one behind, of its right."""
        width = self.words.embedding_dim
        return WordView(-1, slice(0, width)), WordView(1, slice(width, None))

    # ---- what it is made of

    @property
    def words(self) -> nn.Embedding:
        return self.table

    def put_words(self, table: nn.Embedding) -> None:
        self.table = table

    @property
    def layers(self) -> int:
        return len(self.stack)

    def depths(self) -> list[Depth]:
        return [*map(Depth, reversed(self.stack)), Depth(self.table)]

    def matrices(self) -> dict[nn.Parameter, Stack]:
        """Return the matrices of its layers; one of them holds those of the four gates."""
        parameters = (each for each in self.stack.named_parameters() if each[1].dim() == 2)
        return {each: Stack() if "weight_hr" in name else Stack(GATES, 1) for name, each in parameters}
