"""Dropout that draws four numbers at once."""

import pytest
import torch

from bertsmith.model.dropping import Dropout, drawn_below, real_share


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_draws_fall_below_a_share_that_often(share):
    drawn = drawn_below(share, (1000, 401), torch.device("cpu"), torch.Generator().manual_seed(0))
    assert drawn.shape == (1000, 401)
    assert drawn.double().mean().item() == pytest.approx(share, abs=0.002)


def test_neighbours_are_drawn_by_themselves():
    drawn = drawn_below(0.3, (400_000,), torch.device("cpu"), torch.Generator().manual_seed(0)).double()
    for distance in range(1, 9):
        both = (drawn[:-distance] * drawn[distance:]).mean().item()
        assert both == pytest.approx(0.09, abs=0.003)


def test_dropout_keeps_the_mean_and_passes_gradients_where_it_keeps():
    torch.manual_seed(0)
    values = torch.ones(300, 200, requires_grad=True)
    dropped = Dropout(0.1)(values)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - real_share(0.1))])
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
