"""Masking rates and steps that change over a run: the same ones again where it was interrupted."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.pretraining.data_stages import Stages, budget_of
from bertsmith.pretraining.hardware import choices
from bertsmith.training.trainer import Progress
from tests.tiny_runs import Listener, differing, last_state, metrics_of, run_tiny, stop_at, tiny_recipe

RAMPS = (
    *("masking.rate=0.4", "masking.final_rate=0.1", "batch.ramp_from=1", "batch.ramp_steps=6"),
    *("examples.pairs=full-sentences", "examples.short_fraction=0.3", "examples.short_length=9"),
    "examples.stages=[{fraction=0.7, length=24, predictions=12}, {fraction=0.3, length=32, predictions=16}]",
    *("run.log_every_steps=1", "run.evaluate_every_steps=100"),
)


def test_a_run_that_is_stopped_amid_its_ramps_ends_as_one_that_was_not(store, tmp_path):
    listener = Listener()
    run_tiny(store, tmp_path / "straight", *RAMPS, listener=listener)
    for told in (
        "the masking rate changes from 40% to 10%",
        "30% of the sequences end after at most 9 tokens, or after a sentence",
        "steps grow from 1 to 4 sequences over the first 6 steps",
    ):
        assert told in listener.notes
    with stop_at(2):
        assert run_tiny(store, tmp_path / "run", *RAMPS).state == "stopped"
    # Steps that a process builds ahead have the rate of their own step, too.
    assert run_tiny(store, tmp_path / "run", *RAMPS, "run.loader_workers=1").state == "finished"
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")
    assert differing(last_state(tmp_path / "run"), last_state(tmp_path / "straight")) == []


def stages_of(*overrides):
    recipe = tiny_recipe(*overrides)
    return Stages(recipe, budget_of(recipe))


def test_the_rate_of_a_step_that_is_built_ahead_is_its_own():
    stages = stages_of("masking.rate=0.3", "masking.final_rate=0.1")  # of 8 steps
    rates = [stages.masking_rate(Progress(step=2), steps_ahead=ahead) for ahead in (0, 2, 6)]
    assert rates == pytest.approx([0.25, 0.2, 0.1])
    assert rates[1] == stages.masking_rate(Progress(step=4), steps_ahead=0)
    assert stages_of().masking_rate(Progress(), steps_ahead=0) is None


def test_a_budget_in_minutes_goes_by_the_progress_of_its_learning_rate():
    stages = stages_of("masking.rate=0.3", "masking.final_rate=0.1", "run.budget=minutes", "run.minutes=2")
    progress = Progress(step=30, seconds=62.0, first_step_seconds=4.0)
    rate = stages.masking_rate(progress, steps_ahead=5)
    assert rate == pytest.approx(0.3 - 0.2 * stages.budget.fraction(progress)) and 0.15 < rate < 0.25


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("masking.final_rate=0.2", "run.budget=tokens"), "set run.budget to steps or minutes"),
        (("masking.final_rate=0.2", "masking.masks=static"), "`masking.masks=dynamic`"),
        (
            ("masking.final_rate=0.2", "examples.objective=left-to-right", "examples.pairs=none"),
            "masks nothing",
        ),
        (("examples.short_fraction=0.2",), "set examples.short_probability instead"),
        (("examples.single_fraction=0.2", "examples.pairs=none"), "only to examples.pairs = nsp or sop"),
        (("batch.ramp_from=5",), "batch.ramp_from = 5 is more than batch.sequences = 4"),
    ],
)
def test_what_cannot_change_is_rejected(overrides, told):
    with pytest.raises(UserError) as caught:
        tiny_recipe(*overrides)
    assert told in caught.value.line()


def test_a_stage_that_allows_fewer_predictions_than_the_rate_is_named():
    (told, *_) = [line for line in choices(tiny_recipe("masking.rate=0.5")) if "at most" in line]
    assert told.startswith("of 24 tokens at most 4 are predicted (examples.stages), fewer than 50%")
    assert not [line for line in choices(tiny_recipe()) if "at most" in line]
