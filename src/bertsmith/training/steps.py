"""One optimisation step: forward, backward, clip, update; or nothing, where a gradient cannot be trusted."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bertsmith.ground.seeds import key_of
from bertsmith.training.parallel import World, accumulating, gradient_norm
from bertsmith.training.step_graphs import RecordedMicro, StepGraphs

NORMS_REMEMBERED = 128
NORMS_NEEDED = 32
"""A median of fewer gradient norms than this says nothing yet, so no step is called a spike."""
CLIP_EPSILON = 1e-6
"""Added to the norm as torch's own clipping does."""


Precision = Literal["fp32", "bf16"]
Skip = Literal["", "not a number", "spike", "taken back"]
"""Why a gradient was not used, or nothing; taken back: the step was on its way when older weights came."""


class Micro(Protocol):
    """A micro-batch: anything that can be moved to a device."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any:
        """The same on another device."""
        ...


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step is to learn from: this rank's micro-batches and what their sums are divided by."""

    micros: Sequence[Micro]
    counts: tuple[float, ...]
    """Over all ranks; one for each loss of the objective, 0 where it has nothing to predict."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was begun; on a GPU its numbers may still be in the making."""

    numbers: Tensor
    """The gradient norm and the objective's sums, on the CPU once `arrival` has come."""
    arrival: torch.cuda.Event | None
    skipped: Skip | None
    """Why the update was left out, or nothing; None where the GPU itself decided."""
    retakes: int
    """How often older weights had been taken again when it began."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step came to."""

    sums: Tensor
    """The objective's sums over this rank's micro-batches, on the CPU."""
    gradient_norm: float
    skipped: Skip


@dataclass
class Caution:
    """The rule that decides whether a gradient may be used."""

    spike_factor: float | Literal["off"]
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS_REMEMBERED))
    retakes: int = 0
    """How often older weights were taken again: a step begun before tells nothing of these."""

    def judge(self, norm: float) -> Skip:
        """Why a gradient of this norm must not be used, or nothing; norms that pass are remembered."""
        if not math.isfinite(norm):
            return "not a number"
        if self.spike_factor != "off" and len(self.norms) >= NORMS_NEEDED:
            usual = statistics.median(self.norms)
            if norm > self.spike_factor * usual:
                return "spike"
        self.norms.append(norm)
        return ""


@dataclass(frozen=True, slots=True)
class Learner:
    """What learns: the wrapped objective, its optimiser, and the manner of it."""

    objective: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    precision: Precision
    clip_norm: float | Literal["off"]
    caution: Caution
    graphs: StepGraphs | None = None
    """Where steps of one micro-batch are recorded and played back; needs `unwatched`."""

    def parameters(self) -> list[nn.Parameter]:
        """What is learned."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def fused(self) -> bool:
        """Whether the update takes a factor for all gradients, and a word to leave it out."""
        whole = not any(isinstance(parameter, DTensor) for parameter in self.parameters())
        return whole and all(group.get("fused") for group in self.optimizer.param_groups)

    @property
    def unwatched(self) -> bool:
        """Whether the GPU can leave out a bad update by itself, so that nobody has to wait for the norm."""
        return self.world.device.type == "cuda" and self.fused and self.caution.spike_factor == "off"


def take_step(
    learner: Learner, work: StepWork, *, learning_rate: float, seed: tuple[int, int]
) -> StepOutcome:
    """Learn from one step's work and wait for what it came to."""
    return settle(learner, launch_step(learner, work, learning_rate=learning_rate, seed=seed))


def launch_step(
    learner: Learner, work: StepWork, *, learning_rate: float, seed: tuple[int, int]
) -> LaunchedStep:
    """Begin to learn from a step's work; `seed` is (run seed, step) and with the rank decides all dropout."""
    _set_rates(learner, learning_rate)
    torch.manual_seed(key_of(seed[0], "dropout", seed[1], learner.world.rank))
    if learner.unwatched:
        return LaunchedStep(*_on_its_way(_learn_unwatched(learner, work)), None, learner.caution.retakes)
    numbers = _gradients(learner, work.micros, _shares(learner, work)).cpu()  # the one wait for a GPU
    skipped = learner.caution.judge(float(numbers[0]))
    if not skipped:
        learner.optimizer.step()
    return LaunchedStep(numbers, None, skipped, learner.caution.retakes)


