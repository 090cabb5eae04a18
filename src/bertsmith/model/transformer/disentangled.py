"""DeBERTa's attention: content to content, content to position, position to content (He et al. 2020, 2021).

Shapes: T packed tokens, R of them that are wanted, N tokens of one sequence, H heads, K head width, D model
width, B buckets of relative positions to both sides.

Written as published, one sequence after the other: torch's kernels do not support scores that depend on
query, key and distance, so none of `attend.py` is used.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.model.attention.projection import Attend
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.attention.watched import WatchedAttention
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.transformer.transformer import AttentionShape, SelfAttention, Transformer
from bertsmith.packed import ALL, Layout, PackedBatch, Rows


class RelativePositions(nn.Module):
    """A learned vector for each bucket of distances, normalised; all layers share them."""

    def __init__(self, table: nn.Embedding, norm: nn.LayerNorm, *, max_distance: int, dropout: float) -> None:
        super().__init__()
        self.table, self.norm, self.dropout = table, norm, Dropout(dropout)
        self.max_distance = max_distance

    def forward(self) -> Tensor:
        """Return the vectors [B, D]."""
        vectors_BD: Tensor = self.dropout(self.norm(self.table.weight))
        return vectors_BD

    def buckets(self, length: int, device: torch.device) -> Tensor:
        """Return the bucket of each query and key of a sequence [N, N]."""
        index_N = torch.arange(length, device=device)
        to_one_side = self.table.num_embeddings // 2
        bucket_NN = index_N[:, None] - index_N[None, :]
        if to_one_side < self.max_distance:
            bucket_NN = log_buckets(bucket_NN, to_one_side, self.max_distance)
        return (bucket_NN + to_one_side).clamp(0, 2 * to_one_side - 1)


def log_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return distances in buckets: one each up to half their number, then ever wider ones, as published."""
    half = buckets // 2
    far = distance.abs().clamp(min=half - 1).float()
    # In single precision, like transformers: rounding decides at a bucket's border.
    widest = torch.log(torch.tensor((max_distance - 1) / half))
    logarithmic = torch.ceil(torch.log(far / half) / widest * (half - 1)) + half
    return torch.where(distance.abs() <= half, distance, (logarithmic * distance.sign()).long())


class DisentangledAttention(SelfAttention):
    """Self-attention with scores of three terms; positions go through the content's own projections."""

    def __init__(self, shape: AttentionShape, *, rule: AttentionRule, relative: RelativePositions) -> None:
        super().__init__(shape, rule=rule)
        # In a tuple, which hides it from torch: the encoder owns what all of its layers share.
        self._shared = (relative,)

    @property
    def relative(self) -> RelativePositions:
        """Return the relative positions that all layers share."""
        return self._shared[0]

    def mixed(self, hidden_TD: Tensor, batch: PackedBatch, attend: Attend, rows: Rows = ALL) -> Tensor:
        """Return the wanted rows' mixed values; `attend` only watches, as kernels lack relative positions."""
        rule = self.training_rule if self.training else self.rule
        query_HTK, key_HTK, value_HTK = self.projected(hidden_TD)
        probabilities = self._probabilities(query_HTK, key_HTK, batch.layout)
        if isinstance(attend, WatchedAttention):
            probabilities = attend.show(probabilities)
        mixed = []
        for (start, end), probabilities_HNN in zip(batch.layout.bounds(), probabilities, strict=True):
            kept_HNN = functional.dropout(probabilities_HNN, rule.dropout, training=rule.dropout > 0)
            mixed.append((kept_HNN.to(value_HTK.dtype) @ value_HTK[:, start:end]).transpose(0, 1))
        return torch.cat(mixed).flatten(1)[rows]

    def _probabilities(self, query_HTK: Tensor, key_HTK: Tensor, layout: Layout) -> list[Tensor]:
        relative = self.relative
        position_query_HBK, position_key_HBK, _ = self.projected(relative())
        # The sum of three products of unit variance has a variance of three.
        scale = 1 / math.sqrt(3 * query_HTK.shape[-1])
        found = []
        for start, end in layout.bounds():
            query_HNK, key_HNK = query_HTK[:, start:end], key_HTK[:, start:end]
            bucket_HNN = relative.buckets(end - start, query_HTK.device).expand(self.heads, -1, -1)
            scores_HNN = query_HNK @ key_HNK.mT
            scores_HNN = scores_HNN + (query_HNK @ position_key_HBK.mT).gather(-1, bucket_HNN)
            # A position's query is multiplied with the key's content: rows are keys, so buckets and result
            # are transposed.
            scores_HNN = scores_HNN + (key_HNK @ position_query_HBK.mT).gather(-1, bucket_HNN.mT).mT
            exact_HNN = scale * (scores_HNN if scores_HNN.dtype == torch.float64 else scores_HNN.float())
            if self.rule.causal:
                all_NN = torch.ones_like(exact_HNN[0], dtype=torch.bool)
                hidden_NN = all_NN.tril(-1) if self.rule.backwards else all_NN.triu(1)
                exact_HNN = exact_HNN.masked_fill(hidden_NN, -math.inf)
            found.append(exact_HNN.softmax(-1))
        return found

    def projected(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of some vectors [H, rows, K]."""
        query, key, value = self.project(vectors).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        return query, key, value


class DisentangledEncoder(Transformer):
    """An encoder with relative positions that its layers share."""

    compilable = False  # its attention reads the ends of sequences from the layout

    def __init__(
        self, embeddings: Embeddings, blocks: Sequence[nn.Module], *, relative: RelativePositions
    ) -> None:
        super().__init__(embeddings, blocks, order=range(len(blocks)))
        self.relative = relative

    def stream(self) -> None:
        """Return None: its attention also depends on positions, and requires whole sequences."""
