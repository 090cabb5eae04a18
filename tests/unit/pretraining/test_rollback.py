"""Gradients that cannot be used: steps are skipped, then the last saved weights are taken again, once."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.training import background_saving
from bertsmith.training.checkpoint_storage import saved_steps
from bertsmith.training.journal import read_metrics
from bertsmith.training.trainer import Trainer
from tests.tiny_runs import BeforeSteps, Listener, last_state, run_tiny, stop_at, without_pictures

CAREFUL = ("run.steps=10", "run.save_every_steps=2", "run.keep_last=9", "run.rollback_after=3")


@pytest.fixture(scope="module", autouse=True, params=["watched", "late"])
def reports(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test twice: with reports after each step, and, as on a GPU, one step late and saving beside."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "late":
            patch.setattr(Trainer, "runs_ahead", True)
            patch.setattr(background_saving, "room_for_copies", lambda *_: True)
        yield request.param


def break_at(*steps: int) -> BeforeSteps:
    """While it is open, a weight becomes NaN before these steps."""

    def act(objective: PretrainingObjective, seen: int) -> None:
        if seen in steps:
            with torch.no_grad():
                objective.network.encoder.embeddings.words.weight[3, 3] = math.nan

    return BeforeSteps(act)


def events(run: Path) -> list[tuple[int, str]]:
    lines = [line for line in read_metrics(run) if line["kind"] == "event"]
    return [(line["step"], str(line.get("skipped", line.get("rolled_back_to")))) for line in lines[:-1]]


@pytest.fixture(scope="module")
def recovered(store, reports: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:
    """A run whose weights break after its fifth step, and what it told."""
    out, listener = tmp_path_factory.mktemp("recovered") / "run", Listener()
    with without_pictures(), break_at(5):
        result = run_tiny(store, out, *CAREFUL, "run.keep_at=[7]", "run.log_every_steps=2", listener=listener)
    assert (result.state, result.steps) == ("finished", 10)
    return out, listener


def test_after_several_skipped_steps_the_saved_weights_are_taken_again(recovered):
    run, listener = recovered
    assert events(run) == [*((step, "not a number") for step in (6, 7, 8)), (8, "4")]
    assert "step 6 was skipped: its gradient is not a number" in listener.notes
    assert "the weights of step 4 were loaded again; the data continue" in listener.notes
    assert listener.lines[-1]["skipped"] == 3
    assert all(tensor.isfinite().all() for tensor in last_state(run).values())


def test_no_state_is_saved_amid_skipped_steps(recovered):
    run, _ = recovered
    assert saved_steps(run / "checkpoints") == [2, 4, 10]


def test_a_line_of_metrics_over_skipped_steps_alone_has_no_loss(recovered):
    run, _ = recovered
    lines = {line["step"]: line for line in read_metrics(run) if line["kind"] == "train"}
    assert lines[8]["loss"] is None and "token_loss" not in lines[8]
    assert lines[6]["token_loss"] > 0  # of step 5 alone
    assert lines[10]["token_loss"] > 0


def test_the_second_time_the_run_ends_with_the_remedy(store, tmp_path):
    with pytest.raises(UserError) as caught, break_at(5, 8):
        run_tiny(store, tmp_path / "run", *CAREFUL, "run.steps=20")
    message = caught.value.line()
    assert "step 11: 6 steps in a row had an unusable gradient" in message
    assert "lower `optim.peak_lr`" in message
    assert not (tmp_path / "run" / "model").exists()


def test_a_good_step_in_between_does_not_make_it_go_on_for_ever(store, tmp_path):
    # After the way back one step succeeds and the next one fails again, as with too high a learning rate.
    with pytest.raises(UserError, match="step 12: 3 steps in a row had an unusable gradient"), break_at(5, 9):
        run_tiny(store, tmp_path / "run", *CAREFUL, "run.steps=20", "run.save_every_steps=4")


def test_a_rate_that_explodes_before_anything_was_saved_is_reported(store, tmp_path):
    exploding = (
        "optim.peak_lr=1e30",
        "optim.warmup_fraction=0",
        "optim.schedule=constant",
        "run.rollback_after=2",
    )
    with pytest.raises(UserError, match="2 steps in a row had an unusable gradient"):
        run_tiny(store, tmp_path / "run", *exploding)
    assert events(tmp_path / "run") == [(2, "not a number")]


def test_a_run_that_ends_with_broken_weights_writes_no_model(store, tmp_path):
    message = "weights that are not numbers: encoder.embeddings.words.weight"
    with pytest.raises(UserError, match=message), break_at(9):
        run_tiny(store, tmp_path / "run", *CAREFUL)
    assert not (tmp_path / "run" / "model").exists()
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == 8
    assert run_tiny(store, tmp_path / "run", *CAREFUL).state == "finished"


def test_a_step_that_had_begun_when_the_weights_were_taken_back_counts_for_nothing(store, tmp_path, reports):
    settings = ("run.steps=10", "run.save_every_steps=4", "run.rollback_after=1", "run.log_every_steps=1")
    with break_at(5):
        result = run_tiny(store, tmp_path / "run", *settings)
    assert (result.state, result.steps) == ("finished", 10)
    back = [(7, "taken back")] if reports == "late" else []
    assert events(tmp_path / "run") == [(6, "not a number"), (6, "4"), *back]
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"}
    assert (lines[7]["loss"] is None) == (reports == "late")  # a loss of broken weights says nothing
    assert lines[8]["token_loss"] > 0 and lines[10]["skipped"] == 1 + len(back)
    assert all(tensor.isfinite().all() for tensor in last_state(tmp_path / "run").values())


def test_a_run_stopped_amid_skipped_steps_tells_what_is_really_saved(store, tmp_path):
    with break_at(5), stop_at(5):
        result = run_tiny(store, tmp_path / "run", *CAREFUL)
    assert (result.state, result.steps, result.saved_step) == ("stopped", 6, 4)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2, 4]
    with break_at(0), stop_at(0):
        assert run_tiny(store, tmp_path / "other", *CAREFUL).saved_step == 0
