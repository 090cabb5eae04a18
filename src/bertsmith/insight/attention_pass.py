"""One pass over many texts that shows a study the attention of each layer, and keeps none of it.

Shapes: G texts of like length, N tokens of the longest of them, H heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bertsmith.core.progress import progress_bar
from bertsmith.inference.engine import Batching, batching_for, in_streams
from bertsmith.inference.head_introspection import check_heads_are_whole
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import Integers, Sequences
from bertsmith.model.transformer import with_attention
from bertsmith.model.watched_attention import WatchedAttention, groups_of
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

GPU_BATCH_TOKENS = 8192
"""Enough to fill a GPU. All probabilities of a batch are written out, heads times its longest text for each
token, so that it takes fewer tokens than a prediction."""
GROUP_SCORES = {"cuda": 500_000}
"""What a group of texts costs by itself, in scores of one head that could be computed instead. A GPU waits
for some thirty launches in each layer; by estimate it could read and write so many scores of a dozen heads
meanwhile. A CPU was no faster with filler."""


@dataclass(frozen=True, slots=True)
class Study(Generic[Prepared, Result]):
    """What is made of attention."""

    prepare: Callable[[Sequence[int]], Prepared]
    """From the numbers of G texts to what is the same for all layers: masks, which words stand where."""
    reduce: Callable[[Prepared, Tensor], Result]
    """From that and the probabilities [G, H, N, N] of one layer to what is kept of them. Behind shorter texts
    stands filler, of which all probabilities are 0. A GPU should not be waited for here."""


def attention_pass(
    bert: Bert, texts: Sequence[Encoded], study: Study[Prepared, Result], *, what: str
) -> Iterator[tuple[list[int], list[Result]]]:
    """For each group of texts of like length their numbers, and what the study keeps of each layer."""
    check_heads_are_whole(bert)
    sequences, device = Sequences.of(texts), bert.engine.device
    cut = batching_for(sequences.tokens, device)
    if device.type == "cuda":
        cut = Batching(GPU_BATCH_TOKENS, streams=1)

    def studied(numbered: tuple[Integers, PackedBatch]) -> list[tuple[list[int], list[Result]]]:
        numbers, batch = numbered
        with torch.no_grad():
            return studied_batch(bert, batch, numbers.tolist(), study)

    with progress_bar(what, len(texts)) as advance:
        for groups in in_streams(studied, sequences.batches(cut.tokens), streams=cut.streams):
            yield from groups
            advance(sum(len(numbers) for numbers, _ in groups))


def studied_batch(
    bert: Bert, batch: PackedBatch, numbers: Sequence[int], study: Study[Prepared, Result]
) -> list[tuple[list[int], list[Result]]]:
    """The groups of one batch, which lies on the CPU; `numbers` are those of its texts."""
    device = bert.engine.device
    groups = groups_of(batch.layout, device, GROUP_SCORES.get(device.type, 0))
    texts: dict[int, list[int]] = {}
    prepared: dict[int, Prepared] = {}
    kept: dict[int, list[Result]] = {}

    def watch(layer: int, rows: list[int], weights_GHNN: Tensor) -> Tensor:
        group = rows[0]
        if layer == 0:
            texts[group] = [numbers[row] for row in rows]
            prepared[group], kept[group] = study.prepare(texts[group]), []
        kept[group].append(study.reduce(prepared[group], weights_GHNN))
        return weights_GHNN

    # Nobody reads the last states: of one row they cost nothing, and the attention in front of them is whole.
    first_row = torch.zeros(1, dtype=torch.long, device=device)
    heads = with_attention(bert.engine.network.encoder)
    heads(batch.to(device), WatchedAttention(watch, groups), rows=first_row)
    return [(texts[group], results) for group, results in kept.items()]
