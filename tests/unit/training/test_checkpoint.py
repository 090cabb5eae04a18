"""A state is saved whole or not at all, and what is found again is what was saved."""

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.training import checkpoint_storage
from bertsmith.training.checkpoint import (
    TrainingState,
    latest_state,
    load_state,
    prune,
    save_state,
    state_tensors,
)
from bertsmith.training.distributed import ALONE
from tests.tiny_training import fingerprint, take_step, trained
from tests.worlds import start

WIDE = 200_000
DiskUsage = namedtuple("DiskUsage", "total used free")


def trainer(value: float = 0.0, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module whose every weight is `value`, after one step with learning rate 0."""
    module = nn.Linear(width, 2)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    module(torch.full((1, width), value)).sum().backward()
    optimizer.step()
    return module, optimizer


def save(folder: Path, step: int, width: int = 3) -> None:
    """Save a state whose every weight is the number of its step."""
    module, optimizer = trainer(float(step), width)
    state = TrainingState(step, tokens=10 * step, seconds=step / 8)
    save_state(folder, state, state_tensors(module, optimizer), ALONE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights_are(folder: Path, value: float, width: int = 3) -> bool:
    """Whether the newest state says this step and has this value in every weight."""
    module, optimizer = trainer(-1.0, width)
    saved = latest_state(folder)
    load_state(saved, module, optimizer=optimizer, world=ALONE)
    return saved.state.step == value and all(bool((each == value).all()) for each in module.parameters())


# ---- what is saved


def test_a_loaded_state_is_the_saved_one_to_the_bit(tmp_path):
    objective, optimizer = trained(ALONE, "ddp")
    state = TrainingState(
        3, tokens=2**60 + 1, seconds=0.1 + 0.2, scalars={"norms": [0.1, 1e-300], "kept": None}
    )
    save_state(tmp_path, state, state_tensors(objective, optimizer), ALONE)
    other, its_optimizer = trained(ALONE, "ddp", seed=1)
    saved = latest_state(tmp_path)
    load_state(saved, other, optimizer=its_optimizer, world=ALONE)
    assert saved.state == state
    assert saved.world_size == 1
    assert fingerprint(other, its_optimizer) == fingerprint(objective, optimizer)


def test_a_loaded_state_continues_as_the_saved_one_would(tmp_path):
    objective, optimizer = trained(ALONE, "ddp")
    state = TrainingState(1, tokens=0, seconds=0.0)
    save_state(tmp_path, state, state_tensors(objective, optimizer), ALONE)
    other, its_optimizer = trained(ALONE, "ddp", seed=1, steps=0)
    load_state(latest_state(tmp_path), other, optimizer=its_optimizer, world=ALONE)
    for each in ((objective, optimizer), (other, its_optimizer)):
        take_step(*each, ALONE)
    assert fingerprint(other, its_optimizer) == fingerprint(objective, optimizer)


def test_a_state_from_before_the_first_step_takes_moments_away(tmp_path):
    module = nn.Linear(3, 2)
    fresh = torch.optim.AdamW(module.parameters())
    state = TrainingState(0, tokens=0, seconds=0.0)
    save_state(tmp_path, state, state_tensors(module, fresh), ALONE)
    other, optimizer = trainer()
    load_state(latest_state(tmp_path), other, optimizer=optimizer, world=ALONE)
    assert not optimizer.state
    assert torch.equal(other.weight, module.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_kinds_of_numbers_are_saved_too(tmp_path, dtype):
    module = nn.BatchNorm1d(3, dtype=dtype)  # has whole-number and number buffers
    nn.init.normal_(module.weight)
    optimizer = torch.optim.SGD(module.parameters())
    state = TrainingState(1, tokens=0, seconds=0.0)
    save_state(tmp_path, state, state_tensors(module, optimizer), ALONE)
    other = nn.BatchNorm1d(3, dtype=dtype)
    load_state(latest_state(tmp_path), other, optimizer=torch.optim.SGD(other.parameters()), world=ALONE)
    expected = module.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())


def test_moments_are_loaded_into_the_memory_they_had(tmp_path):
    save(tmp_path, 5)
    module, optimizer = trainer()
    before = optimizer.state[module.weight]["exp_avg"]
    load_state(latest_state(tmp_path), module, optimizer=optimizer, world=ALONE)
    assert optimizer.state[module.weight]["exp_avg"] is before


def test_learning_rates_stay_the_tensors_that_a_recorded_step_reads(tmp_path):
    save(tmp_path, 1)
    module, optimizer = trainer()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    rates = [group["lr"] for group in optimizer.param_groups]
    load_state(latest_state(tmp_path), module, optimizer=optimizer, world=ALONE)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


def test_the_files_are_ordinary_safetensors_and_json(tmp_path):
    save(tmp_path, 12)
    folder = tmp_path / "step-00000012"
    assert names(folder) == ["checksums.json", "shard-00001.safetensors", "state.json"]
    tensors = load_file(folder / "shard-00001.safetensors")
    assert tensors["model.weight"].tolist() == [[12.0] * 3] * 2
    assert tensors["optimizer.bias.step"].tolist() == 1.0
    assert set(tensors) == {
        *("model.weight", "model.bias"),
        *(
            f"optimizer.{name}.{key}"
            for name in ("weight", "bias")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
    }
    state = {"format": 2, "world_size": 1, "step": 12, "tokens": 120, "seconds": 1.5, "scalars": {}}
    assert json.loads((folder / "state.json").read_text()) == state


def test_the_same_state_gives_the_same_files(tmp_path):
    for folder in ("one", "other"):
        save(tmp_path / folder, 3)
    files = [
        (tmp_path / folder / "step-00000003" / "checksums.json").read_text() for folder in ("one", "other")
    ]
    assert files[0] == files[1]


# ---- which state is the latest


def test_the_newest_state_is_taken(tmp_path):
    for step in (99_999_999, 5, 100_000_000):
        save(tmp_path, step)
    assert latest_state(tmp_path).state.step == 100_000_000


def test_there_is_no_latest_state_before_the_first(tmp_path):
    assert latest_state(tmp_path) is None
    assert latest_state(tmp_path / "not there") is None


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path):
    save(tmp_path, 1)
    module, optimizer = trainer(1.0)
    again = TrainingState(1, tokens=77, seconds=0.0)
    save_state(tmp_path, again, state_tensors(module, optimizer), ALONE)
    assert names(tmp_path) == ["step-00000001"]
    assert latest_state(tmp_path).state.tokens == 77


def test_remains_of_a_killed_run_are_removed_and_a_replaced_state_comes_back(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.replaced")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000003.partial")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000001.replaced")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000000.removed")
    assert weights_are(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def flip(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


DAMAGES = {
    "shard-00001.safetensors: its contents": lambda folder: flip(folder / "shard-00001.safetensors"),
    "state.json: its contents": lambda folder: (folder / "state.json").write_text("{}"),
    "checksums.json: cannot be read": lambda folder: (folder / "checksums.json").unlink(),
    "checksums.json: is not valid JSON": lambda folder: (folder / "checksums.json").write_text("{"),
    "shard-00001.safetensors: checksums.json and": lambda folder: (
        folder / "shard-00001.safetensors"
    ).unlink(),
    "state.json: cannot be read": lambda folder: (
        (folder / "state.json").unlink(),
        (folder / "state.json").mkdir(),
    ),
    "shard-00002.safetensors: checksums.json and": lambda folder: shutil.copy(
        folder / "shard-00001.safetensors", folder / "shard-00002.safetensors"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_named_put_aside_and_the_one_before_is_taken(tmp_path, caplog, damage):
    for step in (1, 2):
        save(tmp_path, step)
    DAMAGES[damage](tmp_path / "step-00000002")
    assert weights_are(tmp_path, 1)
    assert f"step-00000002: is damaged ({damage}" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000002.damaged"]


def test_a_state_damaged_for_the_second_time_takes_the_place_of_the_first(tmp_path):
    for _ in range(2):
        save(tmp_path, 1)
        flip(tmp_path / "step-00000001" / "state.json")
        assert latest_state(tmp_path) is None
    assert names(tmp_path) == ["step-00000001.damaged"]


def test_a_state_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def refused(file: object, digest: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(hashlib, "file_digest", refused)
    with pytest.raises(UserError, match="Permission denied"):
        latest_state(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder with one state, to be copied."""
    folder = tmp_path_factory.mktemp("sound")
    save(folder, 1, width=1)
    return folder


@settings(max_examples=40)
@given(data=st.data())
def test_no_changed_byte_of_any_file_goes_unnoticed(sound, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("changed") / "states"
    shutil.copytree(sound, folder)
    file = data.draw(st.sampled_from(sorted((folder / "step-00000001").iterdir())))
    contents = bytearray(file.read_bytes())
    contents[data.draw(st.integers(0, len(contents) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(contents)
    assert latest_state(folder) is None


# ---- what is kept


def test_the_last_states_and_the_wanted_ones_stay(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_at=(2, 5, 50))
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]


def test_damaged_states_do_not_count_among_the_last(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.damaged")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-00000001", "step-00000002.damaged"]


def test_a_removal_that_is_cut_short_leaves_no_half_a_state(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def cut_short(folder: Path) -> None:
        next(folder.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", cut_short)
        prune(tmp_path, keep_last=1)
    assert names(tmp_path) == [".step-00000001.removed", "step-00000002"]
    assert weights_are(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]


# ---- what goes wrong


def test_a_disk_without_room_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(10**9, 10**9 - 50, 50))
    with pytest.raises(UserError) as caught:
        save(tmp_path, 2)
    assert "step-00000002: needs 8,104 bytes, but the disk has 50 left; make room" in caught.value.line()
    assert "the state of step 1 stays" in caught.value.line()
    assert names(tmp_path) == ["step-00000001"]


def test_a_disk_that_fills_up_while_saving_leaves_the_last_state(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(UserError) as caught:
        patched.setattr(os, "fsync", full)
        save(tmp_path, 2)
    assert (
        "step-00000002: cannot be written (No space left on device); it needs 8,104 bytes"
        in caught.value.line()
    )
    assert "the state of step 1 stays" in caught.value.line()
    assert names(tmp_path) == ["step-00000001"]
    assert weights_are(tmp_path, 1)


def test_a_lack_of_memory_while_saving_leaves_the_last_state(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def no_room(*_):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(UserError) as caught:
        patched.setattr(checkpoint_storage, "_file_pieces", no_room)
        save(tmp_path, 2)
    assert "step-00000002: cannot be written (memory ran out); it needs 8,104 bytes" in caught.value.line()
    assert names(tmp_path) == ["step-00000001"]


def test_saving_needs_no_thread_which_might_not_start_for_lack_of_memory(tmp_path, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match="file/step-00000001: cannot be written .*; there is no earlier state"
    ):
        save(tmp_path / "file", 1)


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_a_state_of_another_model_is_rejected(tmp_path):
    save(tmp_path, 1, width=3)
    module, optimizer = trainer(width=4)
    with pytest.raises(
        UserError, match=r"another model: model.weight is \(2, 3\) in it and \(2, 4\) in this run"
    ):
        load_state(latest_state(tmp_path), module, optimizer=optimizer, world=ALONE)


def test_a_weight_that_the_state_lacks_is_rejected(tmp_path):
    save(tmp_path, 1)
    module = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(
        UserError, match=r"another model: model.0.bias is missing in it and \(2,\) in this run"
    ):
        load_state(
            latest_state(tmp_path), module, optimizer=torch.optim.SGD(module.parameters()), world=ALONE
        )


def test_a_state_of_a_later_format_is_rejected_but_not_called_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.training.checkpoint.FORMAT", 3)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="has format 3, but this bertsmith reads 2"):
        latest_state(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


# ---- kill -9


def save_for_ever(conversation, folder: Path) -> None:
    """Go on from the latest state, saving every step and telling before and after."""
    torch.set_num_threads(1)
    found = latest_state(folder)
    step = 0 if found is None else found.state.step
    while True:
        step += 1
        module, optimizer = trainer(float(step), WIDE)
        conversation.send(("writing", step, time.monotonic()))
        state = TrainingState(step, tokens=10 * step, seconds=step / 8)
        save_state(folder, state, state_tensors(module, optimizer), ALONE)
        conversation.send(("written", step, time.monotonic()))
        prune(folder, keep_last=2)


def killed_at(folder: Path, share: float) -> list[tuple[str, int]]:
    """What a saving process said; it was killed at about this share of its second save."""
    process, conversation = start(save_for_ever, folder)
    words = [conversation.recv() for _ in range(3)]  # writing, written, writing
    time.sleep(share * (words[1][2] - words[0][2]))
    process.kill()
    process.join()
    with contextlib.suppress(EOFError):
        while True:
            words.append(conversation.recv())
    return [(kind, step) for kind, step, _ in words]


def test_after_kill_9_at_any_moment_the_last_state_is_whole(tmp_path, full):
    moments = random.Random(7)
    inside = reached = 0
    for _ in range(40 if full else 6):
        words = killed_at(tmp_path, moments.uniform(0, 1.2))
        assert words[0] == ("writing", reached + 1), "it goes on where the killed one was"
        inside += words[-1][0] == "writing"
        written = max(step for kind, step in words if kind == "written")
        reached = latest_state(tmp_path).state.step
        assert reached in (written, written + 1)  # the kill may come between the rename and the word
        assert weights_are(tmp_path, reached, WIDE)
        assert all(name.removeprefix("step-").isdigit() for name in names(tmp_path)), (
            "none damaged, no remains"
        )
    assert inside > 0
