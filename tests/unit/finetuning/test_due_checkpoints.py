"""What is kept on the way: a state every few minutes, and evaluations."""

import pytest

from bertsmith.finetuning import finetune as finetuning_job
from bertsmith.tasks.objective import TaskObjective
from tests.tiny_runs import BeforeSteps, differing, metrics_of
from tests.tuning import SHORT, Notebook, tune, weights_of


class PowerCut(Exception):
    pass


def power_cut_at(step):
    """While it is open, a run in this process ends without a chance to save anything."""

    def act(_, seen):
        if seen == step:
            raise PowerCut

    return BeforeSteps(act, objective=TaskObjective)


def test_a_run_that_dies_resumes_from_the_last_state_that_was_due(model, tmp_path, monkeypatch):
    whole = tune("sst2", model, tmp_path / "whole", *SHORT)
    monkeypatch.setattr(finetuning_job, "SECONDS_BETWEEN_STATES", 0.0)
    with pytest.raises(PowerCut), power_cut_at(3):
        tune("sst2", model, tmp_path / "parts", *SHORT)
    notebook = Notebook()
    parts = tune("sst2", model, tmp_path / "parts", *SHORT, notebook=notebook)
    assert "resumes from step 3" in notebook.notes
    assert differing(weights_of(parts.folder), weights_of(whole.folder)) == []
    assert metrics_of(parts.folder) == metrics_of(whole.folder)


def test_a_state_is_not_due_before_its_time(model, tmp_path):
    with pytest.raises(PowerCut), power_cut_at(3):
        tune("sst2", model, tmp_path, *SHORT)
    assert not (tmp_path / "runs" / "sst2" / "checkpoints").exists()


def test_evaluations_stand_as_evenly_as_whole_steps_allow(model, tmp_path):
    folder = tune("sst2", model, tmp_path, "run.epochs=0.9", "run.evaluations=4").folder
    # Nine steps in four parts: 2.25, 4.5, 6.75 and 9.
    assert [line["step"] for line in metrics_of(folder, "held-out")] == [2, 4, 7, 9]
