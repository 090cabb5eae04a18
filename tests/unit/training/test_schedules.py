import random

import pytest

from bertsmith.recipe.finetuning_schema import FinetuningOptimSection
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.optimizers import learning_rate, pretraining_rate

TOTAL, WARMUP = 1_000_000, 10_000


def published(step: int) -> float:
    """create_optimizer of optimization.py, step by step."""
    if step < WARMUP:
        return 1e-4 * step / WARMUP
    return (1e-4 - 0.0) * (1 - min(step, TOTAL) / TOTAL) + 0.0


@pytest.mark.parametrize("step", [0, 1, 5_000, 9_999, 10_000, 10_001, 500_000, 999_999, 1_000_000])
def test_the_google_schedule_is_that_of_the_published_code(step):
    assert learning_rate(step / TOTAL, OptimSection()) == pytest.approx(published(step), rel=1e-12)


def test_the_google_schedule_jumps_where_the_warm_up_ends():
    before, after = (learning_rate(step / TOTAL, OptimSection()) for step in (WARMUP - 1, WARMUP))
    assert before == pytest.approx(0.9999e-4)
    assert after == pytest.approx(0.99e-4)


def test_the_linear_schedule_falls_from_the_peak_to_nothing():
    optim = OptimSection(schedule="linear", warmup_fraction=0.2, peak_lr=2.0)
    rates = [learning_rate(progress, optim) for progress in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])


def test_a_constant_schedule_stays_at_the_peak_after_the_warm_up():
    optim = OptimSection(schedule="constant", warmup_fraction=0.5, peak_lr=2.0)
    assert [learning_rate(progress, optim) for progress in (0.25, 0.5, 1.0)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["google", "linear", "constant"])
def test_without_a_warm_up_the_first_step_is_at_the_peak(schedule):
    assert learning_rate(0.0, OptimSection(schedule=schedule, warmup_fraction=0.0, peak_lr=2.0)) == 2.0


@pytest.mark.parametrize("schedule", ["google", "linear"])
def test_a_run_that_is_all_warm_up_ends_at_nothing(schedule):
    optim = OptimSection(schedule=schedule, warmup_fraction=1.0, peak_lr=2.0)
    assert [learning_rate(progress, optim) for progress in (0.5, 1.0)] == [1.0, 0.0]


def pretraining_formula(progress, peak, warmup, schedule):
    """What pre-training has computed since its first release, operation by operation."""
    if progress < warmup:
        return peak * progress / warmup
    if schedule == "constant":
        return peak * 1.0
    if schedule == "google" or progress >= 1:
        return peak * (1 - progress)
    return peak * ((1 - progress) / (1 - warmup))


def finetuning_formula(progress, peak, warmup, schedule):
    """What fine-tuning has computed since its first release: the height first, then the peak."""
    if progress < warmup:
        height = progress / warmup
    elif schedule == "constant":
        height = 1.0
    elif schedule == "google" or progress >= 1:
        height = 1 - progress
    else:
        height = (1 - progress) / (1 - warmup)
    if schedule == "slanted":
        height = (1 + height * 31) / 32
    return peak * height


def settings(schedules):
    """Seeded draws of progress, peak and warm-up for each schedule."""
    stream = random.Random(13)
    for number in range(3000):
        steps = stream.randint(1, 1_000_000)
        progress = stream.randint(0, steps) / steps
        peak, warmup = 10 ** stream.uniform(-6, -1), stream.choice([0.0, 0.01, 0.06, 0.1, 0.3, 1.0])
        yield progress, peak, warmup, schedules[number % len(schedules)]


def test_a_pretraining_rate_keeps_its_bits():
    for progress, peak, warmup, schedule in settings(["google", "linear", "constant"]):
        optim = OptimSection(peak_lr=peak, warmup_fraction=warmup, schedule=schedule)
        assert pretraining_rate(progress, optim) == pretraining_formula(progress, peak, warmup, schedule)


def test_a_finetuning_rate_keeps_its_bits():
    for progress, peak, warmup, schedule in settings(["google", "linear", "slanted", "constant"]):
        optim = FinetuningOptimSection(peak_lr=peak, warmup_fraction=warmup, schedule=schedule)
        assert learning_rate(progress, optim) == finetuning_formula(progress, peak, warmup, schedule)


def test_a_slanted_pretraining_rate_is_that_of_finetuning():
    optim = OptimSection(schedule="slanted", warmup_fraction=0.3)
    for progress in (0.0, 0.1, 0.3, 0.7, 1.0):
        assert pretraining_rate(progress, optim) == learning_rate(progress, optim)


def test_warmup_stable_decay_is_flat_between_two_lines():
    optim = OptimSection(schedule="wsd", warmup_fraction=0.2, decay_from=0.6, peak_lr=2.0)
    rates = [pretraining_rate(progress, optim) for progress in (0.0, 0.1, 0.2, 0.6, 0.7, 0.8, 1.0)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 2.0, 1.5, 1.0, 0.0])


def test_a_cosine_falls_slowly_at_both_ends():
    optim = OptimSection(schedule="cosine", warmup_fraction=0.2, peak_lr=2.0)
    rates = [pretraining_rate(progress, optim) for progress in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert rates == pytest.approx([1.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0])
