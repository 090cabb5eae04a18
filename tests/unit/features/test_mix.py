import pytest
import torch

from bertsmith.features.mix import LayerMix


def test_a_new_mix_is_the_mean_of_all_layers():
    states = [torch.full((2, 3), float(layer)) for layer in range(5)]
    assert LayerMix(5)(states).tolist() == torch.full((2, 3), 2.0).tolist()


def test_a_mix_weighs_layers_by_a_softmax_and_scales_their_sum():
    mix = LayerMix(2)
    with torch.no_grad():
        mix.weights_L.copy_(torch.tensor([0.0, 3.0]).log1p())  # e to these are 1 and 4
        mix.gamma.fill_(10.0)
    assert mix([torch.zeros(1, 1), torch.ones(1, 1)]).item() == pytest.approx(8.0)


def test_a_mix_learns_its_weights_and_its_scale():
    mix = LayerMix(2)
    mix([torch.zeros(1, 1), torch.ones(1, 1)]).sum().backward()
    assert mix.weights_L.grad.tolist() == [-0.25, 0.25] and mix.gamma.grad.item() == 0.5
