"""Soft targets: the divergence of predictions from a teacher's (Hinton et al. 2015).

Shapes: R rows, V classes or words.
"""

from torch import Tensor


def soft_losses(ours_RV: Tensor, theirs_RV: Tensor, temperature: float) -> Tensor:
    """Return each row's divergence from the teacher [R] at a temperature, times the temperature squared.

    The square keeps gradients as large as with hard targets at any temperature.
    """
    ours_RV = (ours_RV.float() / temperature).log_softmax(-1)
    theirs_RV = (theirs_RV.float() / temperature).log_softmax(-1)
    return divergence(theirs_RV, ours_RV) * temperature**2


def divergence(theirs: Tensor, ours: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of log-probabilities from the teacher's, over the last axis."""
    return (theirs.exp() * (theirs - ours)).sum(-1)
