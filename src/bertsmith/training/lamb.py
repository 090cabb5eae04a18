"""LAMB (You et al. 2019) as ALBERT uses it: Adam with each matrix's update scaled to the matrix's norm.

Everything is computed on this process's part of a parameter: all of it, or under FSDP its shard of the rows.
Only the norms need the other processes, and one small sum combines them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor, Shard

from bertsmith.model.kernels import torch_internals
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.distributed import first_row, held


def build_lamb(groups: Iterable[dict[str, Any]], optim: OptimSection) -> "Lamb":
    """Build LAMB for these groups."""
    return Lamb(
        groups,
        lr=optim.peak_lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        bias_correction=optim.bias_correction,
    )


class Lamb(torch.optim.Optimizer):
    """Adam with decoupled weight decay and a trust ratio ||w|| / ||update|| for each matrix.

    A group's `parts` is the number of matrices of equal height stacked in each of its parameters; 0 keeps
    the ratio at 1, as published for LayerNorms and biases. ALBERT's code omits bias corrections.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        bias_correction: bool,
    ) -> None:
        common = {"lr": lr, "betas": betas, "eps": eps, "bias_correction": bias_correction}
        super().__init__(groups, {**common, "parts": 1, "weight_decay": 0.0})
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),  # on the CPU: reading it needs no GPU sync
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the current gradients."""
        assert closure is None, "LAMB does not support closures"
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if parameters:
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        weights = [held(each) for each in parameters]
        updates = self._adam_updates(parameters, group)
        torch_internals.foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["parts"]:
            _lengthen(updates, parameters, group["parts"])
        torch_internals.foreach_add_(weights, updates, alpha=-group["lr"])

    def _adam_updates(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the running mean of the gradients over the root of the running mean of their squares."""
        beta1, beta2 = group["betas"]
        gradients = [held(each.grad) for each in parameters if each.grad is not None]
        means = [held(self.state[each]["exp_avg"]) for each in parameters]
        squares = [held(self.state[each]["exp_avg_sq"]) for each in parameters]
        torch_internals.foreach_lerp_(means, gradients, 1 - beta1)
        torch_internals.foreach_mul_(squares, beta2)
        torch_internals.foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        # m / c1 / (sqrt(v / c2) + eps), written so that it costs nothing without corrections (both 1).
        first, second = self._corrections(parameters, group)
        roots = torch_internals.foreach_sqrt(squares)
        torch_internals.foreach_add_(roots, group["eps"] * second**0.5)
        updates = list(torch_internals.foreach_div(means, roots))
        if group["bias_correction"]:
            torch_internals.foreach_mul_(updates, second**0.5 / first)
        return updates

    def _corrections(self, parameters: list[Tensor], group: dict[str, Any]) -> tuple[float, float]:
        """Return the bias corrections: divisors of the two running means, which start at 0."""
        steps = [self.state[each]["step"] for each in parameters]
        torch_internals.foreach_add_(steps, 1)
        if not group["bias_correction"]:
            return 1.0, 1.0
        beta1, beta2 = group["betas"]
        step = steps[0].item()  # equal for all: each parameter is trained from the first step on or never
        return 1 - beta1**step, 1 - beta2**step


def _lengthen(updates: Sequence[Tensor], parameters: Sequence[Tensor], parts: int) -> None:
    """Multiply the update of each matrix by its trust ratio, which is 1 if either norm is 0."""
    weight_pieces, update_pieces = [], []
    for update, parameter in zip(updates, parameters, strict=True):
        for rows in _rows_of_parts(parameter, parts):
            weight_pieces.append(held(parameter)[rows])
            update_pieces.append(update[rows])
    norms_2M = torch.stack((_norms(weight_pieces), _norms(update_pieces)))
    of_weights_M, of_updates_M = _over_all_processes(norms_2M, parameters[0]).unbind()
    both_M = (of_weights_M > 0) & (of_updates_M > 0)
    ratios_M = torch.where(both_M, of_weights_M / of_updates_M, 1.0)
    torch_internals.foreach_mul_(update_pieces, list(ratios_M.unbind()))


def _rows_of_parts(parameter: Tensor, parts: int) -> list[slice]:
    """Return, for each stacked matrix, the range of its rows within this process's rows."""
    if parts == 1:
        return [slice(None)]
    first, count = first_row(parameter), held(parameter).shape[0]
    assert parameter.shape[0] % parts == 0, "stacked matrices are of equal height"
    height = parameter.shape[0] // parts
    edges = [min(max(part * height - first, 0), count) for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in zip(edges[:-1], edges[1:], strict=True)]


def _norms(pieces: Sequence[Tensor]) -> Tensor:
    """Return the norm of each piece [M]; 0 if this process does not have any of its rows."""
    held = [piece for piece in pieces if piece.numel()]
    present = iter(torch_internals.foreach_norm(held) if held else ())
    nothing = torch.zeros((), dtype=pieces[0].dtype, device=pieces[0].device)
    return torch.stack([next(present) if piece.numel() else nothing for piece in pieces])


def _over_all_processes(norms: Tensor, like: Tensor) -> Tensor:
    """Return the norms of whole matrices from the norms of each process's rows."""
    if not isinstance(like, DTensor):
        return norms
    squares = norms.square()
    for dimension, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            all_reduce(squares, group=like.device_mesh.get_group(dimension))
    return squares.sqrt()
