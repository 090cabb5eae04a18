"""One pass over many texts that shows a study the attention of each layer, and keeps none of it.

Shapes: G texts of one length N, H heads.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bertsmith.core.progress import progress_bar
from bertsmith.inference.engine import batching_for, in_streams
from bertsmith.inference.head_introspection import check_equal_heads
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import Integers, Sequences
from bertsmith.model.watched_attention import WatchedAttention
from bertsmith.packed import PackedBatch
from bertsmith.text.tokenizer import Encoded

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Study(Generic[Prepared, Result]):
    """What is made of attention."""

    prepare: Callable[[Sequence[int]], Prepared]
    """From the numbers of G texts to what is the same for all layers: masks, which words stand where."""
    reduce: Callable[[Prepared, Tensor], Result]
    """From that and the probabilities [G, H, N, N] of one layer to what is kept of them."""


def attention_pass(
    bert: Bert, texts: Sequence[Encoded], study: Study[Prepared, Result], *, what: str
) -> Iterator[tuple[list[int], list[Result]]]:
    """For each group of texts of one length their numbers, and what the study keeps of each layer."""
    check_equal_heads(bert)
    sequences, device = Sequences.of(texts), bert.engine.device
    cut = batching_for(sequences.tokens, device)

    def studied(numbered: tuple[Integers, PackedBatch]) -> list[tuple[list[int], list[Result]]]:
        numbers, batch = numbered
        with torch.no_grad():
            return studied_batch(bert, batch.to(device), numbers.tolist(), study)

    with progress_bar(what, len(texts)) as advance:
        for groups in in_streams(studied, sequences.batches(cut.tokens), streams=cut.streams):
            yield from groups
            advance(sum(len(numbers) for numbers, _ in groups))


def studied_batch(
    bert: Bert, batch: PackedBatch, numbers: Sequence[int], study: Study[Prepared, Result]
) -> list[tuple[list[int], list[Result]]]:
    """The groups of one batch; `numbers` are those of its texts."""
    prepared: dict[tuple[int, ...], Prepared] = {}
    kept: dict[tuple[int, ...], list[Result]] = defaultdict(list)

    def watch(layer: int, rows: list[int], weights_GHNN: Tensor) -> Tensor:
        key = tuple(numbers[row] for row in rows)
        if layer == 0:
            prepared[key] = study.prepare(key)
        kept[key].append(study.reduce(prepared[key], weights_GHNN))
        return weights_GHNN

    # Nobody reads the last states: of one row they cost nothing, and the attention in front of them is whole.
    first_row = torch.zeros(1, dtype=torch.long, device=batch.tokens_T.device)
    bert.engine.network.encoder(batch, WatchedAttention(watch), rows=first_row)
    return [(list(key), results) for key, results in kept.items()]
