"""The average of a run's last weights."""

import pytest
import torch
from torch import nn

from bertsmith.training.checkpoint import TrainingState, kept_states, load_checkpoint, save_checkpoint
from bertsmith.training.trainer import Progress, Trainer
from bertsmith.training.weight_average import WeightAverage

SEEN = [3.0, 5.0, 10.0]


def averaged(decay):
    """A layer that had these weights one after the other, and their average."""
    layer = nn.Linear(2, 2)
    average = WeightAverage(layer, torch.optim.SGD(layer.parameters()), decay)
    for value in SEEN:
        for parameter in layer.parameters():
            parameter.data.fill_(value)
        average.add()
    return layer, average


@pytest.mark.parametrize(
    ("decay", "expected"), [("equal", sum(SEEN) / 3), (0.9, 0.9 * (0.9 * 3.0 + 0.1 * 5.0) + 0.1 * 10.0)]
)
def test_inside_the_weights_are_their_average_and_outside_the_last_ones(decay, expected):
    layer, average = averaged(decay)
    for _ in range(2):
        with average.applied():
            assert layer.weight.tolist() == [[pytest.approx(expected)] * 2] * 2
            assert layer.bias.tolist() == [pytest.approx(expected)] * 2
        assert layer.weight.tolist() == [[10.0, 10.0]] * 2


def test_an_evaluation_that_fails_gives_the_last_weights_back():
    layer, average = averaged("equal")
    with pytest.raises(RuntimeError), average.applied():
        raise RuntimeError
    assert layer.bias.tolist() == [10.0, 10.0]


def test_without_any_weights_yet_nothing_is_exchanged():
    layer = nn.Linear(2, 2)
    average = WeightAverage(layer, torch.optim.SGD(layer.parameters()))
    before = layer.weight.clone()
    with average.applied():
        assert torch.equal(layer.weight, before)


def test_a_loaded_checkpoint_has_the_average_of_when_it_was_saved(tmp_path):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    trainer = Trainer(layer, optimizer, average=WeightAverage(layer, optimizer))
    for step, value in enumerate(SEEN, start=1):
        for parameter in layer.parameters():
            parameter.data.fill_(value)
        if step > 1:  # the first state is from before the average began
            trainer.average.add()
        save_checkpoint(tmp_path, TrainingState.at(Progress(step)), trainer, keep_last=3)
    for saved, expected in zip(kept_states(tmp_path), [3.0, 5.0, 7.5], strict=True):
        load_checkpoint(saved, trainer)
        with trainer.average.applied():
            assert layer.bias.tolist() == [expected, expected]
        assert trainer.average.count == saved.state.step - 1
