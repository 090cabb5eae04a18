"""A run that was interrupted ends as one that was not, to the bit, and one that is finished is left alone."""

import shutil

import pytest

from bertsmith.core.errors import UserError
from bertsmith.tasks.objective import TaskObjective
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.journal import read_metrics
from bertsmith.training.trainer import Trainer
from tests.tiny_runs import BeforeSteps, ask_to_stop, differing, metrics_of
from tests.tuning import Notebook, stop_at, tune, weights_of

SETTINGS = (
    "run.epochs=0.9",
    "run.evaluations=3",
    "optim.layer_decay=0.9",
)  # 9 steps, evaluations after 3 and 6


def lines_of(run):
    return metrics_of(run, "train", "held-out")


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("straight"), *SETTINGS).folder


def same(one, other):
    assert lines_of(one) == lines_of(other)
    assert differing(weights_of(one), weights_of(other)) == []
    return True


def test_a_run_stopped_twice_ends_as_one_that_was_not(straight, model, tmp_path):
    notebook = Notebook()
    with stop_at(3):
        stopped = tune("sst2", model, tmp_path, *SETTINGS)
    assert (stopped.finished, stopped.steps, stopped.metrics) == (False, 4, {})
    assert stopped.examples == 160
    with stop_at(1):
        assert tune("sst2", model, tmp_path, *SETTINGS).steps == 6  # amid an evaluation
    ended = tune("sst2", model, tmp_path, *SETTINGS, notebook=notebook)
    assert "resumes from step 6" in notebook.notes
    assert not [note for note in notebook.notes if "starts from fresh weights" in note]
    assert ended.finished
    assert ended.seconds > stopped.seconds
    assert same(ended.folder, straight)


class LateWish(StopRequested):
    """Is asked to stop at the very moment when it is looked at for the eighth time."""

    looks = 0

    @property
    def here(self):
        self.looks += 1
        return self.looks >= 8

    @here.setter
    def here(self, _):
        pass


