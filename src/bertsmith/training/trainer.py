"""The trainer: one optimisation step, and the loop over the steps of a run, for every training job.

A job provides a module with a `forward(micro_batch, loss_scales)` that returns a loss and sums to report, a
function that returns the input of the next step, and one that returns the actions due after a step.
"""

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.model.kernels.torch_internals import (
    blas_products,
    enable_onednn,
    fill_new_memory,
    new_memory_is_filled,
    onednn_is_enabled,
)
from bertsmith.packed import copied_to_host
from bertsmith.training.cuda_graphs import RecordedMicro, StepGraphs
from bertsmith.training.distributed import ALONE, World, accumulating, gradient_norm, unwrapped
from bertsmith.training.step_losses import OverTheStep, gradients_over_step, seed_dropout
from bertsmith.training.weight_average import WeightAverage

NORMS_REMEMBERED = 128
NORMS_NEEDED = 32
"""Minimum number of gradient norms for a meaningful median; with fewer, no step counts as a spike."""
CLIP_EPSILON = 1e-6
"""Added to the norm, as in torch's own clipping."""
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of a run's matrix products, by its precision."""
Skip = Literal["", "not a number", "spike", "taken back", "overflow"]
"""Reason why a gradient was not used, or "". taken back: the step was launched before a rollback; overflow:
the loss scale was too large for fp16 and is smaller now."""
MIN_LOSS_SCALE = 1.0
"""With this loss scale, an overflow means that the gradient itself is not a number."""


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Inside, make the same work give the same bits on the same machine, if `wanted`."""
    before = torch.are_deterministic_algorithms_enabled(), new_memory_is_filled(), onednn_is_enabled()
    if wanted:
        # cuBLAS reads this once, when it is first used; both published values are deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling memory, a guard, would cost a pass over every tensor. oneDNN: on a CPU without bf16 instructions
    # torch disables it for the rest of the process, and the other products round differently.
    _set(wanted, False, True if wanted else before[2])
    try:
        yield
    finally:
        _set(*before)


def _set(deterministic: bool, filling: bool, onednn: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    fill_new_memory(filling)
    enable_onednn(onednn)


class Micro(Protocol):
    """A micro-batch: anything that can be moved to a device."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any:
        """Return the micro-batch on another device."""
        ...


# ---- the progress of a run


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run: with the weights and the recipe, all that is needed to resume it.

    Its fields are keys of state.json in checkpoints: a new one needs a default, and renaming is not allowed.
    """

    step: int = 0
    stage: int = 0
    """Index of the current stage, for data with stages; `stage_step` counts the steps in it."""
    stage_step: int = 0
    tokens: int = 0
    """Tokens trained on so far, over all ranks."""
    seconds: float = 0.0
    first_step_seconds: float = 0.0
    """Seconds until the first step was done, compiling included."""
    skipped: int = 0
    """Steps with an unused gradient."""
    skipped_in_a_row: int = 0

    def after(self, *, tokens: int, seconds: float) -> "Progress":
        """Return the progress after one more step, before it is known if its gradient was used."""
        return replace(
            self,
            step=self.step + 1,
            stage_step=self.stage_step + 1,
            tokens=self.tokens + tokens,
            seconds=seconds,
            first_step_seconds=self.first_step_seconds if self.step else seconds,
        )

    def with_outcome(self, before: "Progress", skipped: Skip) -> "Progress":
        """Return the progress with the skipped steps counted, given the progress before and this outcome."""
        # A step that was taken back, or a loss scale that was too large, does not count as a broken gradient.
        rows = {"": 0, "taken back": before.skipped_in_a_row, "overflow": before.skipped_in_a_row}
        row = rows.get(skipped, before.skipped_in_a_row + 1)
        return replace(self, skipped=before.skipped + bool(skipped), skipped_in_a_row=row)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds spent on a run, earlier starts included."""

    before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def __call__(self) -> float:
        """Return the seconds up to now."""
        return self.before + time.monotonic() - self.started


@dataclass(frozen=True, slots=True)
class Due:
    """Actions due after a step, during which the weights must not change."""

    evaluation: bool = False
    saving: bool = False
    stopping: bool = False
    """Stop the run; always together with saving."""

    @property
    def anything(self) -> bool:
        """True if anything is due, so that the next step must wait."""
        return self.evaluation or self.saving or self.stopping


