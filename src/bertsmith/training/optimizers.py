"""Optimisers: which parameters decay, and Adam or LAMB as the recipe asks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bertsmith.recipe.schema import OptimSection
from bertsmith.training.lamb import Lamb

ENDLESS = 1e30
"""A step number that no power of a beta survives and that one more step does not change in fp32."""


def build_optimizer(module: nn.Module, optim: OptimSection) -> torch.optim.Optimizer:
    """The recipe's optimiser over what a module trains; shard and move the module first."""
    if optim.algorithm == "lamb":
        return Lamb(_lamb_groups(module, optim), **_common(optim), bias_correction=optim.bias_correction)
    optimizer = torch.optim.AdamW(_decay_groups(module, optim), **_common(optim), fused=True)
    if not optim.bias_correction:
        hold_bias_corrections_at_one(optimizer)
    return optimizer


def _common(optim: OptimSection) -> dict[str, Any]:
    return {"lr": optim.peak_lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}


def _decay_groups(module: nn.Module, optim: OptimSection) -> list[dict[str, Any]]:
    named = list(_trained(module))
    decayed = [parameter for _, parameter, decays in named if decays]
    exempt = [parameter for _, parameter, decays in named if not decays]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _lamb_groups(module: nn.Module, optim: OptimSection) -> list[dict[str, Any]]:
    """As for Adam, with the number of matrices in each parameter; 0 leaves the trust ratio out."""
    by_parts: dict[int, list[nn.Parameter]] = {1: [], 3: [], 0: []}
    for name, parameter, decays in _trained(module):
        # Query, key and value are one parameter of ours and three of the published models.
        parts = 3 if name.endswith("attention.project.weight") else 1
        by_parts[parts if decays else 0].append(parameter)
    return [
        {"params": parameters, "parts": parts, "weight_decay": optim.weight_decay if parts else 0.0}
        for parts, parameters in by_parts.items()
        if parameters
    ]


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Each parameter that is not frozen, once: its name, itself, and whether it decays."""
    seen: set[nn.Parameter] = set()
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                # optimization.py leaves out LayerNorms and every bias, the output bias of the MLM head too.
                decays = not isinstance(owner, nn.LayerNorm) and "bias" not in name
                yield f"{path}.{name}", parameter, decays


def hold_bias_corrections_at_one(optimizer: torch.optim.AdamW) -> None:
    """Begin at a step so large that 1 - beta**step is 1 and stays it: BERT's Adam has no corrections."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.full((), ENDLESS, dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
