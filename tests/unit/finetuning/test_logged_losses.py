"""A logged loss is the mean over all targets since the line before, also where the run was interrupted."""

import pytest
import torch
from torch import nn

from bertsmith.finetuning import finetune
from bertsmith.tasks.objective import TaskObjective
from bertsmith.training.journal import read_metrics
from tests.tuning import stop_at, tune

NINE_STEPS = ("run.epochs=0.9", "head.class_weights=balanced")
LINES = {4: range(4), 8: range(4, 8), 9: range(8, 9)}
"""With about two lines in a run of nine steps: after which step, and which steps it tells of."""


@pytest.fixture
def losses(monkeypatch):
    """Sum of losses and sum of weights of each step in its order; tiny runs have one micro-batch each."""
    monkeypatch.setattr(finetune, "LOGGED_LINES", 2)
    seen = []

    def keep(module, inputs, outputs):
        if isinstance(module, TaskObjective) and torch.is_grad_enabled():
            seen.append((outputs[1][0].item(), inputs[0].weights.sum().item()))

    hook = nn.modules.module.register_module_forward_hook(keep)
    yield seen
    hook.remove()


def check(folder, losses):
    assert len(losses) == 9
    assert len({round(weight, 3) for _, weight in losses}) > 5  # a mean of means would be another
    lines = {line["step"]: line["loss"] for line in read_metrics(folder) if line["kind"] == "train"}
    expected = {
        last: sum(losses[step][0] for step in steps) / sum(losses[step][1] for step in steps)
        for last, steps in LINES.items()
    }
    assert lines == pytest.approx(expected, rel=1e-5)


def test_a_logged_loss_is_the_mean_since_the_line_before(model, tmp_path, losses):
    check(tune("wnut17", model, tmp_path, *NINE_STEPS).folder, losses)


def test_a_logged_loss_tells_of_the_steps_before_an_interruption_too(model, tmp_path, losses):
    with stop_at(5):
        assert tune("wnut17", model, tmp_path, *NINE_STEPS).steps == 6
    check(tune("wnut17", model, tmp_path, *NINE_STEPS).folder, losses)
