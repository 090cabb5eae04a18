"""Whole steps as CUDA graphs: a small step is a thousand kernels that take less time to run than to start.

A size of batch that comes for the first time is learned from in the ordinary way, which also compiles what
has to be compiled; the second time its step is recorded, and from then on replayed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bertsmith.model.torch_internals import own_workspaces

Sizes = tuple[Any, ...]


class RecordedMicro(Protocol):
    """A micro-batch whose tensors can be written over."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any:
        """The same on another device."""
        ...

    def tensors(self) -> list[Tensor]:
        """All its tensors, in an order that is always the same."""
        ...

    def sizes(self) -> Sizes:
        """What a recording depends on: every shape, and what else is no tensor."""
        ...


Learn = Callable[[Any, Tensor], Tensor]
"""The whole step, from a micro-batch and its loss scales on the GPU to the step's numbers."""


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    micro: Any
    loss_scales: Tensor
    numbers: Tensor

    def replay(self, micro: RecordedMicro, loss_scales: Tensor) -> Tensor:
        # A graph reads fixed addresses: what a step learns from is copied to where it was recorded.
        for kept, new in zip(self.micro.tensors(), micro.tensors(), strict=True):
            kept.copy_(new, non_blocking=True)
        self.loss_scales.copy_(loss_scales, non_blocking=True)
        self.graph.replay()
        return self.numbers


@dataclass
class StepGraphs:
    """The recorded steps of one trainer."""

    _met: set[Sizes] = field(default_factory=set)
    _recordings: dict[Sizes, _Recording] = field(default_factory=dict)
    _stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    """Recording needs a stream of its own, and what it records must have run there before."""

    def take(self, micro: RecordedMicro, loss_scales: Tensor, *, learn: Learn) -> Tensor:
        """One step of `learn`; its numbers are on the GPU and hold until the next step."""
        sizes = micro.sizes()
        if sizes not in self._met:
            self._met.add(sizes)
            # On the stream that records later: this is its warm-up, and it compiles what has to be compiled.
            # Both streams wait for each other, for the weights that one writes are what the other reads.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                numbers = learn(micro, loss_scales)
            torch.cuda.current_stream().wait_stream(self._stream)
            return numbers
        if sizes not in self._recordings:
            # Recording runs nothing: the step is taken by the replay below.
            self._recordings[sizes] = self._recorded(micro, loss_scales, learn)
        return self._recordings[sizes].replay(micro, loss_scales)

    def forget(self) -> None:
        """Drop all recordings: they write to weights and read rates at addresses that are no more."""
        self._met.clear()
        self._recordings.clear()

    def _recorded(self, micro: RecordedMicro, loss_scales: Tensor, learn: Learn) -> _Recording:
        kept_micro, kept_scales = micro.to(self._stream.device), loss_scales.to(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        # One step is over before the next begins, so all recordings can share their memory.
        pool = next((each.graph.pool() for each in self._recordings.values()), None)
        # CUDA calls of other threads are no part of the recording and must not break it off.
        whole = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        with own_workspaces(), whole:
            numbers = learn(kept_micro, kept_scales)
        return _Recording(graph, kept_micro, kept_scales, numbers)


def recording_of(optimizer: torch.optim.Optimizer, device: torch.device) -> StepGraphs:
    """Recorded steps for a fused optimiser, which from now on reads its learning rates from the GPU."""
    for group in optimizer.param_groups:
        # A number would be recorded as a constant; a tensor is read anew at each replay.
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device=device)
    return StepGraphs()
