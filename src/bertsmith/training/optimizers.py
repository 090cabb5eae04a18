"""Optimisers: Adam or LAMB, which parameters decay, and the learning rate of each over the run.

Schedules are pure functions of a run's progress, from 0 at the first update to 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor, Shard

from bertsmith.core.errors import UserError
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import Pooler
from bertsmith.model.torch_internals import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
)
from bertsmith.recipe.schema import OptimSection

ENDLESS = 1e30
"""A step number that no power of a beta survives and that one more step does not change in fp32."""
Order = Literal["as defined", "matrices first"]
"""In which order parameters stand in the optimiser: the gradient norm's last bits depend on it."""
LAMB_PARTS = (1, 3, 0)
"""Matrices stacked in a parameter, in the order of the groups: one, query with key and value, a vector."""
SLANTED_RATIO = 32
"""How much smaller the lowest learning rate is than the peak (Howard & Ruder 2018, 3.2)."""


def build_optimizer(
    module: nn.Module, optim: OptimSection, *, order: Order = "as defined"
) -> torch.optim.Optimizer:
    """The recipe's optimiser over what a module trains; shard and move the module first.

    A group's `lr_factor` is what the schedule's learning rate is multiplied by.
    """
    groups = _groups(module, optim, order)
    common: dict[str, Any] = {"lr": optim.peak_lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    if optim.algorithm == "lamb":
        return Lamb(groups, **common, bias_correction=optim.bias_correction)
    optimizer = torch.optim.AdamW(groups, **common, fused=True)
    if not optim.bias_correction:
        hold_bias_corrections_at_one(optimizer)
    return optimizer


def _groups(module: nn.Module, optim: OptimSection, order: Order) -> list[dict[str, Any]]:
    """Parameters that are not frozen, by learning rate, weight decay and, for LAMB, stacked matrices."""
    factors = dict(_lr_factors(module, optim))
    named = [each for each in module.named_parameters() if each[1].requires_grad]  # a shared one comes once
    if order == "matrices first":
        named.sort(key=lambda each: each[1].dim() <= 1)
    groups: dict[tuple[int, float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        # optimization.py exempts biases and LayerNorms; with the weights of a mix, these are the vectors.
        decay = optim.weight_decay if parameter.dim() > 1 else 0.0
        factor = factors.get(parameter, optim.head_lr_factor)
        parts = _stacked_matrices(name, parameter) if optim.algorithm == "lamb" else 1
        groups.setdefault((parts, factor, decay), []).append(parameter)
    # Under LAMB the order of groups is by parts, for the same reason as in `Order`.
    keys = sorted(groups, key=lambda key: LAMB_PARTS.index(key[0]))
    return [
        {"params": groups[key], "lr": optim.peak_lr * key[1], "lr_factor": key[1], "weight_decay": key[2]}
        | ({"parts": key[0]} if optim.algorithm == "lamb" else {})
        for key in keys
    ]


def _stacked_matrices(name: str, parameter: nn.Parameter) -> int:
    """How many matrices a parameter holds, for LAMB's trust ratio; 0 for vectors, whose ratio stays 1."""
    if parameter.dim() <= 1:
        return 0
    # Query, key and value are one parameter of ours and three of the published models.
    return 3 if name.endswith("attention.project.weight") else 1


def _lr_factors(module: nn.Module, optim: OptimSection) -> Iterator[tuple[nn.Parameter, float]]:
    """The factor of each encoder parameter: 1 for the last layer and the pooler, less for those below."""
    for part in module.modules():
        if isinstance(part, Encoder):
            for depth, level in enumerate(_levels(part, optim)):
                factor = optim.layer_decay**depth
                yield from ((parameter, factor) for each in level for parameter in each.parameters())
        elif isinstance(part, Pooler):
            yield from ((parameter, 1.0) for parameter in part.parameters())


def _levels(encoder: Encoder, optim: OptimSection) -> list[list[nn.Module]]:
    """What has one learning rate, from the last layer down to the embeddings."""
    if optim.layer_decay != 1 and len(encoder.order) != len(encoder.blocks):
        what = f"layer_decay = {optim.layer_decay}, but this model's layers share their weights"
        raise UserError(what, where="optim.layer_decay", remedy="leave it at 1")
    blocks: list[list[nn.Module]] = [[block] for block in reversed(encoder.blocks)]
    return [[encoder.final_norm, *blocks[0]], *blocks[1:], [encoder.embeddings]]


def hold_bias_corrections_at_one(optimizer: torch.optim.AdamW) -> None:
    """Begin at a step so large that 1 - beta**step is 1 and stays it: BERT's Adam has no corrections."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.full((), ENDLESS, dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


# ---- LAMB


class Lamb(torch.optim.Optimizer):
    """Adam with decoupled weight decay and a trust ratio ||w|| / ||update|| for each matrix.

    You et al. 2019, as ALBERT uses it. Everything is computed on what this process holds of a parameter: all
    of it, or under FSDP its shard of the rows. Only the norms need the other processes, and one small sum
    brings them together.

    A group's `parts` says how many matrices of equal height are stacked in each of its parameters; 0 leaves
    the ratio at 1, as published for LayerNorms and biases. ALBERT's code has no bias corrections.
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
                "step": torch.zeros((), dtype=torch.float32),  # on the CPU: reading it waits for no GPU
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients at hand."""
        assert closure is None, "LAMB looks at the gradients once"
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if parameters:
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        weights = [_held(each) for each in parameters]
        updates = self._adam_updates(parameters, group)
        foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["parts"]:
            _lengthen(updates, parameters, group["parts"])
        foreach_add_(weights, updates, alpha=-group["lr"])

    def _adam_updates(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The running mean of the gradients over the root of that of their squares."""
        beta1, beta2 = group["betas"]
        gradients = [_held(each.grad) for each in parameters if each.grad is not None]
        means = [_held(self.state[each]["exp_avg"]) for each in parameters]
        squares = [_held(self.state[each]["exp_avg_sq"]) for each in parameters]
        foreach_lerp_(means, gradients, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        # m / c1 / (sqrt(v / c2) + eps), written so that no corrections (both 1) cost nothing.
        first, second = self._corrections(parameters, group)
        roots = foreach_sqrt(squares)
        foreach_add_(roots, group["eps"] * second**0.5)
        updates = list(foreach_div(means, roots))
        if group["bias_correction"]:
            foreach_mul_(updates, second**0.5 / first)
        return updates

    def _corrections(self, parameters: list[Tensor], group: dict[str, Any]) -> tuple[float, float]:
        """What the two running means are divided by for having started at 0."""
        steps = [self.state[each]["step"] for each in parameters]
        foreach_add_(steps, 1)
        if not group["bias_correction"]:
            return 1.0, 1.0
        beta1, beta2 = group["betas"]
        step = steps[0].item()  # a parameter is trained from the first step on or never
        return 1 - beta1**step, 1 - beta2**step


def _held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lengthen(updates: Sequence[Tensor], parameters: Sequence[Tensor], parts: int) -> None:
    """Multiply the update of each matrix by its trust ratio, 1 where either norm is 0."""
    weight_pieces, update_pieces = [], []
    for update, parameter in zip(updates, parameters, strict=True):
        for rows in _rows_of_parts(parameter, parts):
            weight_pieces.append(_held(parameter)[rows])
            update_pieces.append(update[rows])
    norms_2M = torch.stack((_norms(weight_pieces), _norms(update_pieces)))
    of_weights_M, of_updates_M = _over_all_processes(norms_2M, parameters[0]).unbind()
    both_M = (of_weights_M > 0) & (of_updates_M > 0)
    ratios_M = torch.where(both_M, of_weights_M / of_updates_M, 1.0)
    foreach_mul_(update_pieces, list(ratios_M.unbind()))


def _rows_of_parts(parameter: Tensor, parts: int) -> list[slice]:
    """For each stacked matrix, its rows among those that this process holds."""
    if parts == 1:
        return [slice(None)]
    first, count = _first_row(parameter), _held(parameter).shape[0]
    assert parameter.shape[0] % parts == 0, "stacked matrices are of equal height"
    height = parameter.shape[0] // parts
    edges = [min(max(part * height - first, 0), count) for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in zip(edges[:-1], edges[1:], strict=True)]


def _first_row(parameter: Tensor) -> int:
    """Where the rows that this process holds begin in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    first, left = 0, parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "FSDP shards rows"
            # Sharding follows torch.chunk: equal shards rounded up, the last ones smaller or empty.
            shard = -(-left // parameter.device_mesh.size(dimension))
            before = min(shard * parameter.device_mesh.get_local_rank(dimension), left)
            first, left = first + before, min(shard, left - before)
    return first


def _norms(pieces: Sequence[Tensor]) -> Tensor:
    """The norm of each piece [M]; a process may hold no row of some."""
    held = [piece for piece in pieces if piece.numel()]
    present = iter(foreach_norm(held) if held else ())
    nothing = torch.zeros((), dtype=pieces[0].dtype, device=pieces[0].device)
    return torch.stack([next(present) if piece.numel() else nothing for piece in pieces])


def _over_all_processes(norms: Tensor, like: Tensor) -> Tensor:
    """The norms of whole matrices from those of the rows that each process holds."""
    if not isinstance(like, DTensor):
        return norms
    squares = norms.square()
    for dimension, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            all_reduce(squares, group=like.device_mesh.get_group(dimension))
    return squares.sqrt()


# ---- learning-rate schedules


def learning_rate(progress: float, optim: OptimSection) -> float:
    """The learning rate at this fraction of the run: a rising line through the warm-up, then the decay."""
    height = _height(progress, optim)
    if optim.schedule == "slanted":
        height = (1 + height * (SLANTED_RATIO - 1)) / SLANTED_RATIO
    return optim.peak_lr * height


def pretraining_rate(progress: float, optim: OptimSection) -> float:
    """The same learning rate, in the order of operations that runs of pre-training have always had."""
    if progress < optim.warmup_fraction and optim.schedule != "slanted":
        # The product comes first: a quotient first differs in the last bit, and a resumed run would show it.
        return optim.peak_lr * progress / optim.warmup_fraction
    return learning_rate(progress, optim)


def without_short_warmup(optim: OptimSection, *, steps: int) -> OptimSection:
    """The settings for a run of so many steps: a warm-up below one step would only make the first idle."""
    useful = steps > 1 and optim.warmup_fraction * steps >= 1
    return optim if useful else optim.model_copy(update={"warmup_fraction": 0.0})


def _height(progress: float, optim: OptimSection) -> float:
    """The rate as a fraction of the peak."""
    if progress < optim.warmup_fraction:
        return progress / optim.warmup_fraction
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "google" or progress >= 1:
        # optimization.py counts the decay from step 0, so the rate jumps down where the warm-up ends.
        return 1 - progress
    return (1 - progress) / (1 - optim.warmup_fraction)
