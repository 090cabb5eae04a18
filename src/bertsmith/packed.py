"""Packed batches, which all code uses: many sequences in one flat row, without padding.

Shapes: T packed tokens, S sequences, S1 = S + 1 boundaries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHORT_LENGTH = 128
"""Longest sequence, in tokens, that a GPU has faster kernels for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offset of each sequence in the flat row, and the length of the longest one.

    `starts_S1` may repeat its last offset: such empty sequences keep shapes static.
    """

    starts_S1: Tensor
    longest: int

    @property
    def sequences(self) -> int:
        """Return the number of sequences in the row, including empty ones."""
        return self.starts_S1.shape[0] - 1

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Return the first and past-the-last row of each sequence."""
        offsets = self.starts_S1.tolist()
        return zip(offsets[:-1], offsets[1:], strict=True)


Rows = Tensor | slice
"""Requested packed rows: their numbers [R], or all."""
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One flat row of tokens from many sequences, with segment and position of each token."""

    tokens_T: Tensor
    segments_T: Tensor
    positions_T: Tensor
    layout: Layout
    task_types_T: Tensor | None = None

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return the batch on another device, without waiting for a GPU."""
        task_types_T = None if self.task_types_T is None else moved_to_device(self.task_types_T, device)
        return PackedBatch(
            tokens_T=moved_to_device(self.tokens_T, device),
            segments_T=moved_to_device(self.segments_T, device),
            positions_T=moved_to_device(self.positions_T, device),
            layout=replace(self.layout, starts_S1=moved_to_device(self.layout.starts_S1, device)),
            task_types_T=task_types_T,
        )


def pack(sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] = ()) -> PackedBatch:
    """Pack sequences of token ids one after the other; segments default to 0."""
    lengths = [len(sequence) for sequence in sequences]
    assert not segments or [len(each) for each in segments] == lengths, "a segment number for each token"
    starts_S1 = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts_S1[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    tokens_T = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long)
    segments_T = torch.tensor([number for sequence in segments for number in sequence], dtype=torch.long)
    positions_T = torch.tensor([index for length in lengths for index in range(length)], dtype=torch.long)
    layout = Layout(starts_S1, max(lengths, default=0))
    return PackedBatch(tokens_T, segments_T if segments else torch.zeros_like(tokens_T), positions_T, layout)


def unpack(values: Tensor, layout: Layout) -> list[Tensor]:
    """Return the rows of each sequence, as views of the packed rows."""
    return [values[start:end] for start, end in layout.bounds()]


def split_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequence numbers, in order, by a token budget; a sequence over the budget is alone."""
    groups: list[list[int]] = []
    used = 0
    for number, length in enumerate(lengths):
        if not groups or used + length > budget:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += length
    return groups


# ---- asynchronous copies from and to a GPU, which require pinned memory


def moved_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the values on a device, without waiting for a GPU."""
    if tensor.is_cuda or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copied_to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return the values' tensor on the CPU, and an event for when it is filled; None if it is already."""
    if not values.is_cuda:
        return values.cpu(), None
    # New memory for each copy: an earlier one may not have been read yet.
    landing = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    landing.copy_(values, non_blocking=True)
    arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrival.record()
    return landing, arrival
