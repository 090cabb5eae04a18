"""Learning-rate schedules, as pure functions of a run's progress from 0 at the first update to 1."""

from bertsmith.recipe.schema import OptimSection

SLANTED_RATIO = 32
"""How much smaller the lowest learning rate is than the peak (Howard & Ruder 2018, 3.2)."""


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
