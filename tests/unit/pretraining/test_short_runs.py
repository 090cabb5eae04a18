"""Runs of minutes: their budget is kept, evaluations stay small, and what will not do is told early."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.pretraining import pretrain as pretrain_module
from bertsmith.pretraining.hardware import MIN_EVALUATION_SEQUENCES, fit_machine
from bertsmith.pretraining.initial_model import build_initial_model
from bertsmith.pretraining.pretrain import Clock
from bertsmith.training.distributed import ALONE
from tests.tiny_runs import (
    Listener,
    ask_to_stop,
    differing,
    last_state,
    metrics_of,
    run_tiny,
    stop_at,
    tiny_recipe,
)


# Each evaluation has two passes: one over its own sequences, then one over those of the fixed evaluation.
@pytest.mark.parametrize(("due", "stopped_at"), [(1, 0), (4, 5), (5, 8)])
def test_a_wish_to_stop_breaks_an_evaluation_off_which_the_resumed_run_makes_up_for(
    store, tmp_path, due, stopped_at
):
    asked = []

    def ask_in_an_evaluation(module, *_) -> None:
        if isinstance(module, PretrainingObjective) and not torch.is_grad_enabled():
            asked.append(len(asked))
            if len(asked) == due:
                ask_to_stop()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(ask_in_an_evaluation)
    try:
        result = run_tiny(store, tmp_path / "run")
    finally:
        hook.remove()
    assert (result.state, result.steps, result.saved_step) == ("stopped", stopped_at, stopped_at)
    assert stopped_at not in [line["step"] for line in metrics_of(tmp_path / "run", "held-out")]
    assert run_tiny(store, tmp_path / "run").state == "finished"
    run_tiny(store, tmp_path / "straight")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")
    assert differing(last_state(tmp_path / "run"), last_state(tmp_path / "straight")) == []


def test_a_finished_run_says_how_to_train_on(store, tmp_path):
    run_tiny(store, tmp_path / "run", "run.steps=1")
    with pytest.raises(UserError) as caught:
        run_tiny(store, tmp_path / "run", "run.steps=2")
    message = caught.value.line()
    assert (
        "its learning rate has decayed; continue from its model" in message
        and "run.steps: 1 there, 2 now" in message
    )
    assert f"`start.model={tmp_path / 'run' / 'model'}` and a new `out`" in message
    run_tiny(store, tmp_path / "longer", "run.steps=1", f"start.model={tmp_path / 'run' / 'model'}")


def test_the_bar_moves_with_every_step(store, tmp_path):
    listener = Listener()
    run_tiny(store, tmp_path / "run", "run.log_every_steps=4", listener=listener)
    assert listener.progress == [step / 8 for step in range(1, 9)]
    assert listener.deadlines == []


@contextmanager
def each_pass_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that only passes over the data move: steps and evaluations, however fast the machine is."""
    passed = [0.0]
    monkeypatch.setattr(Clock, "__call__", lambda _: passed[0])

    def pass_time(module, *_) -> None:
        if isinstance(module, PretrainingObjective):
            passed[0] += 1.0

    hook = torch.nn.modules.module.register_module_forward_pre_hook(pass_time)
    try:
        yield
    finally:
        hook.remove()


def test_a_budget_in_minutes_is_kept_and_the_bar_is_told_its_end_and_how_many_steps_will_fit(
    store, tmp_path, monkeypatch
):
    listener = Listener()
    with each_pass_takes_a_second(monkeypatch):
        result = run_tiny(store, tmp_path / "run", "run.budget=minutes", "run.minutes=0.5", listener=listener)
    assert 20 < result.seconds <= 30
    assert listener.deadlines == [(30, 30)]
    (line,) = [note for note in listener.notes if "steps of" in note]
    assert re.match(r"about 2\d steps of 1 seconds fit into 0\.5 minutes", line)


def test_one_minute_is_told_as_one(store, tmp_path):
    listener = Listener()
    with stop_at(0):
        run_tiny(store, tmp_path / "run", "run.budget=minutes", "run.minutes=1", listener=listener)
    (line,) = [note for note in listener.notes if "steps of" in note]
    assert line.endswith("fit into 1 minute")


