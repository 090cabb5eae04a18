import pytest

from bertsmith.recipe.schema import OptimSection
from bertsmith.training.schedules import learning_rate

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


def test_the_continuous_schedule_falls_from_the_peak_to_nothing():
    optim = OptimSection(decay="continuous", warmup_share=0.2, peak_lr=2.0)
    rates = [learning_rate(progress, optim) for progress in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])


def test_a_constant_schedule_stays_at_the_peak_after_the_warm_up():
    optim = OptimSection(decay="constant", warmup_share=0.5, peak_lr=2.0)
    assert [learning_rate(progress, optim) for progress in (0.25, 0.5, 1.0)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("decay", ["google", "continuous", "constant"])
def test_without_a_warm_up_the_first_step_is_at_the_peak(decay):
    assert learning_rate(0.0, OptimSection(decay=decay, warmup_share=0.0, peak_lr=2.0)) == 2.0


@pytest.mark.parametrize("decay", ["google", "continuous"])
def test_a_run_that_is_all_warm_up_ends_at_nothing(decay):
    optim = OptimSection(decay=decay, warmup_share=1.0, peak_lr=2.0)
    assert [learning_rate(progress, optim) for progress in (0.5, 1.0)] == [1.0, 0.0]
