"""BiLSTMs over an encoder's states: a frozen one (Devlin et al. 2018, 5.3), or one that learns with them.

Shapes: L states of a token, T packed tokens, S sequences, D input width, W width of one direction; G parts of
sequences (the two texts of each pair), N longest part; C outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bertsmith.features.layer_states import layer_name, layer_numbers
from bertsmith.model.encoder import Encoder, largest_of_rows, mean_of_rows
from bertsmith.model.encoder_config import PassSize
from bertsmith.model.heads import exact_outputs
from bertsmith.model.network import Network
from bertsmith.model.recurrent.packed_lstm import ReadingOrder, lstm_states
from bertsmith.packed import Layout, PackedBatch
from bertsmith.recipe.finetuning_schema import FeaturesSection
from bertsmith.tasks.objective import Scorer

Reads = Literal["sentence", "tokens"]
LAYERS = 2
"""Number of LSTM layers (Devlin et al. 2018, 5.3)."""


class LayerMix(nn.Module):
    """The weighted sum of several layers' states, times one number; weights sum to 1 and start equal.

    Peters et al. 2018, equation 1.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights_L = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Mix one [T, D] per layer into [T, D]."""
        assert len(states) == len(self.weights_L), "one weight for each layer"
        fractions_L = self.weights_L.softmax(0)
        mixed_TD = sum(fraction * state for fraction, state in zip(fractions_L, states, strict=True))
        assert isinstance(mixed_TD, Tensor)
        return self.gamma * mixed_TD


class LayerConcatenation(nn.Module):
    """The states of several layers, concatenated."""

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Concatenate one [T, D] per layer to [T, L * D]."""
        return torch.cat(tuple(states), -1)


class PackedBiLstm(nn.Module):
    """Two layers of bidirectional LSTMs over packed sequences, each computed independently."""

    def __init__(self, width_in: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width_in, width, num_layers=LAYERS, bidirectional=True, dropout=dropout)

    def forward(self, values_TD: Tensor, layout: Layout) -> Tensor:
        """Return both directions' states of each row [T, 2W]."""
        return ReadingOrder.of(layout, values_TD.device).states(values_TD, partial(lstm_states, self.lstm))


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a sequence that is scored."""

    reads: Reads
    """Reading of the task's head (`tasks.kinds.kind`)."""
    separator: int | None = None
    """Token that ends the first text of a pair; None for single texts."""


