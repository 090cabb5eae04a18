"""An encoder together with the heads that stand on it."""

from collections.abc import Mapping

from torch import Tensor, nn

from bertsmith.model.encoder import Encoder
from bertsmith.model.shape import Shape
from bertsmith.packed import Layout, PackedBatch


class Network(nn.Module):
    """One encoder and its heads by name: pooler, mlm, nsp, sop, classify, tag, span, choice, replaced."""

    def __init__(self, shape: Shape, encoder: Encoder, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def forward(self, batch: PackedBatch) -> Tensor:
        """The last hidden states [T, D]."""
        hidden_TD: Tensor = self.encoder(batch)
        return hidden_TD

    def scores(self, head: str, hidden_TD: Tensor, layout: Layout) -> Tensor:
        """The outputs of a head: [S, C] for a sentence head, [T, C] for one on every token."""
        module = self.heads[head]
        if module.reads == "tokens":
            seen = hidden_TD
        elif module.reads == "pooled":
            seen = self.pooled(hidden_TD, layout)
        else:
            seen = self.encoder.sentence_states(hidden_TD, layout)
        scores: Tensor = module(seen)
        return scores

    def pooled(self, hidden_TD: Tensor, layout: Layout) -> Tensor:
        """The pooler's output [S, D]."""
        pooled_SD: Tensor = self.heads["pooler"](self.encoder.sentence_states(hidden_TD, layout))
        return pooled_SD

    def word_scores(self, hidden_TD: Tensor, rows_P: Tensor) -> Tensor:
        """Masked-LM scores of the whole vocabulary at the wanted rows only [P, V]."""
        words_VE = self.encoder.embeddings.words.weight
        scores_PV: Tensor = self.heads["mlm"](hidden_TD[rows_P], words_VE)
        return scores_PV
