"""What may be asked of the attention heads of an encoder, by whoever studies, compares or prunes them.

Shapes: T packed tokens, R of them that are wanted, D model width, H heads, N tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from bertsmith.model.attention import Attend
from bertsmith.model.encoder import ALL, Encoder, Rows, need
from bertsmith.model.watched_attention import SequenceGroup, Watch, WatchedAttention
from bertsmith.packed import PackedBatch

if TYPE_CHECKING:
    from bertsmith.model.transformer import Block, Transformer


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The attention heads of a Transformer."""

    encoder: "Transformer"

    @property
    def blocks(self) -> "list[Block]":
        """The blocks that hold them, each once."""
        return self.encoder.own_blocks()

    @property
    def order(self) -> tuple[int, ...]:
        """The number of the block that each layer runs."""
        return self.encoder.order

    @property
    def plain(self) -> bool:
        """True if scores are products of one query and one key (not DeBERTa's)."""
        return self.encoder.plain_attention

    def run(self, batch: PackedBatch, attend: Attend, *, rows: Rows = ALL) -> Tensor:
        """The last states of the wanted rows [R, D], with this form of attention in every layer."""
        return self.encoder.run(batch, attend, rows)

    def run_states(self, batch: PackedBatch, attend: Attend) -> list[Tensor]:
        """The states [T, D] before the first layer and after each, with this form of attention."""
        return self.encoder.run_states(batch, attend)

    def watch(
        self, batch: PackedBatch, watch: Watch, groups: Sequence[SequenceGroup] = (), *, rows: Rows = ALL
    ) -> Tensor:
        """Show each layer's probabilities to `watch`, whose results are used; the last states [R, D]."""
        return self.run(batch, WatchedAttention(watch, groups), rows=rows)

    def maps(self, batch: PackedBatch) -> list[list[Tensor]]:
        """For each layer and each sequence, what every head attends to [H, N, N]."""
        maps: list[dict[int, Tensor]] = [{} for _ in self.order]

        def keep(layer: int, numbers: list[int], weights_GHNN: Tensor) -> Tensor:
            maps[layer] |= dict(zip(numbers, weights_GHNN, strict=True))
            return weights_GHNN

        self.watch(batch, keep)
        return [[layer[number] for number in sorted(layer)] for layer in maps]


def attention_heads_of(encoder: Encoder) -> AttentionHeads:
    """The attention heads of an encoder; a UserError if it has none."""
    return need(encoder.attention_heads, "attention heads")
