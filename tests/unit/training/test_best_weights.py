"""Which of a run's weights are kept as the best, and that they come back whole."""

import pytest
import torch
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.core.measures import Metric
from bertsmith.training.best_weights import BestWeights
from bertsmith.training.checkpoint import SavedState, TrainingState
from bertsmith.training.distributed import ALONE
from bertsmith.training.trainer import Progress


@pytest.fixture
def kept(tmp_path):
    return BestWeights(tmp_path, nn.Linear(1, 1), Metric("accuracy"), ALONE)


def offer(kept, *results):
    """Offer weights that are the number of their evaluation."""
    for step, (value, loss) in enumerate(results, start=1):
        kept.module.weight.data.fill_(step)
        kept.offer(value, loss, step=step)
    return kept.best


@pytest.mark.parametrize(
    ("results", "step"),
    [
        ([(0.8, 0.5), (0.9, 0.4), (0.9, 0.3), (0.9, 0.6)], 3),
        ([(0.9, 0.3), (0.9, 0.3), (0.8, 0.1)], 1),
        ([(0.5, 1.0), (0.5, 1.0), (0.4, 1.0), (0.6, 1.0), (0.6, 1.0)], 4),
    ],
)
def test_of_equally_good_weights_the_earliest_with_the_smallest_loss_are_kept(kept, results, step):
    best = offer(kept, *results)
    assert (best.step, best.waited) == (step, len(results) - step)
    assert best.weights["weight"].item() == step


def test_patience_runs_out_after_as_many_evaluations_as_it_allows(kept):
    assert not kept.has_run_out(0 + 1)
    offer(kept, (0.9, 1.0), (0.8, 1.0), (0.8, 1.0))
    assert kept.has_run_out(2) and not kept.has_run_out(3) and not kept.has_run_out("off")
    kept.wait_anew()
    assert not kept.has_run_out(1)


def saved_state(kept, folder):
    return SavedState(folder, TrainingState.at(Progress(), kept.scalars()), 1)


def test_best_weights_are_read_again_and_those_before_are_gone(kept, tmp_path):
    offer(kept, (0.5, 1.0))
    kept.scalars()
    offer(kept, (0.6, 1.0), (0.7, 1.0))
    saved = saved_state(kept, tmp_path)
    kept.saved()
    assert [file.name for file in tmp_path.iterdir()] == ["best-2.safetensors"]
    again = BestWeights(tmp_path, nn.Linear(1, 1), kept.metric, ALONE)
    again.restore(saved)
    assert (again.best.value, again.best.step, again.best.waited) == (0.7, 2, 0)
    assert torch.equal(again.best.weights["weight"], kept.best.weights["weight"])


def test_a_flipped_bit_in_the_best_weights_is_found(kept, tmp_path):
    offer(kept, (0.5, 1.0))
    saved = saved_state(kept, tmp_path)
    file = tmp_path / "best-1.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(UserError, match="best-1.safetensors: is damaged: its checksum differs"):
        kept.restore(saved)


def test_better_weights_that_come_while_a_state_is_written_leave_its_file_alone(kept, tmp_path):
    offer(kept, (0.5, 1.0))
    kept.scalars()
    offer(kept, (0.5, 1.0), (0.6, 1.0))
    kept.saved()
    assert [file.name for file in tmp_path.iterdir()] == ["best-1.safetensors"]