def test_a_stop_is_saved_whenever_it_comes(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.training.job.StopRequested", LateWish)
        stopped = tune("sst2", model, tmp_path, *SETTINGS)
    assert not stopped.finished
    notebook = Notebook()
    tune("sst2", model, tmp_path, *SETTINGS, notebook=notebook)
    assert f"resumes from step {stopped.steps}" in notebook.notes


def test_nothing_that_only_helps_to_go_on_stays_after_the_end(straight):
    assert not (straight / "checkpoints").exists()
    assert not list(straight.glob("best-*"))


def test_a_stop_in_the_last_step_is_an_end(straight, model, tmp_path):
    with stop_at(8):
        result = tune("sst2", model, tmp_path, *SETTINGS)
    assert result.finished
    assert same(result.folder, straight)


def test_late_reports_as_on_a_gpu_change_nothing(straight, model, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "runs_ahead", True)
    with stop_at(4):
        assert tune("sst2", model, tmp_path, *SETTINGS).steps == 5
    assert same(tune("sst2", model, tmp_path, *SETTINGS).folder, straight)


class Impatient(Notebook):
    """Asks to stop when it hears of the fourth step, while the fifth is on its way."""

    def on_step(self, progress, values):
        super().on_step(progress, values)
        if values["step"] == 4:
            ask_to_stop()


def test_a_stop_that_comes_with_a_late_report_saves_no_step_under_anothers_number(
    straight, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(Trainer, "runs_ahead", True)
    stopped = tune("sst2", model, tmp_path, *SETTINGS, notebook=Impatient())
    assert (stopped.finished, stopped.steps) == (False, 6)
    assert same(tune("sst2", model, tmp_path, *SETTINGS).folder, straight)


class Crash(Exception):
    pass


def crash_at(step):
    def act(_, seen):
        if seen == step:
            raise Crash

    return BeforeSteps(act, objective=TaskObjective)


def test_what_happened_after_the_saved_state_never_happened(straight, model, tmp_path):
    with stop_at(3):
        tune("sst2", model, tmp_path, *SETTINGS)
    with pytest.raises(Crash), crash_at(3):
        tune("sst2", model, tmp_path, *SETTINGS)
    assert read_metrics(tmp_path / "runs" / "sst2")[-1]["step"] > 4
    assert same(tune("sst2", model, tmp_path, *SETTINGS).folder, straight)


@pytest.mark.parametrize("head", ["head.encoder=frozen-features", "head.reader=bilstm"])
def test_a_bilstm_resumes_too(head, model, tmp_path):
    settings = ("run.epochs=0.4", head)
    whole = tune("sst2", model, tmp_path / "whole", *settings).folder
    with stop_at(1):
        assert not tune("sst2", model, tmp_path / "parts", *settings).finished
    parts = tune("sst2", model, tmp_path / "parts", *settings).folder
    for name in ("mix.safetensors", "model.safetensors"):
        ours, theirs = ((run / "model" / name).read_bytes() for run in (parts, whole))
        assert ours == theirs


BEST = ("run.keep=best", "run.epochs=1", "run.evaluations=5", "optim.peak_lr=0.5", "optim.clip_norm=off")
"""A learning rate that makes the weights worse, so that the best ones come early."""


def test_the_best_weights_are_kept_through_an_interruption(model, tmp_path):
    notebook = Notebook()
    whole = tune("sst2", model, tmp_path / "whole", *BEST, notebook=notebook)
    evaluations = [line["accuracy"] for line in read_metrics(whole.folder) if line["kind"] == "held-out"]
    assert len(evaluations) == 5
    assert whole.metrics["dev"]["accuracy"] == max(evaluations)
    with stop_at(7):
        tune("sst2", model, tmp_path / "parts", *BEST)
    parts = tune("sst2", model, tmp_path / "parts", *BEST)
    assert same(parts.folder, whole.folder)
    assert parts.metrics == whole.metrics


def test_best_weights_that_are_gone_are_named(model, tmp_path):
    with stop_at(7):
        tune("sst2", model, tmp_path, *BEST)
    (file,) = (tmp_path / "runs" / "sst2").glob("best-*.safetensors")
    file.write_bytes(b"")
    with pytest.raises(UserError, match=f"{file.name}: .*; the saved state needs it"):
        tune("sst2", model, tmp_path, *BEST)


def test_a_finished_run_is_not_done_again(straight, model, tmp_path):
    first = tune("sst2", model, tmp_path, "run.epochs=0.2")
    before = {file: file.stat().st_mtime_ns for file in first.folder.rglob("*")}
    notebook = Notebook()
    again = tune("sst2", model, tmp_path, "run.epochs=0.2", notebook=notebook)
    assert again == first
    assert notebook.notes == [f"{first.folder} is already finished: there is nothing to do"]
    assert notebook.lines == []
    assert {file: file.stat().st_mtime_ns for file in first.folder.rglob("*")} == before


def damaged(folder, file):
    """The finished model of a run, one file of which is cut off or empty."""
    place = folder / "model" / file
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2 if file.endswith(".safetensors") else 0])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_of_a_finished_run_is_made_again_from_its_last_state(straight, model, tmp_path, file):
    settings = (*SETTINGS, "run.keep_state=true")
    folder = tune("sst2", model, tmp_path, *settings).folder
    whole = (folder / "model" / file).read_bytes()
    damaged(folder, file)
    notebook = Notebook()
    assert tune("sst2", model, tmp_path, *settings, notebook=notebook).finished
    (note,) = [note for note in notebook.notes if "has changed since the run wrote it" in note]
    assert note.startswith(f"{folder / 'model' / file}: ") and note.endswith("kept as model.damaged")
    assert (folder / "model" / file).read_bytes() == whole
    assert (folder / "model.damaged" / file).stat().st_size < len(whole)
    assert same(folder, straight)
    shutil.rmtree(folder / "model")
    assert (
        tune("sst2", model, tmp_path, *settings).finished and (folder / "model" / file).read_bytes() == whole
    )
    (folder / "model.sha256").write_bytes(b"\xff\0" + (folder / "model.sha256").read_bytes()[:200])
    assert tune("sst2", model, tmp_path, *settings).finished


def test_a_damaged_model_without_any_state_is_named(model, tmp_path):
    folder = tune("sst2", model, tmp_path, "run.epochs=0.1").folder
    damaged(folder, "model.safetensors")
    with pytest.raises(UserError, match="has changed since the run wrote it") as error:
        tune("sst2", model, tmp_path, "run.epochs=0.1")
    assert error.value.where == str(folder / "model" / "model.safetensors")
    (folder / "model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has changed since the run wrote it"):
        tune("sst2", model, tmp_path, "run.epochs=0.1")


def test_a_damaged_model_stays_where_it_is_until_it_can_be_made_again(model, tmp_path):
    settings = (*BEST, "run.keep_state=true")
    folder = tune("sst2", model, tmp_path, *settings).folder
    (folder / "model" / "config.json").write_text((folder / "model" / "config.json").read_text() + " ")
    before = {file: file.read_bytes() for file in folder.rglob("*.json")}
    (best,) = folder.glob("best-*.safetensors")
    best.unlink()
    with pytest.raises(UserError):
        tune("sst2", model, tmp_path, *settings)
    assert {file: file.read_bytes() for file in folder.rglob("*.json")} == before


def test_what_people_may_change_is_no_damage_and_a_run_of_an_earlier_version_is_taken_as_it_is(
    model, tmp_path
):
    folder = tune("sst2", model, tmp_path, "run.epochs=0.1").folder
    (folder / "model" / "card.md").write_text("A card of my own.")
    assert tune("sst2", model, tmp_path, "run.epochs=0.1").finished
    (folder / "model.sha256").unlink()
    damaged(folder, "model.safetensors")
    assert tune("sst2", model, tmp_path, "run.epochs=0.1").finished