START, NOTHING_DUE = Progress(), Due()


# ---- one step


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of one step: its micro-batches and its learning rate."""

    micros: Sequence[Micro]
    """This rank's micro-batches."""
    counts: tuple[float, ...]
    """Divisors of the loss sums over all ranks, one for each loss; 0 if it predicts nothing."""
    learning_rate: float
    progress: Progress = Progress()
    """Progress of the run when the step begins."""
    tokens: int = 0
    """Tokens of the step, over all ranks."""
    batches: Any = None
    """The job's own record of the step, passed on to its report."""
    waited_seconds: float = 0.0
    """Seconds that the trainer waited for the batch."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched; on a GPU its numbers may not be ready yet."""

    step: StepInput
    numbers: Tensor
    """The gradient norm and the objective's sums, on the CPU once `arrival` has happened."""
    arrival: torch.cuda.Event | None
    skipped: Skip | None
    """Reason why the update was skipped, or ""; None if the GPU decided."""
    rollbacks: int
    """Number of rollbacks of the run when the step was launched."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one step."""

    step: StepInput
    sums: Tensor
    """The objective's sums over this rank's micro-batches, on the CPU."""
    gradient_norm: float
    skipped: Skip
    progress: Progress
    """Progress after the step."""
    due: Due


@dataclass
class GradientGuard:
    """The rule that decides whether a gradient may be used."""

    spike_factor: float | Literal["off"]
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS_REMEMBERED))
    rollbacks: int = 0
    """Number of times that older weights were restored; steps launched before that are discarded."""

    def check(self, norm: float) -> Skip:
        """Return the reason not to use a gradient of this norm, or ""; remember norms that pass."""
        if not math.isfinite(norm):
            return "not a number"
        if self.spike_factor != "off" and len(self.norms) >= NORMS_NEEDED:
            usual = statistics.median(self.norms)
            if norm > self.spike_factor * usual:
                return "spike"
        self.norms.append(norm)
        return ""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The wrapped objective with its optimiser, and the settings of a step."""

    objective: nn.Module
    optimizer: torch.optim.Optimizer
    world: World = ALONE
    precision: Precision = "fp32"
    clip_norm: float | Literal["off"] = "off"
    guard: GradientGuard = field(default_factory=lambda: GradientGuard("off"))
    graphs: StepGraphs | None = None
    """Recorded steps of one micro-batch, for replay; used only if `runs_ahead`."""
    seed: int = 0
    """Seed of dropout, together with the step and the rank."""
    scaler: torch.amp.GradScaler | None = None
    """Loss scaler, which keeps small fp16 gradients from rounding to 0 (`loss_scaler`)."""
    average: WeightAverage | None = None
    """Average of the run's last weights, if the job uses one."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def fused(self) -> bool:
        """True if the optimiser's kernel can scale all gradients and skip an update."""
        whole = not any(isinstance(parameter, DTensor) for parameter in self.parameters())
        return whole and all(group.get("fused") for group in self.optimizer.param_groups)

    @property
    def runs_ahead(self) -> bool:
        """True if the GPU can skip a bad update by itself, so that Python need not wait for the norm."""
        # With a loss scale, Python waits: the next step's scale depends on whether this one overflowed.
        alone = self.guard.spike_factor == "off" and self.scaler is None
        return self.world.device.type == "cuda" and self.fused and alone


def training_steps(
    trainer: Trainer,
    next_step: Callable[[Progress], StepInput | None],
    progress: Progress,
    *,
    clock: Callable[[], float] = lambda: 0.0,
    due_after: Callable[[Progress], Due] = lambda _: Due(),
) -> Iterator[StepReport]:
    """Take steps until `next_step` returns None; the caller logs, evaluates and saves.

    If the trainer runs ahead, a step is reported once the next one is launched, so that the GPU always has
    work queued and never waits for Python. If something is due after a step, it is reported before the next
    one is launched: the evaluated or saved weights are that step's.
    """
    pending: deque[tuple[PendingStep, Progress, Due]] = deque()
    reported = progress  # it is not yet known if the gradients of later steps were used
    while (step := next_step(progress)) is not None:
        launched = launch_step(trainer, step)
        # The clock is read after the launch: on a CPU that is the whole step.
        progress = step.progress.after(tokens=step.tokens, seconds=clock())
        due = due_after(progress)
        pending.append((launched, progress, due))
        ahead = 1 if trainer.runs_ahead and not due.anything else 0
        while len(pending) > ahead:
            report = finish_step(trainer, *pending.popleft(), before=reported)
            reported = report.progress
            yield report
    for each in pending:
        yield finish_step(trainer, *each, before=reported)


