"""GELU with a quicker derivative."""

import pytest
import torch
from torch.nn import functional

from bertsmith.model import arm_gelu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_torchs_gelu_in_both_passes(monkeypatch, dtype):
    monkeypatch.setattr(arm_gelu, "ON_ARM", True)
    values = torch.linspace(-6, 6, 1001, dtype=dtype, requires_grad=True)
    upstream = torch.linspace(1, 2, 1001, dtype=dtype)
    ours, theirs = arm_gelu.gelu(values), functional.gelu(values)
    assert torch.equal(ours, theirs)
    for mine, torchs in zip(
        *(torch.autograd.grad(each, values, upstream) for each in (ours, theirs)), strict=True
    ):
        assert torch.allclose(mine, torchs, atol=2e-6 if dtype == torch.float32 else 1e-14, rtol=0)
