"""Optimisers: their table, the parameters that decay, and the learning rate of each over the run.

Schedules are pure functions of a run's progress, from 0 at the first update to 1.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.model.encoder import Encoder, Stack, encoders_in
from bertsmith.model.heads import Pooler
from bertsmith.recipe.optim_section import Algorithm, OptimSection
from bertsmith.training.lamb import build_lamb
from bertsmith.training.muon import AdamWSettings, Muon

ENDLESS = 1e30
"""A step number so large that any power of a beta is 0 and that adding 1 does not change it in fp32."""
Order = Literal["as defined", "matrices first"]
"""Order of the parameters in the optimiser; the gradient norm's last bits depend on it."""
SLANTED_RATIO = 32
"""Ratio of the peak to the lowest learning rate (Howard & Ruder 2018, 3.2)."""


def build_adamw(groups: Iterable[dict[str, Any]], optim: OptimSection) -> torch.optim.AdamW:
    """Build Adam with decoupled weight decay for these groups."""
    betas = optim.beta1, optim.beta2
    optimizer = torch.optim.AdamW(groups, lr=optim.peak_lr, betas=betas, eps=optim.eps, fused=True)
    if not optim.bias_correction:
        hold_bias_corrections_at_one(optimizer)
    return optimizer


def hold_bias_corrections_at_one(optimizer: torch.optim.AdamW) -> None:
    """Set a step number so large that 1 - beta**step stays 1: BERT's Adam omits bias corrections."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.full((), ENDLESS, dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def build_muon(groups: Iterable[dict[str, Any]], optim: OptimSection) -> Muon:
    """Build Muon for the groups of hidden matrices, and Adam with decoupled weight decay for the others."""
    first = 0.0 if optim.bias_correction else ENDLESS
    return Muon(
        groups,
        lr=optim.peak_lr,
        momentum=optim.muon_momentum,
        scale=optim.muon_scale,
        adamw=AdamWSettings((optim.beta1, optim.beta2), optim.eps, first),
    )


class OptimizerSpec(NamedTuple):
    """Properties of an optimiser that the rest of the package depends on."""

    build: Callable[[list[dict[str, Any]], OptimSection], torch.optim.Optimizer]
    """Function that builds it from groups of parameters and the recipe's settings."""
    moments: int
    """Maximum number of fp32 values that it keeps for each weight."""
    by_matrix: Literal["none", "all", "hidden"]
    """Matrices that it updates as a whole; a group's `parts` is then how many are stacked in a parameter."""
    recordable: bool
    """True if its step can be recorded in a CUDA graph: it reads nothing back from the GPU."""
    corrects_bias: bool
    """True if it uses optim.bias_correction."""


OPTIMIZERS: dict[Algorithm, OptimizerSpec] = {
    "adamw": OptimizerSpec(build_adamw, moments=2, by_matrix="none", recordable=True, corrects_bias=True),
    # Its step counters are on the CPU, and a recorded step would not see them change.
    "lamb": OptimizerSpec(build_lamb, moments=2, by_matrix="all", recordable=False, corrects_bias=True),
    "muon": OptimizerSpec(build_muon, moments=2, by_matrix="hidden", recordable=True, corrects_bias=True),
}
"""A new optimiser is a file, an entry here and a name in the recipe's `Algorithm`."""


def build_optimizer(
    module: nn.Module, optim: OptimSection, *, order: Order = "as defined"
) -> torch.optim.Optimizer:
    """Build the recipe's optimiser for the trained parameters of a module; shard and move the module first.

    Parameters are grouped by learning rate, weight decay and, if the optimiser updates whole matrices, by
    how many are stacked in one. The schedule's learning rate is multiplied by a group's `lr_factor`.
    """
    spec, hidden = OPTIMIZERS[optim.algorithm], dict[nn.Parameter, Stack]()
    for encoder in encoders_in(module):
        hidden |= encoder.matrices()
    factors = dict(_lr_factors(module, optim))
    named = [each for each in module.named_parameters() if each[1].requires_grad]  # shared ones only once
    if spec.by_matrix == "hidden" and not any(parameter in hidden for _, parameter in named):
        what = f"{optim.algorithm} is for the matrices of the layers, but none of them is trained"
        raise UserError(what, key="optim.algorithm", remedy="set it to adamw")
    if order == "matrices first":
        named.sort(key=lambda each: each[1].dim() <= 1)
    by_settings: dict[tuple[int, float, float], list[nn.Parameter]] = {}
    for _, parameter in named:
        # optimization.py exempts biases and LayerNorms; with the weights of a mix, these are the vectors.
        decay = optim.weight_decay if parameter.dim() > 1 else 0.0
        factor = factors.get(parameter, optim.head_lr_factor)
        if parameter in hidden:
            factor *= optim.matrix_lr_factor
        by_settings.setdefault((_parts(parameter, hidden, spec), factor, decay), []).append(parameter)
    groups = [
        {
            "params": by_settings[key],
            "lr": optim.peak_lr * key[1],
            "lr_factor": key[1],
            "weight_decay": key[2],
        }
        | ({} if spec.by_matrix == "none" else {"parts": key[0]})
        # By parts, with 0 last: the gradient norm's last bits depend on this order, too.
        for key in sorted(by_settings, key=lambda key: key[0] or math.inf)
    ]
    return spec.build(groups, optim)