def skip_message(report: StepReport, trainer: Trainer) -> str:
    """Return a message about a step with an unused gradient."""
    step = report.progress.step
    if report.skipped == "taken back":
        return f"step {step} was taken back with the weights: it had been launched already"
    if report.skipped == "overflow" and trainer.scaler is not None:
        scale = trainer.scaler.get_scale()
        return f"step {step} was skipped: its gradient overflowed fp16; the loss scale is now {scale:,g}"
    return f"step {step} was skipped: its gradient is {report.skipped}"


def take_step(trainer: Trainer, step: StepInput) -> StepReport:
    """Learn from one step's micro-batches, wait for the results and return them."""
    return finish_step(trainer, launch_step(trainer, step))


def launch_step(trainer: Trainer, step: StepInput) -> PendingStep:
    """Begin to learn from a step's micro-batches; do not wait for the GPU if the trainer runs ahead."""
    for group in trainer.optimizer.param_groups:
        rate = step.learning_rate * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):  # a recorded step reads it at this address
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    # Seeded for each step, so that a resumed run has the same dropout as an uninterrupted one.
    seed = key_of(trainer.seed, "dropout", step.progress.step, trainer.world.rank)
    seed_dropout(seed, trainer.world.device)
    rollbacks = trainer.guard.rollbacks
    if trainer.runs_ahead:
        return PendingStep(step, *copied_to_host(_learn_ahead(trainer, step)), None, rollbacks)
    numbers = _gradients(trainer, step.micros, _loss_scales(trainer, step)).cpu()  # the one wait for a GPU
    skipped = trainer.guard.check(float(numbers[0]))
    if not skipped:
        trainer.optimizer.step()
    if trainer.scaler is not None:
        if skipped == "not a number" and trainer.scaler.get_scale() > MIN_LOSS_SCALE:
            skipped = "overflow"
        trainer.scaler.update()  # half as large after an overflow, twice as large after many steps without
    return PendingStep(step, numbers, None, skipped, rollbacks)


def finish_step(
    trainer: Trainer,
    pending: PendingStep,
    progress: Progress = START,
    due: Due = NOTHING_DUE,
    *,
    before: Progress = START,
) -> StepReport:
    """Wait for a launched step and return its results; do not wait for later steps."""
    if pending.arrival is not None:
        pending.arrival.synchronize()
    norm, guard = float(pending.numbers[0]), trainer.guard
    if pending.rollbacks != guard.rollbacks:
        skipped: Skip = "taken back"  # it was computed from weights that were replaced
    else:
        skipped = guard.check(norm) if pending.skipped is None else pending.skipped
    after = progress.with_outcome(before, skipped)
    return StepReport(pending.step, pending.numbers[1:], norm, skipped, after, due)


def _learn_ahead(trainer: Trainer, step: StepInput) -> Tensor:
    """Take a step and return its numbers; the GPU itself skips the update of a non-finite gradient."""

    def learn(micros: Sequence[Micro], loss_scales: Tensor) -> Tensor:
        numbers = _gradients(trainer, micros, loss_scales)
        # As a gradient scaler would set it: the fused update is skipped on the GPU if this is 1.
        trainer.optimizer.found_inf = (~numbers[0].isfinite()).float()  # type: ignore[attr-defined]
        trainer.optimizer.step()
        return numbers

    loss_scales = _loss_scales(trainer, step)
    if trainer.graphs is None or len(step.micros) > 1:
        return learn(step.micros, loss_scales)
    micro = cast("RecordedMicro", step.micros[0])  # jobs that set `graphs` have such micro-batches
    return trainer.graphs.take(
        micro, loss_scales, learn=lambda micro, loss_scales: learn([micro], loss_scales)
    )


def _loss_scales(trainer: Trainer, step: StepInput) -> Tensor:
    """Return the factor of each loss."""
    # Gradients are averaged over the ranks, while the loss is a sum over all of them.
    size = trainer.world.size
    return torch.tensor([size / count if count else 0.0 for count in step.counts])


