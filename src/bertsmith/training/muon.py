"""Muon (Jordan et al. 2024): momentum with an orthogonal step for each hidden matrix, AdamW for the rest.

A step has few kernels and reads nothing back from a GPU: all matrices of one shape, from any parameters, are
made orthogonal in one batched product. Under FSDP every process gathers gradients and momentum, computes the
whole step and keeps its own rows of it.

Shapes: M matrices of one shape, R rows, C columns.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_step_

from bertsmith.model.kernels.torch_internals import foreach_add_, foreach_copy_, foreach_mul_
from bertsmith.training.distributed import held, own_rows, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The published quintic, so steep at 0 that five steps bring all singular values near 1 (0.7 to 1.2)."""
NEWTON_SCHULZ_STEPS = 5
MIN_NORM = 1e-7
"""Smallest norm that a matrix is divided by, as in torch.optim.Muon."""
MuonScale = Literal["original", "match_rms_adamw"]


class AdamWSettings(NamedTuple):
    """Settings of AdamW except the learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    first_step: float = 0.0
    """Initial value of the step counter that bias corrections use."""


class Muon(torch.optim.Optimizer):
    """Orthogonal steps for groups with `parts`, fused AdamW for groups with `parts` 0.

    `parts` is the number of matrices of equal height stacked in each parameter of a group. Like torch's fused
    optimisers, it divides gradients by `grad_scale` and skips an update if `found_inf` is 1.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        scale: MuonScale,
        adamw: AdamWSettings,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "scale": scale, "betas": adamw.betas, "eps": adamw.eps}
        super().__init__(groups, {**settings, "weight_decay": 0.0, "fused": True, "capturable": False})
        for group in self.param_groups:
            for parameter in group["params"]:
                blank = torch.zeros_like
                if group["parts"]:
                    self.state[parameter] = {"momentum_buffer": blank(parameter)}
                    continue
                step = torch.full((), adamw.first_step, dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {
                    "step": step,
                    "exp_avg": blank(parameter),
                    "exp_avg_sq": blank(parameter),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the current gradients."""
        assert closure is None, "Muon does not support closures"
        updates = self._orthogonal_updates()
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if group["parts"] and parameters:
                # A tensor if the GPU decides on the update, or if a recorded step has its rate in a tensor.
                rate = group["lr"] * self._taken()
                weights = [held(each) for each in parameters]
                steps = [updates[each] for each in parameters]
                foreach_mul_(weights, 1 - rate * group["weight_decay"])
                foreach_mul_(steps, -rate)
                foreach_add_(weights, steps)
            elif parameters:
                self._adamw_step(parameters, group)

    def _orthogonal_updates(self) -> dict[Tensor, Tensor]:
        """Return this process's part of each matrix parameter's step, before the learning rate."""
        by_shape: dict[tuple[int, int], list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"] if group["parts"] else ():
                if parameter.grad is not None:
                    rows, columns = parameter.shape
                    by_shape.setdefault((rows // group["parts"], columns), []).append((parameter, group))
        updates: dict[Tensor, Tensor] = {}
        for shape, members in by_shape.items():
            parameters, parts = [each for each, _ in members], [group["parts"] for _, group in members]
            momentum, scale = members[0][1]["momentum"], members[0][1]["scale"]
            buffers = [self.state[each]["momentum_buffer"] for each in parameters]
            gradients_MRC = self._usable(_stacked(_gradients(parameters), shape))
            buffers_MRC = _stacked(buffers, shape).lerp_(gradients_MRC, (1 - momentum) * self._taken())
            nesterov_MRC = gradients_MRC.lerp_(buffers_MRC, momentum)
            updates_MRC = orthogonalised(nesterov_MRC).mul_(step_scale(shape, scale))
            foreach_copy_([held(each) for each in buffers], _unstacked(buffers_MRC, parameters, parts))
            updates |= zip(parameters, _unstacked(updates_MRC, parameters, parts), strict=True)
        return updates

    def _taken(self) -> float | Tensor:
        """Return 1 if the update is taken; if the GPU decides, a tensor that is 0 for a skipped update."""
        found_inf = getattr(self, "found_inf", None)
        return 1.0 if found_inf is None else 1.0 - found_inf

    def _usable(self, gradients_MRC: Tensor) -> Tensor:
        """Return the gradients divided by `grad_scale`, or zeros if the update is skipped: 0 x NaN is NaN."""
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if divisor is not None:
            gradients_MRC = gradients_MRC.div_(divisor)
        return gradients_MRC if found_inf is None else gradients_MRC.masked_fill_(found_inf > 0, 0.0)

    def _adamw_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[each] for each in parameters]
        adamw_step_(
            parameters,
            _gradients(parameters),
            [each["exp_avg"] for each in states],
            [each["exp_avg_sq"] for each in states],
            [],
            [each["step"] for each in states],
            fused=True,
            capturable=group["capturable"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalised(matrices_MRC: Tensor) -> Tensor:
    """Return the matrices with all singular values near 1, by Newton-Schulz; in bf16 on a GPU."""
    rows, columns = matrices_MRC.shape[1:]
    if rows > columns:  # the products below are as large as the number of rows
        found_MRC = orthogonalised(matrices_MRC.mT).mT
        return found_MRC.contiguous()
    norms_M11 = torch.linalg.vector_norm(matrices_MRC, dim=(1, 2), keepdim=True)
    found_MRC = matrices_MRC / norms_M11.clamp(min=MIN_NORM)
    found_MRC = found_MRC.bfloat16() if found_MRC.is_cuda else found_MRC
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_MRR = found_MRC @ found_MRC.mT
        factor_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=b, alpha=c)
        found_MRC = torch.baddbmm(found_MRC, factor_MRR, found_MRC, beta=a)
    return found_MRC.to(matrices_MRC.dtype)


def step_scale(shape: tuple[int, int], scale: MuonScale) -> float:
    """Return the factor of a matrix's orthogonal step, in addition to the learning rate."""
    rows, columns = shape
    if scale == "original":  # Jordan's: tall matrices get a longer step
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))  # Moonlight's (Liu et al. 2025): as large as AdamW's steps


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _stacked(tensors: list[Tensor], shape: tuple[int, int]) -> Tensor:
    """Return all whole matrices of this shape in the tensors [M, R, C]."""
    return torch.cat([whole(each).reshape(-1, *shape) for each in tensors])


def _unstacked(matrices_MRC: Tensor, parameters: list[Tensor], parts: list[int]) -> list[Tensor]:
    """Return, for each parameter, this process's rows of the matrices that are stacked in it."""
    pieces = torch.split(matrices_MRC, parts)
    return [own_rows(piece.view(each.shape), each) for piece, each in zip(pieces, parameters, strict=True)]
