"""One pass over many texts that gives an analysis the attention of each layer without storing it.

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
from bertsmith.model.attention.watched import groups_of
from bertsmith.model.encoder_config import need
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

GPU_BATCH_TOKENS = 8192
"""Tokens of a batch on a GPU: enough to fill it.

All probabilities of a batch are written to memory: per token, heads times the longest text. So a batch has
fewer tokens than one for prediction."""
GROUP_SCORES = {"cuda": 500_000}
"""Fixed cost of a group of texts, in scores of one head that could be computed instead, by device.

A GPU waits for some thirty launches in each layer. By estimate it could read and write this many scores of a
dozen heads meanwhile. Padding did not make a CPU faster."""


@dataclass(frozen=True, slots=True)
class Analysis(Generic[Prepared, Result]):
    """The two functions that turn the attention of each layer into the results of an analysis."""

    prepare: Callable[[Sequence[int]], Prepared]
    """Function from the indices of G texts to the data shared by all layers, such as masks."""
    reduce: Callable[[Prepared, Tensor], Result]
    """Function from the prepared data and the probabilities [G, H, N, N] of one layer to a result.

    Shorter texts are padded; all probabilities of padding are 0. Do not synchronise with a GPU here."""


def attention_pass(
    bert: Bert, texts: Sequence[Encoded], analysis: Analysis[Prepared, Result], *, what: str
) -> Iterator[tuple[list[int], list[Result]]]:
    """Yield, for each group of texts of similar length, their indices and the result of each layer."""
    check_heads_are_whole(bert)
    sequences, device = Sequences.of(texts), bert.engine.device
    cut = batching_for(sequences.tokens, device)
    if device.type == "cuda":
        cut = Batching(GPU_BATCH_TOKENS, streams=1)

    def studied(numbered: tuple[Integers, PackedBatch]) -> list[tuple[list[int], list[Result]]]:
        numbers, batch = numbered
        with torch.no_grad():
            return studied_batch(bert, batch, numbers.tolist(), analysis)

    with progress_bar(what, len(texts)) as advance:
        for groups in in_streams(studied, sequences.batches(cut.tokens), streams=cut.streams):
            yield from groups
            advance(sum(len(numbers) for numbers, _ in groups))


def studied_batch(
    bert: Bert, batch: PackedBatch, numbers: Sequence[int], analysis: Analysis[Prepared, Result]
) -> list[tuple[list[int], list[Result]]]:
    """Return the results of one batch by group; the batch is on the CPU, `numbers` are its texts' indices."""
    device = bert.engine.device
    groups = groups_of(batch.layout, device, GROUP_SCORES.get(device.type, 0))
    texts: dict[int, list[int]] = {}
    prepared: dict[int, Prepared] = {}
    kept: dict[int, list[Result]] = {}

    def watch(layer: int, rows: list[int], weights_GHNN: Tensor) -> Tensor:
        group = rows[0]
        if layer == 0:
            texts[group] = [numbers[row] for row in rows]
            prepared[group], kept[group] = analysis.prepare(texts[group]), []
        kept[group].append(analysis.reduce(prepared[group], weights_GHNN))
        return weights_GHNN

    # The last states are unused: one row of them costs nothing, and the last attention is still complete.
    first_row = torch.zeros(1, dtype=torch.long, device=device)
    heads = need(bert.engine.network.encoder.heads, "attention heads")
    heads.watch(batch.to(device), watch, groups, rows=first_row)
    return [(texts[group], results) for group, results in kept.items()]
