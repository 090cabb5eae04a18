"""Same bits each time, where that is wanted, and only there."""

import os

import pytest
import torch

from bertsmith.training.trainer import same_bits


def settings() -> tuple[bool, bool, bool]:
    filling = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), filling, torch.backends.mkldnn.enabled


def test_only_repeatable_algorithms_are_allowed_inside(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = settings()
    with same_bits(True):
        assert settings() == (True, False, True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert settings() == before


def test_any_algorithm_is_allowed_where_it_is_not_wanted(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with same_bits(True), same_bits(False):
        assert settings()[:2] == (False, False)


def test_the_old_settings_come_back_after_an_error():
    before = settings()
    with pytest.raises(ZeroDivisionError), same_bits(True):
        raise ZeroDivisionError
    assert settings() == before


def test_a_choice_that_the_user_made_for_cublas_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with same_bits(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_work_in_half_precision_before_does_not_change_the_bits_of_what_follows():
    layer = torch.nn.Linear(32, 96)
    seen = torch.rand(104, 32, generator=torch.Generator().manual_seed(0))
    with same_bits(True):
        known = layer(seen)
    with torch.autocast("cpu", torch.bfloat16):
        layer(seen)  # a CPU without bf16 instructions makes torch give up oneDNN here
    with same_bits(True):
        assert torch.equal(layer(seen), known)
