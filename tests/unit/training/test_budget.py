"""What ends a run: steps, tokens, minutes, or the epochs of a task."""

import pytest

from bertsmith.training.budget import Budget, Epochs, Minutes, Steps, Tokens, Work
from bertsmith.training.trainer import Progress


def walk(budget: Budget, *, seconds: float) -> list[Progress]:
    """Where every step of a run begins, if each takes so many seconds."""
    begins, progress = [], Progress()
    while not budget.spent(progress):
        begins.append(progress)
        progress = progress.after(tokens=1000, seconds=progress.seconds + seconds)
    return begins


def test_minutes_count_the_seconds_of_the_position():
    budget = Minutes(1)
    assert len(walk(budget, seconds=5.0)) == 12
    assert budget.fraction(Progress(step=3, seconds=30)) == 0.5
    assert budget.spent(Progress(seconds=61)) and not budget.spent(Progress(seconds=59))


def test_the_first_step_with_its_compiling_eats_no_warm_up():
    budget = Minutes(5)
    compiled = Progress().after(tokens=1000, seconds=30.0)
    assert budget.fraction(compiled) == 0.0
    assert budget.fraction(compiled.after(tokens=1000, seconds=165.0)) == 0.5
    assert budget.spent(compiled.after(tokens=1000, seconds=300.0))
    assert budget.spent(Progress().after(tokens=1000, seconds=301.0))


def test_a_step_adds_up_what_it_brought():
    progress = Progress(step=3, stage=1, stage_step=2, tokens=100, seconds=5.0, skipped=1, skipped_in_a_row=1)
    skipped = progress.after(tokens=10, seconds=6.0).with_outcome(progress, "spike")
    assert skipped == Progress(4, 1, 3, 110, 6.0, skipped=2, skipped_in_a_row=2)
    back = skipped.after(tokens=10, seconds=6.5).with_outcome(skipped, "taken back")
    assert back == Progress(5, 1, 4, 120, 6.5, skipped=3, skipped_in_a_row=2)
    used = back.after(tokens=10, seconds=7.0).with_outcome(back, "")
    assert used == Progress(6, 1, 5, 130, 7.0, skipped=3, skipped_in_a_row=0)


def test_what_is_left_of_minutes_is_what_the_clock_says():
    compiled = Progress().after(tokens=1000, seconds=90.0)
    assert Minutes(5).seconds_left(compiled) == 210.0
    assert Minutes(5).seconds_left(compiled.after(tokens=1000, seconds=301.0)) == 0.0


@pytest.mark.parametrize("budget", [Steps(10), Tokens(10_000)])
def test_other_budgets_go_on_as_fast_as_after_the_first_step(budget):
    compiled = Progress().after(tokens=1000, seconds=60.0)
    assert budget.seconds_left(compiled) == pytest.approx(540.0)  # nothing else is known yet
    third = compiled.after(tokens=1000, seconds=62.0).after(tokens=1000, seconds=64.0)
    assert budget.seconds_left(third) == pytest.approx(7 * 2.0)


def test_minutes_leave_time_for_the_end_of_the_run():
    budget = Minutes(1, ending_seconds=12.0)
    begins = walk(budget, seconds=5.0)
    assert begins[-1].seconds + 5.0 <= 60 - 12
    assert begins[-1].seconds + 10.0 > 60 - 12  # but no more than that
    budget.ending_seconds = 1000.0
    assert budget.step_limit == 30  # never all of it


def test_a_step_that_would_end_too_late_is_not_begun():
    budget = Minutes(1)
    after_two = Progress(step=2, seconds=45, first_step_seconds=25)
    assert budget.step_seconds(after_two) == 20 and budget.spent(after_two)
    after_one = Progress(step=1, seconds=45, first_step_seconds=45)
    assert not budget.spent(after_one)  # most of it may be compiling
    budget.ready_seconds = 5.0
    assert budget.spent(after_one)


def test_how_many_steps_fit_is_known_after_the_first():
    budget = Minutes(1)
    after_one = Progress(step=1, seconds=10, first_step_seconds=10)
    assert budget.steps_that_fit(after_one) is None  # it may be compiling
    budget.ready_seconds = 8.0
    assert budget.steps_that_fit(after_one) == 26


def test_epochs_end_with_their_steps_or_with_their_minutes_whichever_come_first():
    work = Work(one_step=30.0, evaluation_steps=frozenset(), one_evaluation=0, end=0)
    late = Progress(step=2, seconds=119.0, first_step_seconds=1.0)
    assert not Epochs(10, work).spent(late) and Epochs(2, work).spent(late)
    assert Epochs(10, work, Minutes(2)).spent(late)
    assert Epochs(10, work, Minutes(1e-6)).fraction(Progress()) == 0.0  # one step is always taken
    assert Epochs(10, work, Minutes(2)).by_clock and not Epochs(10, work).by_clock


def test_evaluations_count_in_the_time_that_is_left():
    work = Work(one_step=30.0, evaluation_steps=frozenset({5}), one_evaluation=100, end=200)
    assert work.remaining(1, 10) == pytest.approx((600 - 30) / 30)
    assert work.remaining(5, 10) == pytest.approx((600 - 150) / 150)  # its evaluation is still to come
    assert work.remaining(6, 10) == pytest.approx((600 - 280) / 280)
    assert work.remaining(10, 10) == pytest.approx(200 / 400)
    after = Progress(step=6, seconds=28.0)
    assert Epochs(10, work).shown(after) == pytest.approx(280 / 600)
    assert Epochs(10, work).seconds_left(after) == pytest.approx(32.0)
