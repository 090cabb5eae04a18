"""Fine-tuning in fp16: GPUs without bf16 get it, and the loss scale is part of what is resumed."""

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.finetuning import finetuning_setup
from bertsmith.training.trainer import choose_precision
from tests.tiny_runs import differing, metrics_of
from tests.tuning import Notebook, stop_at, tune, weights_of

SETTINGS = ("run.limit=16", "run.examples=4", "run.epochs=1.5")  # 6 steps


@pytest.fixture
def half(monkeypatch):
    """As on a GPU without bf16, with a scale that is too large for the first steps and grows every third."""
    monkeypatch.setattr(finetuning_setup, "choose_precision", lambda *_: "fp16")
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind: scaler(kind, 2.0**19, growth_interval=3))


def test_a_gpu_without_bf16_is_trained_on_in_fp16(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert choose_precision("auto", gpu) == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert choose_precision("auto", gpu) == "bf16"
    assert (choose_precision("fp16", gpu), choose_precision("auto", torch.device("cpu"))) == ("fp16", "fp32")


def test_a_resumed_run_scales_its_loss_as_one_that_was_not_interrupted(half, model, tmp_path):
    notebook = Notebook()
    whole = tune("sst2", model, tmp_path / "whole", *SETTINGS, notebook=notebook).folder
    overflows = [note for note in notebook.notes if "overflowed fp16; the loss scale is now" in note]
    assert overflows[0].startswith("step 1 was skipped") and len(overflows) < 4
    with stop_at(3):
        assert not tune("sst2", model, tmp_path / "parts", *SETTINGS).finished
    parts = tune("sst2", model, tmp_path / "parts", *SETTINGS).folder
    assert differing(weights_of(parts), weights_of(whole)) == []
    assert metrics_of(parts) == metrics_of(whole)


def test_fp16_on_a_cpu_is_refused_in_a_line(model, tmp_path):
    with pytest.raises(UserError, match=r"run\.precision: fp16 is for a GPU; set it to auto, fp32 or bf16"):
        tune("sst2", model, tmp_path, "run.precision=fp16")
