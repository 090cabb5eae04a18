"""Attention over one dense group: the fused kernel and the plain products are one thing."""

import pytest
import torch

from bertsmith.model.attention.grouped import DenseAttention, Operands, Saved, lowered

FILLER_GN = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] + [True] * 5])


def group(*, bias=None, dropout=0.0, dtype=torch.float64):
    shape = (3, 2, 6, 4)
    chance = torch.Generator().manual_seed(7)
    operands = Operands(*(torch.randn(shape, dtype=dtype, generator=chance) for _ in range(3)))
    generator = torch.Generator().manual_seed(3) if dropout else None
    return DenseAttention(operands, bias, False, dropout, generator)


def both_passes(problem, *, filler_GN=None):
    mixed, normalisers = problem.forward()
    gradient = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view(mixed.shape).clone()
    if filler_GN is not None:  # nobody reads filler, so no gradient comes to it
        gradient.masked_fill_(filler_GN[:, None, :, None], 0.0)
    if problem.generator is not None:
        problem.generator.manual_seed(3)
    gradients = problem.backward(Saved(gradient, mixed, normalisers))
    if filler_GN is not None:
        mixed.masked_fill_(filler_GN[:, None, :, None], 0.0)
    return mixed, *gradients


def hidden_keys(filler_GN, *, window):
    index_N = torch.arange(6)
    far_NN = (index_N[:, None] - index_N).abs() > window
    return filler_GN[:, None, None, :] | far_NN


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("window", [6, 2, 1])
@pytest.mark.parametrize(
    "filler_GN", [FILLER_GN, torch.zeros_like(FILLER_GN)], ids=["filler", "equal lengths"]
)
def test_the_fused_form_equals_the_one_written_out(monkeypatch, window, filler_GN, dropout):
    bias = lowered(hidden_keys(filler_GN, window=window), torch.float64)
    monkeypatch.setattr(DenseAttention, "_suits_fused_kernel", lambda _: True)
    fused = both_passes(group(bias=bias, dropout=dropout), filler_GN=filler_GN)
    monkeypatch.setattr(DenseAttention, "_suits_fused_kernel", lambda _: False)
    written_out = both_passes(group(bias=bias, dropout=dropout), filler_GN=filler_GN)
    for ours, plain in zip(fused, written_out, strict=True):
        assert torch.allclose(ours, plain, atol=1e-12, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_whose_keys_are_all_dropped_gets_nothing(monkeypatch, dtype, fused):
    monkeypatch.setattr(DenseAttention, "_suits_fused_kernel", lambda _: fused)
    problem = group(dropout=0.9, dtype=dtype)
    mixed, *gradients = both_passes(problem)
    problem.generator.manual_seed(3)
    all_dropped = problem._dropped().all(-1)
    assert all_dropped.any()
    assert (mixed[all_dropped] == 0).all()
    assert all(each.isfinite().all() for each in (mixed, *gradients))


def test_what_dropout_keeps_is_scaled_by_the_fraction_that_is_really_kept():
    everything = Operands(*(torch.zeros(64, 8, 16, 16) for _ in range(2)), torch.ones(64, 8, 16, 16))
    generator = torch.Generator().manual_seed(0)
    mixed, _ = DenseAttention(everything, None, False, 0.1, generator).forward()
    assert mixed.mean().item() == pytest.approx(1.0, abs=0.004)
