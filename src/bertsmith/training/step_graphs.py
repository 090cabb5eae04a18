"""Whole steps as CUDA graphs: a small step is a thousand kernels that take less time to run than to start.

A size of batch that comes for the first time is learned from in the ordinary way, which also compiles what
has to be compiled; the second time its step is recorded, and from then on played back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

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
"""The whole step, from a micro-batch and its shares on the GPU to the step's numbers."""


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    micro: Any
    shares: Tensor
    numbers: Tensor

    def play(self, micro: RecordedMicro, shares: Tensor) -> Tensor:
        for kept, new in zip(self.micro.tensors(), micro.tensors(), strict=True):
            kept.copy_(new, non_blocking=True)
        self.shares.copy_(shares, non_blocking=True)
        self.graph.replay()
        return self.numbers


@dataclass
class StepGraphs:
    """The recorded steps of one learner."""

    _met: set[Sizes] = field(default_factory=set)
    _recordings: dict[Sizes, _Recording] = field(default_factory=dict)
    _stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    """Recording needs a stream of its own, and what it records must have run there before."""

    def take(self, micro: RecordedMicro, shares: Tensor, *, learn: Learn) -> Tensor:
        """One step of `learn`; its numbers are on the GPU and hold until the next step."""
        sizes = micro.sizes()
        if sizes not in self._met:
            self._met.add(sizes)
            return self._ordinary(micro, shares, learn)
        if sizes not in self._recordings:
            self._recordings[sizes] = self._recorded(micro, shares, learn)
        return self._recordings[sizes].play(micro, shares)

    def _ordinary(self, micro: RecordedMicro, shares: Tensor, learn: Learn) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            numbers = learn(micro, shares)
        torch.cuda.current_stream().wait_stream(self._stream)
        return numbers

    def _recorded(self, micro: RecordedMicro, shares: Tensor, learn: Learn) -> _Recording:
        kept_micro, kept_shares = micro.to(self._stream.device), shares.to(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        # One step is over before the next begins, so all recordings can share their memory.
        pool = next((each.graph.pool() for each in self._recordings.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            numbers = learn(kept_micro, kept_shares)
        return _Recording(graph, kept_micro, kept_shares, numbers)


def recording_of(optimizer: torch.optim.Optimizer, device: torch.device) -> StepGraphs:
    """Recorded steps for a fused optimiser, which from now on reads its learning rates from the GPU."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device=device)
    return StepGraphs()
