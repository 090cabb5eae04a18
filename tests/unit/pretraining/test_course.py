"""The way through a budget: stages, masking levels, and where the next step lies."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.pretraining.course import Course, Position
from bertsmith.recipe.load import load_recipe

STAGES = "examples.stages=[{share=0.9, length=128, predictions=20}, {share=0.1, length=512, predictions=77}]"
LEVELS = (
    'masking.levels=[{unit="token", share=0.5}, {unit="phrase", share=0.25}, {unit="entity", share=0.25}]'
)
BY_STAGE = "masking.levels_by=stage"


def course_of(*overrides: str) -> Course:
    return Course(load_recipe("bert-base", overrides))


def walk(course: Course, *, tokens: int = 1000, seconds: float = 1.0) -> list[Position]:
    """Where every step of a run begins, if each shows so many tokens and takes so many seconds."""
    begins, position = [], Position()
    while not course.arrived(position):
        position = course.entered(position)
        begins.append(position)
        position = position.after(tokens=tokens, seconds=position.seconds + seconds)
    return begins


def stages(begins: list[Position]) -> list[tuple[int, int]]:
    """Each stage and how many steps it has."""
    return [(stage, len(list(steps))) for stage, steps in groupby(begins, key=lambda each: each.stage)]


def test_nine_tenths_of_the_steps_are_short_and_the_last_tenth_long():
    begins = walk(course_of("run.steps=200", STAGES))
    assert stages(begins) == [(0, 180), (1, 20)]
    assert [each.stage_step for each in begins] == [*range(180), *range(20)]


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 30, 70, 110, 1000])
def test_stages_are_cut_at_the_step_that_their_share_says(steps):
    course = course_of(f"run.steps={steps}", STAGES)
    late = [position.step for position in walk(course) if position.stage == 1]
    assert late == [step for step in range(steps) if 10 * step >= 9 * steps]


@given(steps=st.integers(1, 300), parts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_step_is_in_one_stage_and_stages_follow_each_other(steps, parts):
    shares = [part / sum(parts) for part in parts]
    listed = ", ".join(f"{{share={share!r}, length=128, predictions=20}}" for share in shares)
    begins = walk(course_of(f"run.steps={steps}", f"examples.stages=[{listed}]"))
    assert [each.step for each in begins] == list(range(steps))
    assert [each.stage for each in begins] == sorted(each.stage for each in begins)
    borders = [sum(parts[: number + 1]) * steps / sum(parts) for number in range(len(parts))]
    for each in begins:
        assert each.step < borders[each.stage] + 1e-6
        assert each.stage == 0 or each.step >= borders[each.stage - 1] - 1e-6


def test_a_token_budget_ends_with_the_step_that_spends_it():
    begins = walk(course_of("run.budget=tokens", "run.tokens=10_500", STAGES), tokens=1000)
    assert len(begins) == 11
    assert stages(begins) == [(0, 10), (1, 1)]  # at 9,000 tokens of 10,500 less than 90 % is spent


def test_a_budget_in_minutes_counts_the_seconds_of_the_position():
    course = course_of("run.budget=minutes", "run.minutes=1", STAGES)
    begins = walk(course, seconds=5.0)
    assert stages(begins) == [(0, 11), (1, 1)]
    assert course.progress(Position(step=3, seconds=30)) == 0.5
    assert course.arrived(Position(seconds=61)) and not course.arrived(Position(seconds=59))


def test_the_first_step_with_its_compiling_eats_no_warm_up():
    course = course_of("run.budget=minutes", "run.minutes=5")
    compiled = Position().after(tokens=1000, seconds=30.0)
    assert course.progress(compiled) == 0.0
    assert course.progress(compiled.after(tokens=1000, seconds=165.0)) == 0.5
    assert course.arrived(compiled.after(tokens=1000, seconds=300.0))
    assert course.arrived(Position().after(tokens=1000, seconds=301.0))


def test_a_clock_that_goes_back_does_not_bring_an_earlier_stage_back():
    course = course_of("run.budget=minutes", "run.minutes=1", STAGES)
    late = course.entered(Position(seconds=55))
    assert (late.stage, late.stage_step) == (1, 0)
    assert course.entered(Position(step=1, stage=1, stage_step=1, seconds=50)).stage == 1


def test_masking_levels_by_stage_follow_each_other_over_the_run():
    course = course_of("run.steps=16", LEVELS, BY_STAGE)
    seen = [course.address(position).progress for position in walk(course)]
    assert seen == [0.25] * 8 + [0.625] * 4 + [0.875] * 4


def test_mixed_levels_do_not_depend_on_progress():
    course = course_of("run.steps=16", LEVELS)
    assert {course.address(position).progress for position in walk(course)} == {0.0}


def test_an_address_is_the_stage_and_the_step_within_it():
    course = course_of("run.steps=20", STAGES)
    found = [(address.stage, address.step) for address in map(course.address, walk(course))]
    assert found == [(0, step) for step in range(18)] + [(1, 0), (1, 1)]


def test_a_step_adds_up_what_it_brought():
    position = Position(step=3, stage=1, stage_step=2, tokens=100, seconds=5.0, skipped=1, skipped_in_a_row=1)
    skipped = position.after(tokens=10, seconds=6.0).judged(position, "spike")
    assert skipped == Position(4, 1, 3, 110, 6.0, skipped=2, skipped_in_a_row=2)
    back = skipped.after(tokens=10, seconds=6.5).judged(skipped, "taken back")
    assert back == Position(5, 1, 4, 120, 6.5, skipped=3, skipped_in_a_row=2)
    used = back.after(tokens=10, seconds=7.0).judged(back, "")
    assert used == Position(6, 1, 5, 130, 7.0, skipped=3, skipped_in_a_row=0)


def test_shares_whose_sum_is_not_exact_end_where_they_should():
    assert 0.1 + 0.2 > 3 / 10  # what a plain comparison would stumble over
    listed = ", ".join(f"{{share={share}, length=128, predictions=20}}" for share in (0.1, 0.2, 0.7))
    course = course_of("run.steps=10", f"examples.stages=[{listed}]")
    assert course.entered(Position(step=3, stage=1, stage_step=2)).stage == 2


def test_what_is_left_of_a_budget_in_minutes_is_what_the_clock_says():
    course = course_of("run.budget=minutes", "run.minutes=5")
    compiled = Position().after(tokens=1000, seconds=90.0)
    assert course.seconds_left(compiled) == 210.0
    assert course.seconds_left(compiled.after(tokens=1000, seconds=301.0)) == 0.0


@pytest.mark.parametrize("budget", ["steps", "tokens"])
def test_other_budgets_go_on_as_fast_as_after_the_first_step(budget):
    course = course_of(f"run.budget={budget}", "run.steps=10", "run.tokens=10_000")
    compiled = Position().after(tokens=1000, seconds=60.0)
    assert course.seconds_left(compiled) == pytest.approx(540.0)  # nothing else is known yet
    third = compiled.after(tokens=1000, seconds=62.0).after(tokens=1000, seconds=64.0)
    assert course.seconds_left(third) == pytest.approx(7 * 2.0)
