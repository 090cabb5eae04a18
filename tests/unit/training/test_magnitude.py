"""Masks by magnitude, worked out by hand."""

import pytest
import torch

from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.folder.tensor_files import read_tensors
from bertsmith.training import magnitude
from bertsmith.training.magnitude import GradualSchedule
from tests.lively_networks import lively_network


def test_the_smallest_weights_of_all_matrices_go():
    weights = {"a": torch.tensor([[1.0, -6.0], [0.5, 3.0]]), "b": torch.tensor([[-0.1, 9.0]])}
    masks = magnitude.magnitude_masks(weights, 0.5)
    assert masks["a"].tolist() == [[False, True], [False, True]]
    assert masks["b"].tolist() == [[False, True]]
    magnitude.apply_masks(weights, masks)
    assert weights["a"].tolist() == [[0, -6], [0, 3]]
    assert {name: mask.tolist() for name, mask in magnitude.masks_of(weights).items()} == {
        name: mask.tolist() for name, mask in masks.items()
    }
    assert magnitude.magnitude_masks(weights, 0.0)["a"].tolist() == masks["a"].tolist()


def test_what_is_zero_stays_zero_as_more_go():
    network = lively_network("modernbert", {})
    weights = magnitude.prunable_weights(network)
    gone = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in weights.items()}
    for sparsity in (0.3, 0.6, 0.9):
        magnitude.apply_masks(weights, magnitude.magnitude_masks(weights, sparsity))
        assert magnitude.sparsity_of(network) == pytest.approx(sparsity, abs=1e-3)
        for name, weight in weights.items():
            assert not (weight[gone[name]] != 0).any()
            gone[name] = weight == 0


@pytest.mark.parametrize(("done", "expected"), [(-1, 0), (0, 0), (0.5, 0.7 * 7 / 8), (1, 0.7), (2, 0.7)])
def test_the_schedule_is_cubic(done, expected):
    assert magnitude.cubic_sparsity(0.7, done) == pytest.approx(expected)


def test_masks_are_found_anew_between_two_parts_of_a_run():
    schedule = GradualSchedule(0.8, 1000)
    due = [step for step in range(1, 1001) if schedule.is_due(step)]
    assert (due[0], due[1], due[-1]) == (100, 110, 700)
    assert schedule.sparsity(100) == 0 and schedule.sparsity(700) == pytest.approx(0.8)
    assert schedule.sparsity(400) == pytest.approx(0.7)
    assert GradualSchedule(0.5, 1).is_due(1) and GradualSchedule(0.5, 1).sparsity(1) == 0.5


def test_masks_go_by_the_published_names(tmp_path):
    network = lively_network("bert", {"mlm": 0})
    weights = magnitude.prunable_weights(network)
    magnitude.apply_masks(weights, magnitude.magnitude_masks(weights, 0.4))
    masks = magnitude.published_masks(network)
    assert "bert.encoder.layer.0.attention.self.key.weight" in masks
    write_model(tmp_path, Model(network))
    written = dict(read_tensors(tmp_path))
    assert len(masks) == 3 * 6
    for name, mask in masks.items():
        assert torch.equal(written[name] != 0, mask)
