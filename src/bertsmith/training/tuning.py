"""Fine-tuning's optimiser, with a learning rate for each depth, and its schedules."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bertsmith.ground.errors import UserError
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import Pooler
from bertsmith.recipe.finetuning import TuningOptimSection
from bertsmith.training.optimizers import hold_bias_corrections_at_one

SLANTED_RATIO = 32
"""How much smaller the lowest learning rate is than the peak (Howard & Ruder 2018, 3.2)."""


def build_tuning_optimizer(module: nn.Module, optim: TuningOptimSection) -> torch.optim.AdamW:
    """AdamW over what a module learns; a group's `lr_factor` is what the schedule's rate is multiplied by."""
    betas = (optim.beta1, optim.beta2)
    groups = _groups(module, optim)
    optimizer = torch.optim.AdamW(groups, lr=optim.peak_lr, betas=betas, eps=optim.eps, fused=True)
    if not optim.bias_correction:
        hold_bias_corrections_at_one(optimizer)
    return optimizer


def with_useful_warm_up(optim: TuningOptimSection, *, steps: int) -> TuningOptimSection:
    """The settings for a run of so many steps: a warm-up below one step would only make the first idle."""
    useful = steps > 1 and optim.warmup_share * steps >= 1
    return optim if useful else optim.model_copy(update={"warmup_share": 0.0})


def tuning_rate(progress: float, optim: TuningOptimSection) -> float:
    """The learning rate at this share of the run, from 0 at the first update to 1."""
    height = _height(progress, optim)
    if optim.schedule == "slanted":
        height = (1 + height * (SLANTED_RATIO - 1)) / SLANTED_RATIO
    return optim.peak_lr * height


def _height(progress: float, optim: TuningOptimSection) -> float:
    if progress < optim.warmup_share:
        return progress / optim.warmup_share
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "google" or progress >= 1:
        # optimization.py counts the decay from step 0, so the rate jumps down where the warm-up ends.
        return 1 - progress
    return (1 - progress) / (1 - optim.warmup_share)


def _groups(module: nn.Module, optim: TuningOptimSection) -> list[dict[str, Any]]:
    """Parameters that are not frozen, by learning rate and decay."""
    factors = dict(_factors(module, optim))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            # Biases, LayerNorms and the weights of a mix are the vectors; they never decay.
            decay = optim.weight_decay if parameter.dim() > 1 else 0.0
            factor = factors.get(parameter, optim.head_lr_factor)
            groups.setdefault((factor, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": optim.peak_lr * factor, "lr_factor": factor, "weight_decay": decay}
        for (factor, decay), parameters in groups.items()
    ]


def _factors(module: nn.Module, optim: TuningOptimSection) -> Iterator[tuple[nn.Parameter, float]]:
    """The factor of each pre-trained parameter: 1 for the last layer and the pooler, less for those below."""
    for part in module.modules():
        if isinstance(part, Encoder):
            for steps_down, level in enumerate(_levels(part, optim)):
                factor = optim.layer_decay**steps_down
                yield from ((parameter, factor) for each in level for parameter in each.parameters())
        elif isinstance(part, Pooler):
            yield from ((parameter, 1.0) for parameter in part.parameters())


def _levels(encoder: Encoder, optim: TuningOptimSection) -> list[list[nn.Module]]:
    """What has one learning rate, from the last layer down to the embeddings."""
    if optim.layer_decay != 1 and len(encoder.order) != len(encoder.blocks):
        what = f"layer_decay = {optim.layer_decay}, but this model's layers share their weights"
        raise UserError(what, where="optim.layer_decay", remedy="leave it at 1")
    blocks: list[list[nn.Module]] = [[block] for block in reversed(encoder.blocks)]
    return [[encoder.final_norm, *blocks[0]], *blocks[1:], [encoder.embeddings]]