def _gradients(trainer: Trainer, micros: Sequence[Micro], loss_scales: Tensor) -> Tensor:
    """Compute all gradients and their clipping; return their norm before it and the objective's sums."""
    world, optimizer, objective = trainer.world, trainer.optimizer, unwrapped(trainer.objective)
    optimizer.zero_grad(set_to_none=True)
    loss_scales = loss_scales.to(world.device, non_blocking=True)
    batches = (micro.to(world.device, non_blocking=True) for micro in micros)
    assert micros, "a step has at least one micro-batch"
    if isinstance(objective, OverTheStep):
        total = _gradients_over_step(trainer, objective, list(batches), loss_scales)
    else:
        parts = []
        for number, batch in enumerate(batches, start=1):
            with _passing(trainer, number == len(micros)):
                with autocast(world.device, trainer.precision):
                    loss, sums = trainer.objective(batch, loss_scales)
                torch.autograd.backward(_scaled(trainer, loss))
            parts.append(sums)
        total = sum(parts[1:], start=parts[0])
    if trainer.scaler is not None:
        trainer.scaler.unscale_(optimizer)  # in place, so that norm and clipping see true gradients
    norm = gradient_norm(trainer.parameters())
    if trainer.clip_norm != "off" and trainer.fused:
        # As a gradient scaler would set it: the fused update divides by it, which saves a separate pass.
        divisor = ((norm + CLIP_EPSILON) / trainer.clip_norm).clamp(min=1.0)
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
    elif trainer.clip_norm != "off":
        nn.utils.clip_grads_with_norm_(trainer.parameters(), trainer.clip_norm, norm)
    total = total.double()
    return torch.cat((norm[None].to(total), total))


def _gradients_over_step(
    trainer: Trainer, objective: OverTheStep, batches: Sequence[Any], loss_scales: Tensor
) -> Tensor:
    """Compute the gradients of a loss over the rows of a step; return the objective's sums."""

    def forward(batch: Any) -> tuple[Tensor, Tensor]:
        with autocast(trainer.world.device, trainer.precision):
            rows_S, is_real_S = trainer.objective(batch, loss_scales)
        return rows_S, is_real_S

    def loss_of(rows_Z: Tensor) -> tuple[Tensor, Tensor]:
        loss, sums_ZN = objective.of_step(rows_Z, loss_scales)
        return _scaled(trainer, loss), sums_ZN

    passing = partial(_passing, trainer)
    return gradients_over_step(forward, loss_of, batches, world=trainer.world, passing=passing)


@contextmanager
def _passing(trainer: Trainer, last: bool) -> Iterator[None]:
    """The forward and backward pass of a micro-batch; after a step's last one, ranks exchange gradients."""
    dtype = DTYPES[trainer.precision]
    with accumulating(trainer.objective, last=last), blas_products(dtype, trainer.world.device):
        yield


def _scaled(trainer: Trainer, loss: Tensor) -> Tensor:
    return loss if trainer.scaler is None else trainer.scaler.scale(loss)


def choose_precision(
    requested: Precision | Literal["auto"], device: torch.device, *, sharded: bool = False
) -> Precision:
    """Return the precision of a run; auto: bf16 on a GPU that has it, fp16 on an older one, fp32 on a CPU."""
    precision, on_gpu = requested, device.type == "cuda"
    if precision == "auto" and on_gpu:
        # An older GPU emulates bf16: slower than fp16, but the right choice for sharded weights.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 or sharded else "fp16"
    elif precision == "auto":
        precision = "fp32"
    if precision == "fp16" and not on_gpu:
        what, remedy = "fp16 is for a GPU", "set it to auto, fp32 or bf16"
        raise UserError(what, key="run.precision", remedy=remedy)
    if precision == "fp16" and sharded:
        # torch's scaler looks for overflows in one process only, which under FSDP holds a shard.
        what, remedy = "fp16 does not support sharded weights", "set run.parallel to ddp"
        raise UserError(what, key="run.precision", remedy=remedy)
    return precision


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return a context with bf16 or fp16 products of fp32 weights; it changes nothing for fp32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


def loss_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler | None:
    """Return a loss scaler for fp16, else None: gradients are often below fp16's least number, 6e-8."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
