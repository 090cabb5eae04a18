"""Fine-tuning's learning rates: which parameter gets which, and how they change over a run."""

import math

import pytest
import torch
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.recipe.finetuning_schema import FinetuningOptimSection
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.distributed import ALONE
from bertsmith.training.optimizers import build_optimizer, learning_rate, without_short_warmup
from bertsmith.training.trainer import GradientGuard, StepInput, Trainer, take_step
from tests.tiny import tiny_network


def settings_by_name(module, optimizer):
    """Factor and decay of each parameter that is learned."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(group["lr_factor"] * optimizer.defaults["lr"])
        for parameter in group["params"]:
            assert names[parameter] not in found
            found[names[parameter]] = (group["lr_factor"], group["weight_decay"])
    return found


def test_each_layer_learns_more_slowly_than_the_one_above_it():
    network = tiny_network(heads={"pooler": 0, "classify": 2})
    optim = FinetuningOptimSection(layer_decay=0.5, head_lr_factor=10)
    found = settings_by_name(network, build_optimizer(network, optim))
    factors = {name: factor for name, (factor, _) in found.items()}
    assert factors.keys() == dict(network.named_parameters()).keys()
    for name, factor in factors.items():
        expected = [
            factor
            for start, factor in (
                ("encoder.blocks.2.", 1.0),
                ("encoder.blocks.1.", 0.5),
                ("encoder.blocks.0.", 0.25),
                ("encoder.embeddings.", 0.125),
                ("heads.pooler.", 1.0),
                ("heads.classify.", 10.0),
            )
            if name.startswith(start)
        ]
        assert [factor] == expected, name


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_embeddings_matrices_and_heads_have_learning_rates_of_their_own(algorithm):
    network = tiny_network(heads={"pooler": 0, "mlm": 0, "nsp": 2})
    factors = {"embedding_lr_factor": 3.0, "matrix_lr_factor": 5.0, "head_lr_factor": 7.0}
    optim = OptimSection(algorithm=algorithm, layer_decay=0.5, **factors)
    found = settings_by_name(network, build_optimizer(network, optim))
    assert found.keys() == dict(network.named_parameters()).keys()
    of_layers = {"encoder.blocks.2.": 1.0, "encoder.blocks.1.": 0.5, "encoder.blocks.0.": 0.25}
    for name, (factor, _) in found.items():
        starts = {**of_layers, "encoder.embeddings.": 3 * 0.125, "heads.pooler.": 1.0, "heads.": 7.0}
        expected = next(value for start, value in starts.items() if name.startswith(start))
        if name.startswith("encoder.blocks.") and network.get_parameter(name).dim() == 2:
            expected *= 5
        assert factor == expected, name


def test_a_last_layer_norm_learns_with_the_last_layer():
    network = tiny_network("modernbert", {"classify": 2})
    optim = FinetuningOptimSection(layer_decay=0.5)
    found = settings_by_name(network, build_optimizer(network, optim))
    assert found["encoder.final_norm.weight"] == (1.0, 0.0)
    assert found["encoder.embeddings.words.weight"] == (0.125, 0.01)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_weight_decay_spares_biases_and_layer_norms_and_nothing_else(model_type):
    network = tiny_network(model_type, {"classify": 2, "mlm": 0})
    found = settings_by_name(network, build_optimizer(network, FinetuningOptimSection()))
    spared = {name for name, (_, decay) in found.items() if decay == 0}
    assert spared == {name for name in found if "bias" in name or "norm" in name}
    assert {factor for factor, _ in found.values()} == {1.0}


def test_what_all_layers_look_up_is_learned_with_the_embeddings():
    network = tiny_network("deberta-v2", {"classify": 2})
    found = settings_by_name(network, build_optimizer(network, FinetuningOptimSection(layer_decay=0.5)))
    factors = {name: factor for name, (factor, _) in found.items()}
    assert factors["encoder.relative.table.weight"] == factors["encoder.embeddings.words.weight"] == 0.5**3


def test_layers_that_share_their_weights_cannot_have_rates_of_their_own():
    network = tiny_network("albert", {"classify": 2})
    with pytest.raises(UserError, match="share"):
        build_optimizer(network, FinetuningOptimSection(layer_decay=0.9))
    found = settings_by_name(network, build_optimizer(network, FinetuningOptimSection(head_lr_factor=3)))
    assert {factor for name, (factor, _) in found.items() if name.startswith("encoder.")} == {1.0}


def test_what_is_frozen_is_skipped():
    network = tiny_network(heads={"pooler": 0, "classify": 2})
    network.encoder.requires_grad_(False)
    found = settings_by_name(network, build_optimizer(network, FinetuningOptimSection()))
    assert found.keys() == {name for name, _ in network.named_parameters() if name.startswith("heads.")}


@pytest.mark.parametrize(("bias_correction", "expected"), [(True, 1.0), (False, 0.1 / 0.001**0.5)])
def test_bias_correction_decides_the_length_of_the_first_step(bias_correction, expected):
    weights = nn.Linear(1, 1, bias=False)
    before = weights.weight.item()
    optim = FinetuningOptimSection(weight_decay=0, peak_lr=1.0, bias_correction=bias_correction, eps=1e-12)
    optimizer = build_optimizer(weights, optim)
    weights.weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert before - weights.weight.item() == pytest.approx(expected, rel=1e-5)


class SummedWeights(nn.Module):
    """An objective whose gradient is 1 everywhere."""

    def __init__(self):
        super().__init__()
        self.network = tiny_network(heads={"pooler": 0, "classify": 2})

    def forward(self, batch, loss_scales):
        loss = sum(parameter.sum() for parameter in self.network.parameters()) * loss_scales[0]
        return loss, loss.detach()[None]


def test_a_step_takes_each_group_at_its_own_rate():
    objective = SummedWeights()
    before = {name: each.detach().clone() for name, each in objective.network.named_parameters()}
    optim = FinetuningOptimSection(layer_decay=0.5, head_lr_factor=4, weight_decay=0)
    optimizer = build_optimizer(objective, optim)
    trainer = Trainer(objective, optimizer, ALONE, "fp32", "off", GradientGuard("off"))
    take_step(trainer, StepInput((torch.zeros(1),), (1.0,), 1e-3))
    for name, factor in (("heads.classify.output.weight", 4), ("encoder.embeddings.words.weight", 0.125)):
        moved = before[name] - objective.network.get_parameter(name).detach()
        assert moved.mean().item() == pytest.approx(1e-3 * factor, rel=1e-3)


# ---- schedules


def rates(optim, *progress):
    return [learning_rate(each, optim) for each in progress]


def test_the_linear_schedule_rises_to_the_peak_and_falls_to_nothing():
    optim = FinetuningOptimSection(warmup_fraction=0.2, peak_lr=2.0)
    assert rates(optim, 0.0, 0.1, 0.2, 0.6, 1.0) == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])


def test_the_google_schedule_jumps_down_where_the_warm_up_ends():
    optim = FinetuningOptimSection(warmup_fraction=0.1, peak_lr=2.0, schedule="google")
    assert rates(optim, 0.05, 0.1, 0.5, 1.0) == pytest.approx([1.0, 1.8, 1.0, 0.0])


def test_the_constant_schedule_stays_at_the_peak():
    optim = FinetuningOptimSection(warmup_fraction=0.5, peak_lr=2.0, schedule="constant")
    assert rates(optim, 0.25, 0.5, 1.0) == [1.0, 2.0, 2.0]


def slanted_as_published(step, steps, cut_share, peak):
    """Howard & Ruder 2018, equation 3."""
    cut, ratio = math.floor(steps * cut_share), 32
    p = step / cut if step < cut else 1 - (step - cut) / (cut * (1 / cut_share - 1))
    return peak * (1 + p * (ratio - 1)) / ratio


@pytest.mark.parametrize("step", [0, 1, 99, 100, 101, 500, 999, 1000])
def test_the_slanted_schedule_is_the_published_one(step):
    optim = FinetuningOptimSection(warmup_fraction=0.1, peak_lr=0.01, schedule="slanted")
    expected = slanted_as_published(step, 1000, 0.1, 0.01)
    assert learning_rate(step / 1000, optim) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", ["linear", "google", "slanted", "constant"])
@pytest.mark.parametrize("warmup_fraction", [0.0, 1.0])
def test_no_warm_up_and_nothing_but_warm_up_are_possible(schedule, warmup_fraction):
    optim = FinetuningOptimSection(warmup_fraction=warmup_fraction, peak_lr=2.0, schedule=schedule)
    found = rates(optim, 0.0, 0.5, 1.0)
    assert all(0 <= rate <= 2.0 for rate in found)
    assert found[0] == (2.0 if warmup_fraction == 0 else 2.0 / 32 if schedule == "slanted" else 0.0)


@pytest.mark.parametrize(("steps", "share"), [(1, 0.1), (9, 0.1), (1, 1.0), (3, 0.0)])
@pytest.mark.parametrize("schedule", ["linear", "google", "slanted", "constant"])
def test_a_warm_up_of_less_than_a_step_is_skipped(schedule, steps, share):
    optim = FinetuningOptimSection(warmup_fraction=share, peak_lr=2.0, schedule=schedule)
    assert learning_rate(0.0, without_short_warmup(optim, steps=steps)) == 2.0


@pytest.mark.parametrize(("steps", "share"), [(10, 0.1), (2, 0.5), (1000, 0.06)])
def test_a_warm_up_of_a_step_and_more_stays(steps, share):
    optim = FinetuningOptimSection(warmup_fraction=share)
    assert without_short_warmup(optim, steps=steps) is optim
