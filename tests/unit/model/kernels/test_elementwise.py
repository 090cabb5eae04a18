"""GELU with a quicker derivative, and dropout that samples four numbers at once."""

import pytest
import torch
from torch.nn import functional

from bertsmith.model.kernels import elementwise
from bertsmith.model.kernels.elementwise import Dropout, bernoulli_mask, real_probability


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_torchs_gelu_in_both_passes(monkeypatch, dtype):
    monkeypatch.setattr(elementwise, "ON_ARM", True)
    values = torch.linspace(-6, 6, 1001, dtype=dtype, requires_grad=True)
    upstream = torch.linspace(1, 2, 1001, dtype=dtype)
    ours, theirs = elementwise.gelu(values), functional.gelu(values)
    assert torch.equal(ours, theirs)
    for mine, torchs in zip(
        *(torch.autograd.grad(each, values, upstream) for each in (ours, theirs)), strict=True
    ):
        assert torch.allclose(mine, torchs, atol=2e-6 if dtype == torch.float32 else 1e-14, rtol=0)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_samples_are_true_with_their_probability(probability):
    sampled = bernoulli_mask(probability, (1000, 401), torch.device("cpu"), torch.Generator().manual_seed(0))
    assert sampled.shape == (1000, 401)
    assert sampled.double().mean().item() == pytest.approx(probability, abs=0.002)


def test_neighbours_are_sampled_by_themselves():
    sampled = bernoulli_mask(0.3, (400_000,), torch.device("cpu"), torch.Generator().manual_seed(0)).double()
    for distance in range(1, 9):
        both = (sampled[:-distance] * sampled[distance:]).mean().item()
        assert both == pytest.approx(0.09, abs=0.003)


def test_dropout_keeps_the_mean_and_passes_gradients_where_it_keeps():
    torch.manual_seed(0)
    values = torch.ones(300, 200, requires_grad=True)
    dropped = Dropout(0.1)(values)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - real_probability(0.1))])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())


def test_dropout_is_off_in_evaluation_and_reproducible_in_training():
    layer, values = Dropout(0.5), torch.randn(64, 64)
    assert torch.equal(layer.eval()(values), values)
    layer.train()
    torch.manual_seed(3)
    first = layer(values)
    assert not torch.equal(layer(values), first)
    torch.manual_seed(3)
    assert torch.equal(layer(values), first)