def _parts(parameter: nn.Parameter, hidden: Mapping[nn.Parameter, Stack], spec: OptimizerSpec) -> int:
    """Return the number of matrices that an optimiser sees in a parameter; 0 if it updates single weights."""
    if spec.by_matrix == "hidden":
        return hidden[parameter].computed if parameter in hidden else 0
    if spec.by_matrix == "all":
        return hidden.get(parameter, Stack()).published if parameter.dim() > 1 else 0
    return 1


def _lr_factors(module: nn.Module, optim: OptimSection) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield each encoder parameter's factor: 1 for the last layer and the pooler, less for lower ones."""
    for part in module.modules():
        if isinstance(part, Encoder):
            if optim.layer_decay != 1 and part.shares_layers:
                what = f"layer_decay = {optim.layer_decay}, but this model's layers share their weights"
                raise UserError(what, key="optim.layer_decay", remedy="keep it at 1")
            depths = part.depths()
            parts = [each for depth in depths for each in (depth.layer, *depth.also)]
            within = {parameter for each in parts for parameter in each.parameters()}
            assert within == set(part.parameters()), "each weight of an encoder is in one of its depths"
            for number, depth in enumerate(depths):
                factor = optim.layer_decay**number
                factor *= optim.embedding_lr_factor if number == len(depths) - 1 else 1.0
                for each in (depth.layer, *depth.also):
                    yield from ((parameter, factor) for parameter in each.parameters())
        elif isinstance(part, Pooler):
            yield from ((parameter, 1.0) for parameter in part.parameters())


def optimizer_text(optim: OptimSection) -> str:
    """Describe the optimiser, its learning rates and its schedule in words."""
    correction = f" {'with' if optim.bias_correction else 'without'} bias correction"
    text = optim.algorithm + (correction if OPTIMIZERS[optim.algorithm].corrects_bias else "")
    if optim.algorithm == "muon":
        rate = optim.peak_lr * optim.matrix_lr_factor
        text = (
            f"muon at {rate:g} (momentum {optim.muon_momentum:g}, scale {optim.muon_scale}) for the layers' "
            f"matrices, adamw at {optim.peak_lr:g}{correction} for the rest"
        )
    factors = {"embeddings": optim.embedding_lr_factor, "heads": optim.head_lr_factor}
    if optim.algorithm != "muon":
        factors["layers' matrices"] = optim.matrix_lr_factor
    text += "".join(f", {factor:g} x for the {part}" for part, factor in factors.items() if factor != 1)
    schedule = f"{optim.schedule} learning-rate line"
    if optim.schedule == "wsd":
        schedule += f" (flat until {optim.decay_from:.0%} of the run)"
    return f"{text}, {schedule}"


# ---- learning-rate schedules


def learning_rate(progress: float, optim: OptimSection) -> float:
    """Return the learning rate at this fraction of the run: linear warm-up, then the decay."""
    height = _height(progress, optim)
    if optim.schedule == "slanted":
        height = (1 + height * (SLANTED_RATIO - 1)) / SLANTED_RATIO
    return optim.peak_lr * height


def pretraining_rate(progress: float, optim: OptimSection) -> float:
    """Return `learning_rate`, computed in the order of operations that pre-training has always used."""
    if progress < optim.warmup_fraction and optim.schedule != "slanted":
        # The product comes first: a quotient first differs in the last bit, and a resumed run would show it.
        return optim.peak_lr * progress / optim.warmup_fraction
    return learning_rate(progress, optim)


def without_short_warmup(optim: OptimSection, *, steps: int) -> OptimSection:
    """Return the settings without a warm-up below one step, which would give the first step the rate 0."""
    useful = steps > 1 and optim.warmup_fraction * steps >= 1
    return optim if useful else optim.model_copy(update={"warmup_fraction": 0.0})


def _height(progress: float, optim: OptimSection) -> float:
    """Return the learning rate as a fraction of the peak."""
    if progress < optim.warmup_fraction:
        return progress / optim.warmup_fraction
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "wsd":
        return min(1.0, (1 - progress) / (1 - optim.decay_from))
    if optim.schedule == "google" or progress >= 1:
        # optimization.py counts the decay from step 0, so the rate jumps down at the end of the warm-up.
        return 1 - progress
    linear = (1 - progress) / (1 - optim.warmup_fraction)
    return (1 - math.cos(math.pi * linear)) / 2 if optim.schedule == "cosine" else linear
