"""A run that was interrupted ends as one that was not, to the bit."""

import gc
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from bertsmith.core import mapped_files
from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.data_loader import PretrainingDataset
from bertsmith.model.folder.model_folder import read_model
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.training import background_saving
from bertsmith.training.checkpoint_storage import saved_steps, step_folder
from tests.tiny_runs import (
    BeforeSteps,
    Listener,
    ask_to_stop,
    differing,
    last_scalars,
    last_state,
    metrics_of,
    run_tiny,
    saving_threads,
    set_up_tiny,
    state_of,
    stop_at,
)


def run_in_parts(store: TokenStore, out: Path, *overrides: str, steps: tuple[int, ...]) -> None:
    """A run that is stopped so that its starts take so many steps each, and the last one takes the rest."""
    for count in steps:
        with stop_at(count - 1):
            assert run_tiny(store, out, *overrides).state == "stopped"
    assert run_tiny(store, out, *overrides).state == "finished"


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same measurements, weights, moments and memory; what differs is shown."""
    assert metrics_of(one) == metrics_of(other)
    assert differing(last_state(one), last_state(other)) == []
    assert last_scalars(one) == last_scalars(other)
    return True


def test_a_run_stopped_three_times_ends_as_one_that_was_not(finished, store, tmp_path):
    # At no multiple of log_every_steps, across the stages' border, and with dropout.
    run_in_parts(store, tmp_path / "run", steps=(2, 3, 2))
    assert same(tmp_path / "run", finished)


@pytest.mark.parametrize(
    ("algorithm", "moments"),
    [("lamb", {"exp_avg", "exp_avg_sq"}), ("muon", {"exp_avg", "exp_avg_sq", "momentum_buffer"})],
)
def test_other_optimisers_resume_to_the_bit_too(store, tmp_path, algorithm, moments):
    settings = (f"optim.algorithm={algorithm}", "optim.bias_correction=true", "run.steps=6")
    run_tiny(store, tmp_path / "straight", *settings)
    run_in_parts(store, tmp_path / "run", *settings, steps=(2, 2))
    assert same(tmp_path / "run", tmp_path / "straight")
    assert {name.split(".")[-1] for name in last_state(tmp_path / "run")} >= moments


def test_a_run_with_averaged_weights_resumes_to_the_bit_and_its_model_is_the_average(store, tmp_path):
    settings = ("run.average_from=0.5", "run.keep_at=[5,6,7,8]", "run.evaluate_every_steps=3")
    run_tiny(store, tmp_path / "straight", *settings)
    run_in_parts(store, tmp_path / "run", *settings, steps=(3, 4))
    assert same(tmp_path / "run", tmp_path / "straight")
    assert last_scalars(tmp_path / "run")["averaged"] == 4
    model = read_model(tmp_path / "run" / "model").network.state_dict()
    states = [state_of(tmp_path / "run", step) for step in (5, 6, 7, 8)]
    for name, weights in model.items():
        steps = [state[f"model.network.{name}"] for state in states]
        torch.testing.assert_close(weights, torch.stack(steps).mean(0), rtol=1e-5, atol=1e-7)
        assert not torch.equal(weights, steps[-1]), name


class Crash(Exception):
    pass


def crash_at(step: int) -> BeforeSteps:
    def act(_: PretrainingObjective, seen: int) -> None:
        if seen == step:
            raise Crash

    return BeforeSteps(act)


def test_what_happened_after_the_saved_state_never_happened(finished, store, tmp_path):
    with pytest.raises(Crash), crash_at(7):
        run_tiny(store, tmp_path / "run", "run.save_every_steps=4")
    assert saved_steps(tmp_path / "run" / "checkpoints") == [4]
    assert metrics_of(tmp_path / "run")[-1]["step"] == 6
    run_tiny(store, tmp_path / "run", "run.save_every_steps=4")
    assert same(tmp_path / "run", finished)


def test_a_crash_before_the_first_state_begins_anew(finished, store, tmp_path):
    with pytest.raises(Crash), crash_at(4):
        run_tiny(store, tmp_path / "run")
    run_tiny(store, tmp_path / "run")
    assert same(tmp_path / "run", finished)


def test_a_damaged_state_is_passed_over_for_the_one_before(finished, store, tmp_path):
    with stop_at(5):
        run_tiny(store, tmp_path / "run", "run.save_every_steps=3")
    newest = step_folder(tmp_path / "run" / "checkpoints", 6)
    (newest / "state.json").write_text("{}")
    run_tiny(store, tmp_path / "run", "run.save_every_steps=3")
    assert same(tmp_path / "run", finished)


def test_plans_that_were_deleted_are_made_again_the_same(finished, store, tmp_path):
    with stop_at(4):
        run_tiny(store, tmp_path / "run")
    for file in sorted((tmp_path / "run" / "plans").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    run_tiny(store, tmp_path / "run")
    assert same(tmp_path / "run", finished)


def test_processes_that_build_batches_change_nothing(finished, store, tmp_path):
    run_in_parts(store, tmp_path / "run", "run.loader_workers=2", steps=(3,))
    assert same(tmp_path / "run", finished)


def test_no_process_that_builds_batches_outlives_its_run(store, tmp_path):
    before = set(multiprocessing.active_children())
    gc.disable()  # it would end them, too, but each only after seconds
    try:
        run_tiny(store, tmp_path / "run", "run.loader_workers=1", "run.steps=2")
        assert set(multiprocessing.active_children()) <= before
    finally:
        gc.enable()


def test_steps_in_several_micro_batches_go_on_to_the_bit(store, tmp_path):
    small = ("batch.micro_tokens=64", "run.steps=4")
    run_tiny(store, tmp_path / "straight", *small)
    with stop_at(4):  # each step has several forward passes: the fifth of the run lies in its second step
        assert run_tiny(store, tmp_path / "run", *small).steps < 4
    run_tiny(store, tmp_path / "run", *small)
    assert same(tmp_path / "run", tmp_path / "straight")


def test_the_seconds_of_earlier_starts_count(store, tmp_path):
    with stop_at(2):
        seconds = run_tiny(store, tmp_path / "run").seconds
    start = set_up_tiny(store, tmp_path / "run").start
    assert 0 < start.saved.state.progress.seconds <= seconds
    assert start.clock() > start.saved.state.progress.seconds


def test_each_step_draws_its_own_dropout_whatever_start_it_is_in(store, tmp_path):
    seeds: list[int] = []

    def act(_: PretrainingObjective, seen: int) -> None:
        seeds.append(torch.initial_seed())
        if seen == 1:
            ask_to_stop()

    with BeforeSteps(act):
        run_tiny(store, tmp_path / "run", "run.steps=4", "run.seed=7")
        run_tiny(store, tmp_path / "run", "run.steps=4", "run.seed=7")
    assert seeds == [key_of(7, "dropout", step, 0) for step in range(4)]


def test_another_seed_is_another_run(finished, store, tmp_path):
    run_tiny(store, tmp_path / "run", "run.seed=1")
    ours, theirs = metrics_of(tmp_path / "run"), metrics_of(finished)
    assert ours[0]["token_loss"] != theirs[0]["token_loss"]  # other initial weights
    assert ours[-1]["tokens"] != theirs[-1]["tokens"]  # other examples


def test_a_state_remembers_norms_window_and_the_size_of_forward_passes(finished, store, tmp_path):
    with stop_at(4):
        run_tiny(store, tmp_path / "run")
    scalars = last_scalars(tmp_path / "run")
    assert len(scalars["norms"]) == 5
    assert scalars["window"]["counts"]["masked"] > 0  # two steps after the line of step 3
    assert scalars["micro_tokens"] == 8192
    assert scalars["position"]["step"] == 5
    assert scalars["held_out"]["token_loss"] == metrics_of(finished, "held-out")[1]["token_loss"]


def test_where_no_saved_state_is_whole_the_run_says_that_it_starts_again(finished, store, tmp_path):
    with stop_at(4):
        run_tiny(store, tmp_path / "run")
    (step_folder(tmp_path / "run" / "checkpoints", 5) / "state.json").write_text("{}")
    listener = Listener()
    run_tiny(store, tmp_path / "run", listener=listener)
    assert "all saved states are damaged: the run starts again at step 0" in listener.notes
    assert same(tmp_path / "run", finished)


def test_a_worker_that_dies_of_a_file_that_was_cut_off_names_the_file(store, tmp_path, monkeypatch):
    file, own = tmp_path / "shard", PretrainingDataset.__getitem__
    file.write_bytes(bytes(9))

    def dies(dataset, index):
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGBUS)
        return own(dataset, index)

    with monkeypatch.context() as patch, pytest.raises(UserError) as told:
        patch.setattr(mapped_files, "_SIZES", {})
        mapped_files.note_mapped(file)
        os.truncate(file, 1)
        patch.setattr(PretrainingDataset, "__getitem__", dies)
        patch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
        run_tiny(store, tmp_path / "run", "run.evaluation_sequences=1", "run.loader_workers=1")
    assert told.value.line().startswith(
        f"{file}: was cut off while it was read: it has 1 bytes instead of 9;"
    )


def test_a_loader_worker_that_dies_is_told_in_one_line_and_the_run_resumes(store, tmp_path, monkeypatch):
    settings = ("run.steps=3", "run.evaluation_sequences=1")
    own = PretrainingDataset.__getitem__

    def dies(dataset, index):
        if get_worker_info() is not None and index.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(dataset, index)

    with monkeypatch.context() as patch, pytest.raises(UserError) as told:
        patch.setattr(PretrainingDataset, "__getitem__", dies)
        # Five seconds, in which torch waits before it looks after its workers.
        patch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
        run_tiny(store, tmp_path / "run", *settings, "run.loader_workers=1")
    assert told.value.line().startswith("run.loader_workers: a loader worker died (")
    assert "\n" not in told.value.what and "the same command resumes" in told.value.remedy
    assert run_tiny(store, tmp_path / "run", *settings).state == "finished"


# ---- saved beside the steps that follow


def test_a_run_that_saves_beside_its_steps_leaves_the_states_of_one_that_does_not(
    store, tmp_path, monkeypatch
):
    every_step = ("run.save_every_steps=1", "run.keep_last=99")
    with saving_threads() as threads:
        run_tiny(store, tmp_path / "before", *every_step)
        monkeypatch.setattr(background_saving, "room_for_copies", lambda *_: True)
        run_tiny(store, tmp_path / "beside", *every_step)
    steps = saved_steps(tmp_path / "before" / "checkpoints")
    assert len(steps) > 3
    assert threads == ["MainThread"] * len(steps) + ["saving"] * len(steps)
    assert saved_steps(tmp_path / "beside" / "checkpoints") == steps
    for step in steps:
        assert differing(*(state_of(tmp_path / run, step) for run in ("before", "beside"))) == []
    assert last_scalars(tmp_path / "before") == last_scalars(tmp_path / "beside")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_model_of_a_finished_run_is_made_again_from_its_last_state(finished, store, tmp_path, file):
    run_tiny(store, tmp_path / "run")
    place = tmp_path / "run" / "model" / file
    whole = place.read_bytes()
    place.write_bytes(whole[: len(whole) // 2] if file == "model.safetensors" else b"")
    listener = Listener()
    assert run_tiny(store, tmp_path / "run", listener=listener).state == "finished"
    (note,) = [note for note in listener.notes if "has changed since the run wrote it" in note]
    assert note.startswith(f"{place}: ") and place.read_bytes() == whole
    assert same(tmp_path / "run", finished)
    assert run_tiny(store, tmp_path / "run").state == "finished"


def test_a_damaged_model_without_any_state_is_named(store, tmp_path):
    run_tiny(store, tmp_path / "run", "run.steps=2")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"has changed since the run wrote it.*there is no saved state"):
        run_tiny(store, tmp_path / "run", "run.steps=2")
