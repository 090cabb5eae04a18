"""When a run ends early, and which of equally good weights it keeps."""

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import finetune
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.task_recipe import finetuning_recipe
from tests.tiny_runs import metrics_of
from tests.tuning import Notebook, stop_at, toy_assignment, tune, weights_of

WILD = (
    *("optim.peak_lr=2e-2", "optim.schedule=constant", "run.keep=best"),
    *("run.evaluations=16", "run.epochs=4"),
)


def steps_until_patience_ends(lines, patience):
    """After which step a run that made these evaluations would have ended."""
    best, waited = None, 0
    for line in lines:
        key = (line["matthews"], -line["loss"])
        waited = 0 if best is None or key > best else waited + 1
        best = key if waited == 0 else best
        if waited == patience:
            return line["step"]
    return None


def test_a_run_ends_when_its_patience_does_and_keeps_the_best(model, tmp_path):
    patient = tune("cola", model, tmp_path / "patient", *WILD)
    lines = metrics_of(patient.folder, "held-out")
    last = steps_until_patience_ends(lines, 2)
    assert last is not None and last < patient.steps, "nothing is seen unless the metric falls back"
    notebook = Notebook()
    early = tune("cola", model, tmp_path / "early", *WILD, "run.patience=2", notebook=notebook)
    assert early.steps == last
    assert any("the run ends early" in note for note in notebook.notes)
    best = max(line["matthews"] for line in lines if line["step"] <= last)
    assert early.metrics["dev"]["matthews"] == best


def test_an_interrupted_run_has_waited_as_long(model, tmp_path):
    settings = (*WILD, "run.patience=2")
    whole = tune("cola", model, tmp_path / "whole", *settings)
    assignment = toy_assignment("cola", model, tmp_path / "parts", *settings)
    with stop_at(whole.steps - 2):
        assert not finetune(assignment, Notebook()).finished
    resumed = finetune(assignment, Notebook())
    assert (resumed.steps, resumed.metrics) == (whole.steps, whole.metrics)
    ours, theirs = weights_of(whole.folder), weights_of(resumed.folder)
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_patience_for_weights_that_would_be_dropped_is_refused():
    with pytest.raises(UserError, match=r"run\.patience .* run\.keep = best.*`run\.keep=best`"):
        finetuning_recipe(task_named("sst2"), ["run.patience=2"])


def test_a_limit_takes_so_many_examples_of_each_split_and_all_labels(model, tmp_path):
    notebook = Notebook()
    result = tune("sst2", model, tmp_path, "run.epochs=1", "run.limit=20", notebook=notebook)
    assert {"train: 20 examples", "dev: 20 examples"} <= set(notebook.notes)
    assert set(result.classes["dev"]) == {"negative", "positive"}


@pytest.mark.parametrize("name", ["sst2", "stsb", "wnut17", "squad", "swag"])
def test_every_kind_has_a_loss_that_falls_while_it_learns(model, tmp_path, name):
    epochs = 4 if name in ("sst2", "stsb") else 2  # the others learn from their first step on
    result = tune(name, model, tmp_path, "run.evaluations=4", f"run.epochs={epochs}")
    losses = [line["loss"] for line in metrics_of(result.folder, "held-out")]
    assert losses[-1] < losses[0]