def settle(learner: Learner, launched: LaunchedStep) -> StepOutcome:
    """What a launched step came to; waits for it, but not for what was launched after it."""
    if launched.arrival is not None:
        launched.arrival.synchronize()
    norm = float(launched.numbers[0])
    return StepOutcome(launched.numbers[1:], norm, _why_skipped(learner.caution, launched, norm))


def _why_skipped(caution: Caution, launched: LaunchedStep, norm: float) -> Skip:
    if launched.retakes != caution.retakes:
        return "taken back"
    return caution.judge(norm) if launched.skipped is None else launched.skipped


def _on_its_way(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Where the numbers will be on the CPU, and what happens when they are there."""
    if not numbers.is_cuda:
        return numbers, None
    landing = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    landing.copy_(numbers, non_blocking=True)
    arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrival.record()
    return landing, arrival


def _set_rates(learner: Learner, learning_rate: float) -> None:
    for group in learner.optimizer.param_groups:
        rate = learning_rate * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):  # a recorded step reads it where it lies
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _learn_unwatched(learner: Learner, work: StepWork) -> Tensor:
    """The step's numbers, after an update that the GPU itself left out where the gradient is none."""

    def learn(micros: Sequence[Micro], shares: Tensor) -> Tensor:
        numbers = _gradients(learner, micros, shares)
        # What a gradient scaler would set: the fused update is left out on the GPU where this is 1.
        learner.optimizer.found_inf = (~numbers[0].isfinite()).float()  # type: ignore[attr-defined]
        learner.optimizer.step()
        return numbers

    shares = _shares(learner, work)
    if learner.graphs is None or len(work.micros) > 1:
        return learn(work.micros, shares)
    micro = cast("RecordedMicro", work.micros[0])  # who gives a learner graphs gives it such micro-batches
    return learner.graphs.take(micro, shares, learn=lambda micro, shares: learn([micro], shares))


def _shares(learner: Learner, work: StepWork) -> Tensor:
    """What each loss is multiplied by."""
    # Gradients are averaged over the ranks, while the loss is a sum over all of them.
    size = learner.world.size
    return torch.tensor([size / count if count else 0.0 for count in work.counts])


def _gradients(learner: Learner, micros: Sequence[Micro], shares: Tensor) -> Tensor:
    """Give every parameter its gradient, to be clipped; its norm before that, and the objective's sums."""
    learner.optimizer.zero_grad(set_to_none=True)
    sums = _backward(learner, micros, shares.to(learner.world.device, non_blocking=True))
    norm = gradient_norm(learner.parameters())
    if learner.clip_norm != "off":
        _clip(learner, norm, learner.clip_norm)
    return torch.cat((norm[None].to(sums), sums))


def _clip(learner: Learner, norm: Tensor, largest: float) -> None:
    """See to it that the update takes gradients of the largest norm, where theirs is larger."""
    if learner.fused:
        # What a gradient scaler would set: the fused update divides by it, which spares a pass of its own.
        divisor = ((norm + CLIP_EPSILON) / largest).clamp(min=1.0)
        learner.optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
    else:
        nn.utils.clip_grads_with_norm_(learner.parameters(), largest, norm)


def _backward(learner: Learner, micros: Sequence[Micro], shares: Tensor) -> Tensor:
    world = learner.world
    total: Tensor | None = None
    for number, micro in enumerate(micros, start=1):
        batch = micro.to(world.device, non_blocking=True)
        with accumulating(learner.objective, last=number == len(micros)):
            with autocast(world.device, learner.precision):
                loss, sums = learner.objective(batch, shares)
            loss.backward()
        total = sums if total is None else total + sums
    assert total is not None, "a step has at least one micro-batch"
    return total.double()


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """bf16 products over fp32 weights, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