def test_too_few_steps_are_told_with_what_to_change(store, tmp_path):
    listener = Listener()
    run_tiny(store, tmp_path / "run", "run.budget=minutes", "run.minutes=1e-6", listener=listener)
    (line,) = [note for note in listener.notes if "step of" in note]
    assert line.startswith("about 1 step of")
    assert "too few to learn much" in line and "`run.minutes`" in line and "`batch.sequences`" in line


def test_evaluations_take_a_small_part_of_a_run(store, tmp_path, monkeypatch):
    with each_pass_takes_a_second(monkeypatch):
        run_tiny(store, tmp_path / "run", "run.steps=40", "run.evaluate_every_steps=auto")
    steps = [line["step"] for line in metrics_of(tmp_path / "run", "held-out")]
    # 160 sequences are worth 48 of an evaluation, which are five of eight each and one of the fixed
    # evaluation; the clock has no say.
    assert steps == [0, 8, 16, 24, 32, 40]


def test_a_resumed_run_makes_the_evaluations_of_one_that_was_not_interrupted(store, tmp_path):
    settings = ("run.steps=20", "run.evaluate_every_steps=auto", "run.evaluation_sequences=5")
    run_tiny(store, tmp_path / "straight", *settings)
    with stop_at(9):
        run_tiny(store, tmp_path / "run", *settings)
    run_tiny(store, tmp_path / "run", *settings)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")
    assert len(metrics_of(tmp_path / "run", "held-out")) == 5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("run.steps=1_000_000",), 128),
        (("run.steps=100",), 30),  # 400 sequences: 3 x 400 / 10 / 4
        (("run.steps=1",), MIN_EVALUATION_SEQUENCES),
        (("run.steps=1", "run.evaluation_sequences=99"), 99),
        (("run.budget=tokens", "run.tokens=32_000"), 75),  # 1,000 sequences of 32 tokens
        (("run.budget=minutes", "run.minutes=1"), 128),  # what they take is measured
    ],
    ids=str,
)
def test_a_short_run_is_evaluated_on_fewer_sequences(store, settings, expected):
    recipe = tiny_recipe("run.evaluation_sequences=auto", *settings)
    machine = fit_machine(recipe, build_initial_model(recipe, store).network, ALONE)
    assert machine.evaluation_sequences == expected


# ---- presets that a budget is too small for


def warnings_of(store, folder, *settings: str) -> list[str]:
    listener = Listener()
    run_tiny(store, folder, *settings, listener=listener)
    return [text for text in listener.notes if "bertsmith pretrain auto" in text]


def test_a_preset_that_cannot_learn_in_its_steps_names_auto(store, tmp_path):
    (told,) = warnings_of(store, tmp_path / "run", "name=bert-tiny", "run.steps=2")
    assert "bert-tiny needs about 0.096 M tokens (1,000 steps of 96)" in told
    assert "about 0.00019 M fit into 2 steps" in told
    assert warnings_of(store, tmp_path / "own", "name=my-recipe", "run.steps=2") == []


def test_a_preset_with_minutes_is_warned_of_by_the_speed_of_products(store, tmp_path, monkeypatch):
    minutes = ("name=bert-tiny", "run.budget=minutes", "run.minutes=0.001")
    monkeypatch.setattr(pretrain_module, "product_flops", lambda _: 1e6)
    (told,) = warnings_of(store, tmp_path / "slow", *minutes)
    assert told.endswith("`bertsmith pretrain auto` chooses a recipe for such a budget")
    assert "fit into 0.001 minutes" in told
    monkeypatch.setattr(pretrain_module, "product_flops", lambda _: 1e18)
    assert warnings_of(store, tmp_path / "fast", *minutes) == []
    monkeypatch.setattr(pretrain_module, "product_flops", lambda _: None)  # a GPU that nobody knows
    assert warnings_of(store, tmp_path / "unknown", *minutes) == []
