"""The vectors of tokens: those of words, positions, segments and task types, added up.

Shapes: T packed tokens, E embedding width, D model width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.packed import PackedBatch


class PositionTable(nn.Embedding):
    """A learned vector for each position; RoBERTa's table starts counting behind its padding id."""

    def __init__(self, positions: int, width: int, *, first: int = 0) -> None:
        super().__init__(positions + first, width)
        self.first = first

    def look_up(self, batch: PackedBatch) -> Tensor:
        """Return the position vectors of a batch."""
        vectors_TE: Tensor = self(batch.positions_T + self.first)
        return vectors_TE


class SegmentTable(nn.Embedding):
    """A learned vector for each segment; a table of one row is the same for every token (RoBERTa)."""

    def look_up(self, batch: PackedBatch) -> Tensor:
        """Return the segment vectors of a batch."""
        return self.weight[0] if self.num_embeddings == 1 else self(batch.segments_T)


class TaskTypeTable(nn.Embedding):
    """A learned vector for each of ERNIE's pre-training task types; type 0 if a batch has none."""

    def look_up(self, batch: PackedBatch) -> Tensor:
        """Return the task type vectors of a batch."""
        return self.weight[0] if batch.task_types_T is None else self(batch.task_types_T)


class Embeddings(nn.Module):
    """The sum of the vectors of a token's word and its other properties, normalised, with dropout."""

    def __init__(
        self,
        words: nn.Embedding,
        added: Mapping[str, PositionTable | SegmentTable | TaskTypeTable],
        *,
        norm: nn.Module,
        dropout: float,
        widen: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.words = words
        self.added = nn.ModuleDict(added)
        self.norm = norm
        self.dropout = Dropout(dropout)
        # ALBERT and ELECTRA factorise the table: V x E, then E x D.
        self.widen = nn.Identity() if widen is None else widen

    def forward(self, batch: PackedBatch) -> Tensor:
        summed_TE = self.words(batch.tokens_T)
        for table in self.added.values():
            summed_TE = summed_TE + table.look_up(batch)  # type: ignore[operator]
        widened_TD: Tensor = self.widen(self.dropout(self.norm(summed_TE)))
        return widened_TD

    def parts(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the vectors that are added up, by name: one for each token, or one for all."""
        added = {name: table.look_up(batch) for name, table in self.added.items()}  # type: ignore[operator]
        return {"token": self.words(batch.tokens_T), **added}

    def fold_segment(self) -> None:
        """Add the first segment's vector to every position's, and drop the segments."""
        if isinstance(table := self.added.pop("segment") if "segment" in self.added else None, SegmentTable):
            with torch.no_grad():
                self.added.get_parameter("position.weight").add_(table.weight[0])
