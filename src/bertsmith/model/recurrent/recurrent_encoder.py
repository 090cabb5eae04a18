"""Recurrent encoders: LSTMs over packed rows in two separate directions (ELMo; Peters et al. 2018).

Shapes: T packed tokens, R of them that are requested, E width of a direction, D = 2E width of a state.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.model.encoder import Depth, Encoder, Stack, WordView
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.recurrent.packed_lstm import ReadingOrder, lstm_states
from bertsmith.packed import ALL, PackedBatch, Rows

GATES = 4


class RecurrentLayer(nn.Module):
    """One LSTM in each direction; the halves of its states and of its inputs are the directions."""

    def __init__(self, width: int, cell: int, *, dropout: float, residual: bool) -> None:
        super().__init__()
        # As in the published code, outputs as wide as the cell are not projected.
        projected = width if width < cell else 0
        self.forwards = nn.LSTM(width, cell, proj_size=projected)
        self.backwards = nn.LSTM(width, cell, proj_size=projected)
        self.dropout, self.residual = Dropout(dropout), residual

    def forward(self, states_TD: Tensor, forwards: ReadingOrder, backwards: ReadingOrder) -> Tensor:
        shown_TD = self.dropout(states_TD)
        left_TE, right_TE = shown_TD.chunk(2, -1)
        read_TE = forwards.states(left_TE, partial(lstm_states, self.forwards))
        back_TE = backwards.states(right_TE, partial(lstm_states, self.backwards))
        read_TD = torch.cat((read_TE, back_TE), -1)
        return read_TD + shown_TD if self.residual else read_TD


class RecurrentEncoder(Encoder):
    """Word vectors and layers of LSTMs in two directions; no state sees both sides of its token.

    The first half of a state has read its sequence from the left up to its token, the second half from the
    right. As published, layers except the first add their inputs, and all states have the same width.
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
        """Return the word vectors twice, side by side, and the states after each layer [T, D]."""
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
        """Return the state before a word, which sees all on its left, and the one after it, for its right."""
        width = self.words.embedding_dim
        return WordView(-1, (0, width)), WordView(1, (width, 2 * width))

    # ---- its parts

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
        """Return the matrices of its layers; one of them contains the matrices of the four gates."""
        parameters = (each for each in self.stack.named_parameters() if each[1].dim() == 2)
        return {each: Stack() if "weight_hr" in name else Stack(GATES, 1) for name, each in parameters}
