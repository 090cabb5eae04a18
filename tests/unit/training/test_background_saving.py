"""A state saved beside the steps that follow is that of its own step, and nothing of it is lost."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.training import background_saving, checkpoint_storage
from bertsmith.training.background_saving import BackgroundSaving, room_for_copies
from bertsmith.training.checkpoint import TrainingState, latest_state, load_checkpoint
from bertsmith.training.checkpoint_storage import saved_steps
from bertsmith.training.distributed import ALONE, World
from bertsmith.training.trainer import Trainer

PATIENCE = 60.0
"""Seconds after which a thread that should have come is given up."""


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with memory to spare."""
    monkeypatch.setattr(background_saving, "room_for_copies", lambda *_: True)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is open, a file's writing waits for this event."""
    go_on, write = threading.Event(), checkpoint_storage.write_durably

    def late(*operands):
        assert go_on.wait(PATIENCE)
        return write(*operands)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_storage, "write_durably", late)
        try:
            yield go_on
        finally:
            go_on.set()


def trainer_of(value: float) -> Trainer:
    """A trainer whose every weight is this, after a step with learning rate 0."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    trainer = Trainer(module, optimizer)
    set_weights(trainer, value)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return trainer


def set_weights(trainer: Trainer, value: float) -> None:
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.fill_(value)


def saved_value(folder: Path) -> float:
    """The one value of all weights in the newest state."""
    trainer = trainer_of(-1.0)
    load_checkpoint(latest_state(folder), trainer)
    (value,) = {each for parameter in trainer.parameters() for each in parameter.flatten().tolist()}
    return value


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at(step: int) -> TrainingState:
    return TrainingState(step, tokens=10 * step, seconds=step / 8)


def test_what_is_written_later_is_the_state_of_its_own_step(tmp_path, monkeypatch, room):
    trainer = trainer_of(1.0)
    with BackgroundSaving(tmp_path, trainer, keep_last=1) as saving:
        with held_up(monkeypatch):
            saving.save(at(1))
            set_weights(trainer, 2.0)
            trainer.optimizer.state.clear()
            assert saved_steps(tmp_path) == []
        saving.wait()
        assert saved_steps(tmp_path) == [1]
    assert saved_value(tmp_path) == 1.0


def test_states_are_written_one_after_the_other_and_old_ones_go(tmp_path, room):
    trainer = trainer_of(0.0)
    with BackgroundSaving(tmp_path, trainer, keep_last=1, keep_at=(2,)) as saving:
        for step in range(1, 5):
            set_weights(trainer, step)
            saving.save(at(step))
    assert saved_steps(tmp_path) == [2, 4]
    assert saved_value(tmp_path) == 4.0


def test_without_room_for_copies_a_state_is_there_at_once(tmp_path):
    saving = BackgroundSaving(tmp_path, trainer_of(1.0), keep_last=1)
    saving.save(at(1))  # no GPU here
    assert saved_steps(tmp_path) == [1]


@pytest.mark.parametrize("how", ["wait", "check", "save", "end"])
def test_what_goes_wrong_is_told_as_soon_as_it_is_asked_for(tmp_path, monkeypatch, room, how):
    def ask(saving: BackgroundSaving) -> None:
        if how == "check":
            assert saving._pending is not None
            saving._pending.exception(PATIENCE)
        if how != "end":
            getattr(saving, how)(*([at(2)] if how == "save" else []))

    trainer = trainer_of(0.0)
    saving = BackgroundSaving(tmp_path, trainer, keep_last=1)
    with monkeypatch.context() as patch, pytest.raises(UserError) as caught, saving:
        patch.setattr(os, "fsync", full_disk)
        saving.save(at(1))
        ask(saving)
    assert "step-00000001: cannot be written (No space left on device)" in caught.value.line()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_told_while_a_state_is_written(tmp_path, monkeypatch, room):
    with BackgroundSaving(tmp_path, trainer_of(0.0), keep_last=1) as saving, held_up(monkeypatch):
        saving.save(at(1))
        saving.check()
        assert saved_steps(tmp_path) == []


def test_copies_that_do_not_fit_after_all_are_not_needed(tmp_path, monkeypatch, room):
    def no_memory(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with BackgroundSaving(tmp_path, trainer_of(4.0), keep_last=1) as saving:
        saving.save(at(1))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", no_memory)
            saving.save(at(2))
        assert saved_steps(tmp_path) == [2]
    assert saved_value(tmp_path) == 4.0


@pytest.mark.parametrize(("free", "processes", "fits"), [(201, 1, True), (200, 1, False), (999, 2, False)])
def test_copies_are_made_where_two_would_fit(monkeypatch, free, processes, fits):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1000))
    on_gpu = World(0, processes, 0, torch.device("cuda", 0))
    assert room_for_copies({"weight": torch.zeros(5, 5)}, on_gpu) is fits
    assert not room_for_copies({"weight": torch.zeros(5, 5)}, ALONE)


def test_a_state_that_fails_beside_another_error_is_logged(tmp_path, monkeypatch, room, caplog):
    with pytest.raises(KeyError), BackgroundSaving(tmp_path, trainer_of(3.0), keep_last=1) as saving:
        monkeypatch.setattr(os, "fsync", full_disk)
        saving.save(at(1))
        raise KeyError
    assert "cannot be written (No space left on device)" in caplog.text


def test_another_error_does_not_cost_the_state_and_is_not_hidden(tmp_path, monkeypatch, room):
    with pytest.raises(KeyError), BackgroundSaving(tmp_path, trainer_of(3.0), keep_last=1) as saving:
        with held_up(monkeypatch):
            saving.save(at(1))
        raise KeyError
    assert saved_value(tmp_path) == 3.0


@pytest.mark.parametrize("beside", [True, False])
def test_what_follows_a_state_comes_when_it_is_on_the_disk(tmp_path, monkeypatch, beside):
    monkeypatch.setattr(background_saving, "room_for_copies", lambda *_: beside)
    seen = []
    with BackgroundSaving(tmp_path, trainer_of(1.0), keep_last=1) as saving, held_up(monkeypatch) as go_on:
        if not beside:
            go_on.set()
        saving.save(TrainingState(1, 0, 0.0), then=[lambda: seen.append(saved_steps(tmp_path))])
        assert seen == ([] if beside else [[1]])
        go_on.set()
    assert seen == [[1]]
