"""Counts and sums of an objective by name, as its declaration has them."""

import torch
from torch import Tensor

from bertsmith.objectives.pretraining_objective import PretrainingObjective


def scales_of(objective: PretrainingObjective, counts: dict[str, float]) -> Tensor:
    """What the sums of its loss are multiplied by; 0 where there is none of a kind."""
    wanted = [counts.get(name, 0.0) for name in objective.declared.counts]
    return torch.tensor([1 / count if count else 0.0 for count in wanted])


def named(objective: PretrainingObjective, sums: Tensor) -> dict[str, float]:
    """Its sums by name."""
    return dict(zip(objective.declared.sums, sums.tolist(), strict=True))


def means_of(objective: PretrainingObjective, sums: Tensor, counts: dict[str, float]) -> dict[str, float]:
    """Its metrics by its sums and these counts."""
    empty = dict.fromkeys(objective.declared.counts, 0.0)
    return objective.declared.means({**empty, **counts, **named(objective, sums)})
