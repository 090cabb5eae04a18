"""Steps whose reports come one step late, as on a GPU: the run is the same, to the bit."""

import math

import pytest
import torch

from bertsmith.training.journal import read_metrics
from bertsmith.training.trainer import Trainer
from tests.tiny_runs import BeforeSteps, differing, last_state, metrics_of, run_tiny, stop_at

SETTINGS = ("run.steps=12", "run.save_every_steps=5", "run.evaluate_every_steps=4", "run.log_every_steps=3")


@pytest.fixture
def unwatched(monkeypatch):
    monkeypatch.setattr(Trainer, "runs_ahead", True)


def test_late_reports_change_nothing(store, tmp_path, monkeypatch):
    watched = run_tiny(store, tmp_path / "watched", *SETTINGS).folder
    monkeypatch.setattr(Trainer, "runs_ahead", True)
    late = run_tiny(store, tmp_path / "late", *SETTINGS).folder
    assert metrics_of(watched) == metrics_of(late)
    assert not differing(last_state(watched), last_state(late))


def test_a_run_stopped_in_any_step_resumes_to_the_same_bits(store, tmp_path, unwatched):
    whole = run_tiny(store, tmp_path / "whole", *SETTINGS).folder
    with stop_at(6):
        stopped = run_tiny(store, tmp_path / "parts", *SETTINGS)
    assert (stopped.state, stopped.steps) == ("stopped", 7)
    parts = run_tiny(store, tmp_path / "parts", *SETTINGS).folder
    assert metrics_of(whole) == metrics_of(parts)
    assert not differing(last_state(whole), last_state(parts))


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_gradient_that_is_no_number_is_skipped_without_anyone_looking(
    store, tmp_path, unwatched, algorithm
):
    kept: dict = {}

    def act(objective, seen):
        bias = objective.network.heads["nsp"].output.bias
        with torch.no_grad():
            if seen == 4:
                kept.update({name: each.clone() for name, each in objective.named_parameters()})
                bias.fill_(math.nan)
            elif seen == 5:
                bias.copy_(kept["network.heads.nsp.output.bias"])
                found = dict(objective.named_parameters())
                assert not differing(kept, found)

    with BeforeSteps(act):
        run = run_tiny(store, tmp_path / "run", *SETTINGS, f"optim.algorithm={algorithm}").folder
    skipped = [line["step"] for line in read_metrics(run) if line.get("skipped") == "not a number"]
    assert skipped == [5]
