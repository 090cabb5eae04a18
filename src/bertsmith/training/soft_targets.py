"""Soft targets: how far predictions are from a teacher's (Hinton et al. 2015).

Shapes: R rows, V classes or words.
"""

from torch import Tensor


def soft_losses(ours_RV: Tensor, theirs_RV: Tensor, temperature: float) -> Tensor:
    """The divergence of each row's predictions from the teacher's [R], at a temperature, times its square.

    The square keeps gradients as large as those of hard targets, whatever the temperature.
    """
    ours_RV = (ours_RV.float() / temperature).log_softmax(-1)
    theirs_RV = (theirs_RV.float() / temperature).log_softmax(-1)
    return divergence(theirs_RV, ours_RV) * temperature**2


def divergence(theirs: Tensor, ours: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of log-probabilities from the teacher's, over the last dimension."""
    return (theirs.exp() * (theirs - ours)).sum(-1)
