"""Model heads: the pooler, the pre-training heads and the task heads.

Shapes: D model width, E embedding width, P predicted rows, S sequences, V vocabulary.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.model.kernels.activations import activation_function

Reads = Literal["tokens", "sentence", "pooled"]
"""Input of a head: every token's state, the encoder's sentence state, or the pooler's output."""
ALIGNED_WORDS = 64
"""A GPU multiplies three times as fast with rows of whole 16 bytes, which 30,522 scores are not."""


class Pooler(nn.Module):
    """BERT's dense tanh layer on the sentence row, trained through next-sentence prediction."""

    reads: Reads = "sentence"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, sentence_SD: Tensor) -> Tensor:
        pooled_SD: Tensor = self.dense(sentence_SD).tanh()
        return pooled_SD


class Transform(nn.Module):
    """A dense layer, an activation and, if the architecture has one, a LayerNorm."""

    def __init__(self, dense: nn.Linear, activation: str, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.dense = dense
        self.activation_name, self.activation = activation, activation_function(activation)
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, hidden: Tensor) -> Tensor:
        transformed: Tensor = self.norm(self.activation(self.dense(hidden)))
        return transformed


class MaskedLanguageHead(nn.Module):
    """Scores every vocabulary entry at the wanted rows; its decoder is the word embeddings or separate."""

    reads: Reads = "tokens"

    def __init__(self, transform: nn.Module, vocabulary: int, *, bias: bool = True) -> None:
        super().__init__()
        self.transform = transform
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias else None
        self.decoder: nn.Parameter | None = None

    def untie(self, words_VE: Tensor) -> None:
        """Give it a separate decoder, of the size of these word embeddings."""
        self.decoder = nn.Parameter(torch.empty_like(words_VE))

    def decoder_weight(self, words_VE: Tensor) -> Tensor:
        """Return its decoder, given the word embeddings."""
        return words_VE if self.decoder is None else self.decoder

    def forward(self, hidden_PD: Tensor, words_VE: Tensor, *, aligned: bool = False) -> Tensor:
        decoder_VE, bias_V = self.decoder_weight(words_VE), self.bias
        words = decoder_VE.shape[0]
        missing = aligned_words(words) - words
        if not (aligned and missing):
            return functional.linear(self.transform(hidden_PD), decoder_VE, bias_V)
        aligned_VE = functional.pad(decoder_VE, (0, 0, 0, missing))
        known_V = decoder_VE.new_zeros(words) if bias_V is None else bias_V
        aligned_V = functional.pad(known_V, (0, missing), value=-math.inf)
        return functional.linear(self.transform(hidden_PD), aligned_VE, aligned_V)


def aligned_words(vocabulary: int) -> int:
    """Return the number of scores in an aligned row."""
    return -(-vocabulary // ALIGNED_WORDS) * ALIGNED_WORDS


def exact_outputs(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of a task's last layer in a network of this one: at least fp32.

    Its bias may be as large as the user's own numbers (a mean of 90,000), which 8 bits cannot represent.
    """
    return torch.promote_types(dtype, torch.float32)


class OutputHead(nn.Module):
    """Dropout and a linear layer, after the architecture's own transform if it has one."""

    def __init__(
        self, output: nn.Linear, *, reads: Reads, dropout: float, transform: Transform | None = None,
        dropout_before: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.reads: Reads = reads
        # RoBERTa and ELECTRA also apply dropout before the transform.
        self.dropout_before = nn.Dropout(dropout_before)
        self.transform = nn.Identity() if transform is None else transform
        self.dropout = nn.Dropout(dropout)
        self.output = output

    def forward(self, hidden: Tensor) -> Tensor:
        states = self.dropout(self.transform(self.dropout_before(hidden)))
        # A network that was read in half precision has this layer in fp32 (`exact_outputs`).
        scores: Tensor = self.output(states if self.training else states.to(self.output.weight.dtype))
        return scores
