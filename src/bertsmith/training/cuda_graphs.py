"""Whole steps as CUDA graphs: a small step has a thousand kernels that take longer to launch than to run.

The first step of a new batch size is taken without a graph, which also compiles the kernels. The second is
recorded, and later ones replay the recording.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bertsmith.model.encoder import Encoder
from bertsmith.model.kernels.torch_internals import own_workspaces
from bertsmith.recipe.optim_section import Algorithm
from bertsmith.training.optimizers import OPTIMIZERS

Sizes = tuple[Any, ...]


class RecordedMicro(Protocol):
    """A micro-batch with tensors that can be overwritten."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any:
        """Return the micro-batch on another device."""
        ...

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        ...

    def sizes(self) -> Sizes:
        """Return everything that a recording depends on: all shapes, and values that are not tensors."""
        ...


Learn = Callable[[Any, Tensor], Tensor]
"""Takes a whole step, from a micro-batch and its loss scales on the GPU to the step's numbers."""


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    micro: Any
    loss_scales: Tensor
    numbers: Tensor

    def replay(self, micro: RecordedMicro, loss_scales: Tensor) -> Tensor:
        # A graph reads fixed addresses: the step's inputs are copied to the addresses that were recorded.
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
    """Stream for recording; CUDA requires that the recorded work has run on it before."""

    def take(self, micro: RecordedMicro, loss_scales: Tensor, *, learn: Learn) -> Tensor:
        """Take one step of `learn`; return its numbers on the GPU, which the next step overwrites."""
        sizes = micro.sizes()
        if sizes not in self._met:
            self._met.add(sizes)
            # On the stream that records later: this step is its warm-up, and compiles the kernels. The two
            # streams wait for each other, because each reads the weights that the other writes.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                numbers = learn(micro, loss_scales)
            torch.cuda.current_stream().wait_stream(self._stream)
            return numbers
        if sizes not in self._recordings:
            # Recording does not run the step; the replay below does.
            self._recordings[sizes] = self._recorded(micro, loss_scales, learn)
        return self._recordings[sizes].replay(micro, loss_scales)

    def forget(self) -> None:
        """Drop all recordings: the addresses of weights and rates have changed."""
        self._met.clear()
        self._recordings.clear()

    def _recorded(self, micro: RecordedMicro, loss_scales: Tensor, learn: Learn) -> _Recording:
        kept_micro, kept_scales = micro.to(self._stream.device), loss_scales.to(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        # One step is over before the next begins, so all recordings can share their memory.
        pool = next((each.graph.pool() for each in self._recordings.values()), None)
        # CUDA calls of other threads are not part of the recording and must not abort it.
        whole = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        with own_workspaces(), whole:
            numbers = learn(kept_micro, kept_scales)
        return _Recording(graph, kept_micro, kept_scales, numbers)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts that decide whether a job's steps can be recorded."""

    device: torch.device
    precision: Literal["fp32", "bf16", "fp16"]
    algorithm: Algorithm
    encoders: Sequence[Encoder]
    processes: int
    one_graph: bool
    """True if the objective is one graph: an LSTM cannot be part of one."""
    recompute: bool = False
    spike_factor: float | Literal["off"] = "off"
    over_the_step: bool = False
    """True if the loss compares the rows of a whole step."""
    followed: bool = False
    """True if Python changes the weights after each step."""


def why_not_recorded(facts: StepFacts) -> str:
    """Return the reason why steps cannot be recorded, or "" if they can."""
    reasons = {
        "the run does not use a GPU": facts.device.type != "cuda",
        "the objective is not one graph": not facts.one_graph,
        # With fp16 the CPU chooses the next loss scale after each step.
        f"precision is {facts.precision}, not bf16": facts.precision != "bf16",
        f"{facts.algorithm} reads numbers back": not OPTIMIZERS[facts.algorithm].recordable,
        "gradients are summed over processes": facts.processes > 1,
        # Python reads back the mask of filler rows, and the dropout of each pass.
        "the loss compares the rows of a whole step": facts.over_the_step,
        "dropout's random state is read back when layers are recomputed": facts.recompute,
        "run.spike_factor reads the gradient norm back": facts.spike_factor != "off",
        "the weights are changed after each step": facts.followed,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    # Other kernels than flash attention read lengths on the CPU.
    flash = reason or all(encoder.recordable(facts.device) for encoder in facts.encoders)
    return reason if flash else "flash attention does not take the heads"


def recording_of(optimizer: torch.optim.Optimizer, device: torch.device) -> StepGraphs:
    """Return recorded steps for a fused optimiser, and make it read its learning rates from the GPU."""
    for group in optimizer.param_groups:
        # A number would be recorded as a constant; a tensor is read again at each replay.
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device=device)
    return StepGraphs()
