"""An encoder together with the heads that stand on it."""

from collections.abc import Mapping

from torch import Tensor, nn

from bertsmith.model.encoder import ALL, Encoder
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
        if self.heads[head].reads == "tokens":
            scores_TC: Tensor = self.heads[head](hidden_TD)
            return scores_TC
        return self.scores_of_sentences(head, self.encoder.sentence_states(hidden_TD, layout))

    def scores_of_sentences(self, head: str, sentence_SD: Tensor) -> Tensor:
        """The outputs of a sentence head [S, C], given what stands for each sequence."""
        pooled = self.heads[head].reads == "pooled"
        scores_SC: Tensor = self.heads[head](self.heads["pooler"](sentence_SD) if pooled else sentence_SD)
        return scores_SC

    def sentence_scores(self, head: str, batch: PackedBatch) -> Tensor:
        """The outputs of a sentence head [S, C], without computing what it does not look at."""
        rows = self.encoder.sentence_rows(batch.layout)
        hidden_RD: Tensor = self.encoder(batch, rows=rows)
        if rows is ALL:
            return self.scores(head, hidden_RD, batch.layout)
        return self.scores_of_sentences(head, hidden_RD)

    def pooled(self, hidden_TD: Tensor, layout: Layout) -> Tensor:
        """The pooler's output [S, D]."""
        pooled_SD: Tensor = self.heads["pooler"](self.encoder.sentence_states(hidden_TD, layout))
        return pooled_SD

    def word_scores(self, hidden_TD: Tensor, rows_P: Tensor) -> Tensor:
        """Masked-LM scores of the whole vocabulary at the wanted rows only [P, V]."""
        return self.scores_of_words(hidden_TD[rows_P])

    def scores_of_words(self, hidden_PD: Tensor) -> Tensor:
        """Masked-LM scores of the whole vocabulary for these states [P, V]."""
        words_VE = self.encoder.embeddings.words.weight
        scores_PV: Tensor = self.heads["mlm"](hidden_PD, words_VE)
        return scores_PV
