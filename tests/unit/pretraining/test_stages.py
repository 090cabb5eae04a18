"""The way through a budget: stages, masking levels, and where the next step lies."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.pretraining.stages import Budget
from bertsmith.recipe.load import load_recipe
from bertsmith.training.trainer import Progress

STAGES = (
    "examples.stages=[{fraction=0.9, length=128, predictions=20}, {fraction=0.1, length=512, predictions=77}]"
)
LEVELS = (
    'masking.levels=[{unit="token", fraction=0.5}, {unit="phrase", fraction=0.25}, '
    '{unit="entity", fraction=0.25}]'
)
BY_STAGE = "masking.levels_by=stage"


def budget_of(*overrides: str) -> Budget:
    return Budget(load_recipe("bert-base", overrides))


def walk(budget: Budget, *, tokens: int = 1000, seconds: float = 1.0) -> list[Progress]:
    """Where every step of a run begins, if each shows so many tokens and takes so many seconds."""
    begins, progress = [], Progress()
    while not budget.spent(progress):
        progress = budget.enter_stage(progress)
        begins.append(progress)
        progress = progress.after(tokens=tokens, seconds=progress.seconds + seconds)
    return begins


def stages(begins: list[Progress]) -> list[tuple[int, int]]:
    """Each stage and how many steps it has."""
    return [(stage, len(list(steps))) for stage, steps in groupby(begins, key=lambda each: each.stage)]


def test_nine_tenths_of_the_steps_are_short_and_the_last_tenth_long():
    begins = walk(budget_of("run.steps=200", STAGES))
    assert stages(begins) == [(0, 180), (1, 20)]
    assert [each.stage_step for each in begins] == [*range(180), *range(20)]


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 30, 70, 110, 1000])
def test_stages_are_cut_at_the_step_that_their_share_says(steps):
    budget = budget_of(f"run.steps={steps}", STAGES)
    late = [progress.step for progress in walk(budget) if progress.stage == 1]
    assert late == [step for step in range(steps) if 10 * step >= 9 * steps]


@given(steps=st.integers(1, 300), parts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_step_is_in_one_stage_and_stages_follow_each_other(steps, parts):
    shares = [part / sum(parts) for part in parts]
    listed = ", ".join(f"{{fraction={share!r}, length=128, predictions=20}}" for share in shares)
    begins = walk(budget_of(f"run.steps={steps}", f"examples.stages=[{listed}]"))
    assert [each.step for each in begins] == list(range(steps))
    assert [each.stage for each in begins] == sorted(each.stage for each in begins)
    borders = [sum(parts[: number + 1]) * steps / sum(parts) for number in range(len(parts))]
    for each in begins:
        assert each.step < borders[each.stage] + 1e-6
        assert each.stage == 0 or each.step >= borders[each.stage - 1] - 1e-6


def test_a_token_budget_ends_with_the_step_that_spends_it():
    begins = walk(budget_of("run.budget=tokens", "run.tokens=10_500", STAGES), tokens=1000)
    assert len(begins) == 11
    assert stages(begins) == [(0, 10), (1, 1)]  # at 9,000 tokens of 10,500 less than 90 % is spent


def test_a_budget_in_minutes_counts_the_seconds_of_the_position():
    budget = budget_of("run.budget=minutes", "run.minutes=1", STAGES)
    begins = walk(budget, seconds=5.0)
    assert stages(begins) == [(0, 11), (1, 1)]
    assert budget.fraction(Progress(step=3, seconds=30)) == 0.5
    assert budget.spent(Progress(seconds=61)) and not budget.spent(Progress(seconds=59))


def test_the_first_step_with_its_compiling_eats_no_warm_up():
    budget = budget_of("run.budget=minutes", "run.minutes=5")
    compiled = Progress().after(tokens=1000, seconds=30.0)
    assert budget.fraction(compiled) == 0.0
    assert budget.fraction(compiled.after(tokens=1000, seconds=165.0)) == 0.5
    assert budget.spent(compiled.after(tokens=1000, seconds=300.0))
    assert budget.spent(Progress().after(tokens=1000, seconds=301.0))


def test_a_clock_that_goes_back_does_not_bring_an_earlier_stage_back():
    budget = budget_of("run.budget=minutes", "run.minutes=1", STAGES)
    late = budget.enter_stage(Progress(seconds=55))
    assert (late.stage, late.stage_step) == (1, 0)
    assert budget.enter_stage(Progress(step=1, stage=1, stage_step=1, seconds=50)).stage == 1


def test_masking_levels_by_stage_follow_each_other_over_the_run():
    budget = budget_of("run.steps=16", LEVELS, BY_STAGE)
    seen = [budget.address(progress).progress for progress in walk(budget)]
    assert seen == [0.25] * 8 + [0.625] * 4 + [0.875] * 4


def test_mixed_levels_do_not_depend_on_progress():
    budget = budget_of("run.steps=16", LEVELS)
    assert {budget.address(progress).progress for progress in walk(budget)} == {0.0}


def test_an_address_is_the_stage_and_the_step_within_it():
    budget = budget_of("run.steps=20", STAGES)
    found = [(address.stage, address.step) for address in map(budget.address, walk(budget))]
    assert found == [(0, step) for step in range(18)] + [(1, 0), (1, 1)]


def test_a_step_adds_up_what_it_brought():
    progress = Progress(step=3, stage=1, stage_step=2, tokens=100, seconds=5.0, skipped=1, skipped_in_a_row=1)
    skipped = progress.after(tokens=10, seconds=6.0).with_outcome(progress, "spike")
    assert skipped == Progress(4, 1, 3, 110, 6.0, skipped=2, skipped_in_a_row=2)
    back = skipped.after(tokens=10, seconds=6.5).with_outcome(skipped, "taken back")
    assert back == Progress(5, 1, 4, 120, 6.5, skipped=3, skipped_in_a_row=2)
    used = back.after(tokens=10, seconds=7.0).with_outcome(back, "")
    assert used == Progress(6, 1, 5, 130, 7.0, skipped=3, skipped_in_a_row=0)


def test_shares_whose_sum_is_not_exact_end_where_they_should():
    assert 0.1 + 0.2 > 3 / 10  # what a plain comparison would stumble over
    listed = ", ".join(f"{{fraction={share}, length=128, predictions=20}}" for share in (0.1, 0.2, 0.7))
    budget = budget_of("run.steps=10", f"examples.stages=[{listed}]")
    assert budget.enter_stage(Progress(step=3, stage=1, stage_step=2)).stage == 2


def test_what_is_left_of_a_budget_in_minutes_is_what_the_clock_says():
    budget = budget_of("run.budget=minutes", "run.minutes=5")
    compiled = Progress().after(tokens=1000, seconds=90.0)
    assert budget.seconds_remaining(compiled) == 210.0
    assert budget.seconds_remaining(compiled.after(tokens=1000, seconds=301.0)) == 0.0


@pytest.mark.parametrize("budget", ["steps", "tokens"])
def test_other_budgets_go_on_as_fast_as_after_the_first_step(budget):
    budget = budget_of(f"run.budget={budget}", "run.steps=10", "run.tokens=10_000")
    compiled = Progress().after(tokens=1000, seconds=60.0)
    assert budget.seconds_remaining(compiled) == pytest.approx(540.0)  # nothing else is known yet
    third = compiled.after(tokens=1000, seconds=62.0).after(tokens=1000, seconds=64.0)
    assert budget.seconds_remaining(third) == pytest.approx(7 * 2.0)


def test_a_budget_in_minutes_leaves_time_for_the_end_of_the_run():
    budget = budget_of("run.budget=minutes", "run.minutes=1", STAGES)
    budget.ending_seconds = 12.0
    begins = walk(budget, seconds=5.0)
    assert begins[-1].seconds + 5.0 <= 60 - 12
    assert begins[-1].seconds + 10.0 > 60 - 12  # but no more than that
    budget.ending_seconds = 1000.0
    assert budget.step_limit == 30  # never all of it


def test_a_step_that_would_end_too_late_is_not_begun():
    budget = budget_of("run.budget=minutes", "run.minutes=1")
    after_two = Progress(step=2, seconds=45, first_step_seconds=25)
    assert budget.step_seconds(after_two) == 20 and budget.spent(after_two)
    assert not budget.spent(
        Progress(step=1, seconds=45, first_step_seconds=45)
    )  # most of it may be compiling
    budget.ready_seconds = 5.0
    assert budget.spent(Progress(step=1, seconds=45, first_step_seconds=45))


def test_how_many_steps_fit_is_known_after_the_first():
    budget = budget_of("run.budget=minutes", "run.minutes=1")
    budget.ready_seconds = 8.0
    assert budget.steps_that_fit(Progress(step=1, seconds=10, first_step_seconds=10)) == 26
    assert (
        budget_of("run.steps=7").steps_that_fit(Progress(step=1, seconds=10, first_step_seconds=10)) is None
    )
