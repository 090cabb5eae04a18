"""Optimisers: Adam or LAMB, which parameters decay, and at which learning rate each is trained."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import Pooler
from bertsmith.recipe.schema import OptimSection
from bertsmith.training.lamb import Lamb

ENDLESS = 1e30
"""A step number that no power of a beta survives and that one more step does not change in fp32."""
Order = Literal["as defined", "matrices first"]
"""In which order parameters stand in the optimiser: the gradient norm's last bits depend on it."""
LAMB_PARTS = (1, 3, 0)
"""Matrices stacked in a parameter, in the order of the groups: one, query with key and value, a vector."""


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
