"""Gradient checkpointing: layers are computed again for the same weights, and less of them is kept."""

import pytest
import torch

from bertsmith.core.errors import UserError
from tests.tiny_runs import differing, metrics_of
from tests.tuning import SHORT, set_up_run, toy_assignment, tune, weights_of


@pytest.mark.parametrize("name", ["sst2", "wnut17"])
def test_recomputed_layers_give_the_same_weights_with_dropout(model, tmp_path, name):
    plain, again = (
        tune(name, model, tmp_path / value, *SHORT, f"run.recompute={value}").folder
        for value in ("false", "true")
    )
    assert differing(weights_of(again), weights_of(plain)) == []
    assert metrics_of(again, "train", "held-out") == metrics_of(plain, "train", "held-out")


def bytes_kept(model, place, *settings):
    """What autograd keeps of a step's forward pass beside the weights, each storage once."""
    assignment = toy_assignment("sst2", model, place, *settings)
    run = set_up_run(assignment)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    (micro,) = run.batches.step(0).micros
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run.trainer.objective(micro, torch.ones(1))
    weights = {each.untyped_storage().data_ptr() for each in run.trainer.objective.parameters()}
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return sum(size for place, size in storages.items() if place not in weights)


def test_less_is_kept_of_layers_that_are_recomputed(model, tmp_path):
    less, more = (bytes_kept(model, tmp_path, f"run.recompute={value}") for value in ("true", "false"))
    assert less < more / 3


def test_a_frozen_encoder_has_nothing_to_recompute(model, tmp_path):
    with pytest.raises(
        UserError,
        match=r"run\.recompute .*= tuned or lora, not frozen-features.*remove run\.recompute",
    ):
        tune("sst2", model, tmp_path, "run.recompute=true", "head.encoder=frozen-features")
