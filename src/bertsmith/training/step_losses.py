"""Losses over the rows of a whole step, for example with the step's other pairs as negatives.

A step of one micro-batch is one pass. With several, gradients are cached (GradCache; Gao et al. 2021). A
first pass without gradients gives the rows of all micro-batches. The loss gives a gradient for each row, and
a second pass over each micro-batch goes backwards from there. Memory does not grow with the step, except for
its token ids, the rows and their loss. Both passes of a micro-batch have the same dropout.

Over several processes each computes the loss of all rows and differentiates its own: only rows are exchanged.

Shapes: S rows of a micro-batch, Z rows of the step, C counts, N sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bertsmith.core.errors import DoesNotFit
from bertsmith.training.distributed import World

NO_MEMORY = ("can't allocate memory", "not enough memory")
"""Parts of torch's messages when a CPU's memory does not suffice."""


class OverTheStep(ABC):
    """A module whose loss compares the rows of a whole step, over all micro-batches and processes.

    Its forward takes a micro-batch and returns its rows [S, ...], and True for those that are not filler [S].
    Whatever learns is part of the forward: `of_step` has no weights.
    """

    @abstractmethod
    def of_step(self, rows_Z: Tensor, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of all rows of a step, and each row's part of the sums [Z, N]."""


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed the generator that dropout on this device samples from."""
    # Without a GPU torch.manual_seed records the whole call stack, once for every kind of device.
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)


def gradients_over_step(
    forward: Callable[[Any], tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    batches: Sequence[Any],
    *,
    world: World,
    passing: Callable[[bool], AbstractContextManager[None]],
) -> Tensor:
    """Add the gradients of a step's loss to the weights; return the sums of this process's rows.

    `passing(last)` is the context of a forward and backward pass.
    """

    def rows_of(number: int) -> tuple[Tensor, Tensor]:
        seed_dropout(seeds[number], world.device)
        return forward(batches[number])

    # From the generator that the step has seeded: no random state is kept between the passes.
    seeds, last = torch.randint(2**62, (len(batches),)).tolist(), len(batches) - 1
    if not last:
        with passing(True):
            rows_S, is_real_S = rows_of(0)
            (gradient,), sums = _gradients_of_rows([rows_S.detach()[is_real_S]], loss_of, world)
            _go_backwards(rows_S, is_real_S, gradient)
        return sums
    found = []
    for number in range(len(batches)):
        with passing(False), torch.no_grad():
            rows_S, is_real_S = rows_of(number)
            found.append(rows_S[is_real_S])
    gradients, sums = _gradients_of_rows(found, loss_of, world)
    for number, gradient in enumerate(gradients):
        with passing(number == last):
            _go_backwards(*rows_of(number), gradient)
    return sums


def _gradients_of_rows(
    found: Sequence[Tensor], loss_of: Callable[[Tensor], tuple[Tensor, Tensor]], world: World
) -> tuple[Sequence[Tensor], Tensor]:
    """Return the gradients of the rows of each micro-batch, and the sums of this process's rows."""
    every_Z, own = world.gathered(torch.cat(list(found)))
    every_Z.requires_grad_()
    try:
        loss, sums_ZN = loss_of(every_Z)
        (gradients_Z,) = torch.autograd.grad(loss, every_Z)
    except (RuntimeError, MemoryError) as error:  # also torch.OutOfMemoryError
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not any(part in str(error) for part in NO_MEMORY):
            raise
        what = f"the loss over the {len(every_Z):,} rows of a step does not fit into memory"
        raise DoesNotFit(what, key="batch.sequences", remedy="use a smaller batch") from error
    return torch.split(gradients_Z[own], [len(each) for each in found]), sums_ZN[own].sum(0)


def _go_backwards(rows_S: Tensor, is_real_S: Tensor, gradient: Tensor) -> None:
    gradient_S = torch.zeros_like(rows_S)
    gradient_S[is_real_S] = gradient
    torch.autograd.backward(rows_S, gradient_S)