class BiLstmScorer(Scorer):
    """Scores from an encoder: some of its layers combined, then BiLSTMs, then one linear layer."""

    def __init__(
        self,
        network: Network,
        outputs: int,
        features: FeaturesSection,
        *,
        reading: Reading,
        stream: torch.Generator,
        tunes: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.tunes = network, tunes
        width_in, dropout = network.config.width, network.config.head_dropout
        self.layer_norm = features.layer_norm
        width = width_in if features.width == "model" else features.width
        self.layers = layer_numbers(features.layers, network.encoder.layers)
        network.requires_grad_(False).eval()
        for part in read_parts(network.encoder, max(self.layers)) if tunes else ():
            part.requires_grad_(True)
        self.mix: LayerMix | LayerConcatenation
        if features.combine == "weighted-sum" and len(self.layers) > 1:
            self.mix = LayerMix(len(self.layers))
        else:  # a single layer needs no weight
            self.mix, width_in = LayerConcatenation(), len(self.layers) * width_in
        self.dropout = nn.Dropout(dropout)
        self.reader: TokenReader | TextReader | PairReader
        if reading.reads == "tokens":
            self.reader = TokenReader(width_in, width, dropout=dropout)
        elif reading.separator is None:
            self.reader = TextReader(width_in, width, dropout=dropout)
        else:
            self.reader = PairReader(width_in, width, separator=reading.separator, dropout=dropout)
        self.output = nn.Linear(self.reader.outputs, outputs)
        with torch.no_grad():
            for parameter in (*self.reader.parameters(), *self.output.parameters()):
                if parameter.dim() > 1:  # uniform within 1 / sqrt(inputs of a unit)
                    bound = parameter.shape[1] ** -0.5
                    parameter.uniform_(-bound, bound, generator=stream)
                else:
                    parameter.zero_()
        words = network.encoder.words.weight
        self.to(words)
        self.output.to(exact_outputs(words.dtype))

    def forward(self, inputs: PackedBatch, states: Sequence[Tensor] | None = None) -> Tensor:
        """Return [T, C] for tags and spans, else [S, C]; `states` are the states of its layers, if known."""
        if states is None:
            with nullcontext() if self.tunes else torch.no_grad():
                every = self.network.encoder.hidden_states(inputs)
            states = [every[number] for number in self.layers]
        if self.layer_norm:
            states = [nn.functional.layer_norm(state, state.shape[-1:]) for state in states]
        read = self.dropout(self.reader(self.dropout(self.mix(states)), inputs))
        scores: Tensor = self.output(read if self.training else read.to(self.output.weight.dtype))
        return scores

    def layer_weights(self) -> dict[str, float]:
        """Return the learned weight of each layer in the sum, and the sum's scale; {} without a sum."""
        if not isinstance(self.mix, LayerMix):
            return {}
        weights = self.mix.weights_L.detach().double().softmax(0).tolist()
        return dict(zip(map(layer_name, self.layers), weights, strict=True)) | {
            "scale": self.mix.gamma.item()
        }

    def last_layer(self) -> nn.Linear:
        """Return the linear layer on top of the BiLSTMs."""
        return self.output

    def operations(self, size: PassSize) -> float:
        """Return the operations of the encoder and of the products of the BiLSTMs."""
        weights = sum(each.numel() for each in self.reader.parameters() if each.dim() > 1)
        return super().operations(size) + 2.0 * weights * size.tokens


def read_parts(encoder: Encoder, number: int) -> Iterator[nn.Module]:
    """Yield the parts of an encoder that its states up to this number come from."""
    *layers, tables = encoder.depths()
    if number == 0:
        yield tables.layer  # without the relative positions of layers
        return
    for depth in (*layers[encoder.layers - number if len(layers) == encoder.layers else 0 :], tables):
        yield depth.layer
        yield from depth.also


class TokenReader(nn.Module):
    """Scores every token, from a BiLSTM's states."""

    def __init__(self, width_in: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.bilstm = PackedBiLstm(width_in, width, dropout=dropout)
        self.outputs = 2 * width

    def forward(self, mixed_TD: Tensor, inputs: PackedBatch) -> Tensor:
        states_TD: Tensor = self.bilstm(mixed_TD, inputs.layout)
        return states_TD


class TextReader(nn.Module):
    """Pools a text: the maximum and the mean of a BiLSTM's states."""

    def __init__(self, width_in: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.bilstm = PackedBiLstm(width_in, width, dropout=dropout)
        self.outputs = 4 * width

    def forward(self, mixed_TD: Tensor, inputs: PackedBatch) -> Tensor:
        return _pooled(self.bilstm(mixed_TD, inputs.layout), inputs.layout)


class PairReader(nn.Module):
    """Pools a pair of texts that attend to each other, as in ESIM (Chen et al. 2017).

    Each token is compared with what it attends to in the other text; a second BiLSTM reads the comparisons.
    """

    def __init__(self, width_in: int, width: int, *, separator: int, dropout: float) -> None:
        super().__init__()
        self.separator = separator
        self.bilstm = PackedBiLstm(width_in, width, dropout=dropout)
        self.compare = nn.Linear(4 * 2 * width, width)
        self.second_bilstm = PackedBiLstm(width, width, dropout=dropout)
        self.outputs = 8 * width

    def forward(self, mixed_TD: Tensor, inputs: PackedBatch) -> Tensor:
        parts = _parts_of_pairs(inputs, self.separator)
        states_TD: Tensor = self.bilstm(mixed_TD, parts)
        found_TD = _found_in_partner(states_TD, parts)
        compared = (states_TD, found_TD, states_TD - found_TD, states_TD * found_TD)
        again_TD = self.second_bilstm(self.compare(torch.cat(compared, -1)).relu(), parts)
        return _pooled(again_TD, parts).view(inputs.layout.sequences, -1)


def _parts_of_pairs(inputs: PackedBatch, separator: int) -> Layout:
    """Return a layout with each text of a pair as a sequence; a missing second text is empty.

    The first text ends with the first separator: segments would not do, as RoBERTa's are 0 in both texts.
    """
    starts_S1 = inputs.layout.starts_S1
    before_T1 = nn.functional.pad((inputs.tokens_T == separator).cumsum(0), (1, 0))
    before_S = before_T1[starts_S1[:-1].long()]
    is_first_T = before_T1[:-1] == before_S.repeat_interleave(starts_S1.diff().long())
    ends_of_firsts = torch.segment_reduce(
        is_first_T.float(), "sum", offsets=starts_S1.long(), axis=0, initial=0.0, unsafe=True
    )
    middles_S = starts_S1[:-1] + ends_of_firsts.to(starts_S1.dtype)
    both_G = torch.stack((starts_S1[:-1], middles_S), -1).flatten()
    return Layout(torch.cat((both_G, starts_S1[-1:])), inputs.layout.longest)


def _found_in_partner(states_TD: Tensor, parts: Layout) -> Tensor:
    """Return, for each token, the mix of the other text's states that it attends to; 0 without a partner."""
    starts_G = parts.starts_S1[:-1].long()
    lengths_G = parts.starts_S1.diff().long()
    column_N = torch.arange(int(lengths_G.max()), device=states_TD.device)
    real_GN = column_N < lengths_G[:, None]
    rows_GN = (starts_G[:, None] + column_N).clamp(max=len(states_TD) - 1)
    padded_GND = states_TD[rows_GN] * real_GN[..., None]
    partners_G = torch.arange(len(lengths_G), device=states_TD.device) ^ 1
    partner_GND = padded_GND[partners_G]
    partner_real_GN = real_GN[partners_G]
    scores_GNN = _exact(padded_GND @ partner_GND.mT)
    # Not -inf: a text without a partner has an empty softmax, and its padded partner's states are 0.
    lowest = torch.finfo(scores_GNN.dtype).min
    shares_GNN = scores_GNN.masked_fill(~partner_real_GN[:, None], lowest).softmax(-1)
    found_GND: Tensor = shares_GNN.to(partner_GND.dtype) @ partner_GND
    return found_GND[real_GN]


def _pooled(states_TD: Tensor, layout: Layout) -> Tensor:
    """Return maximum and mean of each sequence's states [S, 2D]; 0 for an empty one."""
    states_TD = _exact(states_TD)
    empty_S = layout.starts_S1.diff() == 0
    largest_SD = largest_of_rows(states_TD, layout).masked_fill(empty_S[:, None], 0.0)
    return torch.cat((largest_SD, mean_of_rows(states_TD, layout)), -1)


def _exact(values: Tensor) -> Tensor:
    """Return values in fp32 or better."""
    return values if values.dtype == torch.float64 else values.float()
