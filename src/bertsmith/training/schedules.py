"""The learning rate over a run, as a pure function of its progress from 0 at the first update to 1."""

from bertsmith.recipe.schema import OptimSection


def learning_rate(progress: float, optim: OptimSection) -> float:
    """The learning rate at this share of the run: a rising line through the warm-up, then the decay."""
    if progress < optim.warmup_share:
        return optim.peak_lr * progress / optim.warmup_share
    return optim.peak_lr * _left_of_the_peak(progress, optim)


def _left_of_the_peak(progress: float, optim: OptimSection) -> float:
    if optim.decay == "constant":
        return 1.0
    if optim.decay == "google" or progress >= 1:
        # optimization.py counts the decay from step 0, so the rate jumps down where the warm-up ends.
        return 1 - progress
    return (1 - progress) / (1 - optim.warmup_share)
