"""The way of a run through its data: stages, masking levels, and where the next step lies."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.pretraining.data_stages import Stages, budget_of
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


def stages_of(*overrides: str) -> Stages:
    recipe = load_recipe("bert-base", overrides)
    return Stages(recipe, budget_of(recipe))


def walk(stages: Stages, *, tokens: int = 1000, seconds: float = 1.0) -> list[Progress]:
    """Where every step of a run begins, if each shows so many tokens and takes so many seconds."""
    begins, progress = [], Progress()
    while not stages.budget.spent(progress):
        progress = stages.enter(progress)
        begins.append(progress)
        progress = progress.after(tokens=tokens, seconds=progress.seconds + seconds)
    return begins


def counted(begins: list[Progress]) -> list[tuple[int, int]]:
    """Each stage and how many steps it has."""
    return [(stage, len(list(steps))) for stage, steps in groupby(begins, key=lambda each: each.stage)]


def test_nine_tenths_of_the_steps_are_short_and_the_last_tenth_long():
    begins = walk(stages_of("run.steps=200", STAGES))
    assert counted(begins) == [(0, 180), (1, 20)]
    assert [each.stage_step for each in begins] == [*range(180), *range(20)]


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 30, 70, 110, 1000])
def test_stages_are_cut_at_the_step_that_their_share_says(steps):
    stages = stages_of(f"run.steps={steps}", STAGES)
    late = [progress.step for progress in walk(stages) if progress.stage == 1]
    assert late == [step for step in range(steps) if 10 * step >= 9 * steps]


@given(steps=st.integers(1, 300), parts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_step_is_in_one_stage_and_stages_follow_each_other(steps, parts):
    shares = [part / sum(parts) for part in parts]
    listed = ", ".join(f"{{fraction={share!r}, length=128, predictions=20}}" for share in shares)
    begins = walk(stages_of(f"run.steps={steps}", f"examples.stages=[{listed}]"))
    assert [each.step for each in begins] == list(range(steps))
    assert [each.stage for each in begins] == sorted(each.stage for each in begins)
    borders = [sum(parts[: number + 1]) * steps / sum(parts) for number in range(len(parts))]
    for each in begins:
        assert each.step < borders[each.stage] + 1e-6
        assert each.stage == 0 or each.step >= borders[each.stage - 1] - 1e-6


def test_a_token_budget_ends_with_the_step_that_spends_it():
    begins = walk(stages_of("run.budget=tokens", "run.tokens=10_500", STAGES), tokens=1000)
    assert len(begins) == 11
    assert counted(begins) == [(0, 10), (1, 1)]  # at 9,000 tokens of 10,500 less than 90 % is spent


def test_a_clock_that_goes_back_does_not_bring_an_earlier_stage_back():
    stages = stages_of("run.budget=minutes", "run.minutes=1", STAGES)
    late = stages.enter(Progress(seconds=55))
    assert (late.stage, late.stage_step) == (1, 0)
    assert stages.enter(Progress(step=1, stage=1, stage_step=1, seconds=50)).stage == 1


def test_masking_levels_by_stage_follow_each_other_over_the_run():
    stages = stages_of("run.steps=16", LEVELS, BY_STAGE)
    seen = [stages.address(progress).progress for progress in walk(stages)]
    assert seen == [0.25] * 8 + [0.625] * 4 + [0.875] * 4


def test_mixed_levels_do_not_depend_on_progress():
    stages = stages_of("run.steps=16", LEVELS)
    assert {stages.address(progress).progress for progress in walk(stages)} == {0.0}


def test_an_address_is_the_stage_and_the_step_within_it():
    stages = stages_of("run.steps=20", STAGES)
    found = [(address.stage, address.step) for address in map(stages.address, walk(stages))]
    assert found == [(0, step) for step in range(18)] + [(1, 0), (1, 1)]


def test_shares_whose_sum_is_not_exact_end_where_they_should():
    assert 0.1 + 0.2 > 3 / 10  # what a plain comparison would stumble over
    listed = ", ".join(f"{{fraction={share}, length=128, predictions=20}}" for share in (0.1, 0.2, 0.7))
    stages = stages_of("run.steps=10", f"examples.stages=[{listed}]")
    assert stages.enter(Progress(step=3, stage=1, stage_step=2)).stage == 2
