"""Initial weights as published: truncated normal matrices, zero biases, unit LayerNorms."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class InitialRule:
    """How matrices are drawn; the standard deviation may depend on the parameter's name."""

    std: Callable[[str], float]
    cut: float = 2.0
    """Draws beyond this many standard deviations are drawn again (TensorFlow's truncated_normal: 2)."""


def initialise(module: nn.Module, rule: InitialRule, stream: torch.Generator) -> None:
    """Draw every matrix, set biases to 0 and LayerNorm scales to 1, in the order of the parameters."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                _draw(parameter, rule.std(name), rule.cut, stream)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _draw(matrix: Tensor, std: float, cut: float, stream: torch.Generator) -> None:
    if math.isinf(cut):
        nn.init.normal_(matrix, 0.0, std, generator=stream)
    else:
        nn.init.trunc_normal_(matrix, 0.0, std, -cut * std, cut * std, generator=stream)
