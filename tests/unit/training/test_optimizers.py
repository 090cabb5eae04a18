from typing import get_args

import pytest
import torch
from torch import nn

from bertsmith.recipe.optim_section import Algorithm, OptimSection
from bertsmith.training.optimizers import OPTIMIZERS, build_optimizer
from tests.tiny import tiny_network


class Published:
    """AdamWeightDecayOptimizer of optimization.py on one parameter, in double precision."""

    def __init__(self, weights, optim, decay):
        self.weights, self.optim, self.decay = weights.detach().double(), optim, decay
        self.mean = self.square = torch.zeros_like(self.weights)
        self.steps = 0

    def step(self, gradient, rate):
        beta1, beta2, self.steps = self.optim.beta1, self.optim.beta2, self.steps + 1
        self.mean = beta1 * self.mean + (1 - beta1) * gradient
        self.square = beta2 * self.square + (1 - beta2) * gradient**2
        mean, square = self.mean, self.square
        if self.optim.bias_correction:
            mean, square = mean / (1 - beta1**self.steps), square / (1 - beta2**self.steps)
        update = mean / (square.sqrt() + self.optim.eps) + self.decay * self.weights
        self.weights = self.weights - rate * update


def gradients_of(module, step):
    """One gradient for each parameter of a step, of very different sizes."""
    stream = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(module.parameters()):
        size = 10.0 ** (number % 7 - 5)
        yield parameter, (torch.randn(parameter.shape, generator=stream) * size).to(parameter.dtype)


def rate_of(step):
    return 1e-5 * (step + 1)


def take_steps(module, optimizer, steps):
    for step in steps:
        for parameter, gradient in gradients_of(module, step):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        optimizer.step()


def names_by_decay(module, optimizer):
    """Names of the parameters for each weight decay."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        found.setdefault(group["weight_decay"], set()).update(names[id(each)] for each in group["params"])
    return found


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-7)])
def test_adam_is_the_published_formula(bias_correction, dtype, tolerance):
    optim = OptimSection(bias_correction=bias_correction, weight_decay=0.1)
    module = tiny_network(heads={}).to(dtype)
    references = [
        Published(parameter, optim, 0.0 if "norm" in name or "bias" in name else 0.1)
        for name, parameter in module.named_parameters()
    ]
    optimizer = build_optimizer(module, optim)
    for step in range(20):
        for reference, (_, gradient) in zip(references, gradients_of(module, step), strict=True):
            reference.step(gradient.double(), rate_of(step))
        take_steps(module, optimizer, [step])
    for reference, (name, parameter) in zip(references, module.named_parameters(), strict=True):
        difference = (parameter.detach().double() - reference.weights).abs().max()
        assert difference <= tolerance, name


def test_without_bias_correction_the_first_step_is_small():
    weights = nn.Linear(1, 1)
    before = weights.weight.item()
    optimizer = build_optimizer(weights, OptimSection(weight_decay=0.0, peak_lr=1.0))
    weights.weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert before - weights.weight.item() == pytest.approx(0.1 / (0.001**0.5 + 1e-6), rel=1e-5)


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
@pytest.mark.parametrize("model_type", ["bert", "roberta", "albert", "distilbert", "ernie", "modernbert"])
def test_weight_decay_spares_biases_and_layer_norms_and_nothing_else(algorithm, model_type):
    heads = {"bert": {"pooler": 0, "mlm": 0, "nsp": 2}}.get(model_type, {"mlm": 0})
    module = tiny_network(model_type, heads)
    found = names_by_decay(module, build_optimizer(module, OptimSection(algorithm=algorithm)))
    expected = {name for name, _ in module.named_parameters() if "bias" in name or "norm" in name}
    assert found[0.0] == expected
    assert "heads.mlm.bias" in found[0.0]
    assert found[0.01] == {name for name, _ in module.named_parameters()} - expected


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_a_shared_parameter_is_trained_once(algorithm):
    module = nn.ModuleDict({name: tiny_network(heads={}) for name in ("one", "other")})
    each = len(list(module["one"].parameters()))
    attention = module["one"].encoder.blocks[0].attention  # two weights and two biases
    module["other"].encoder.blocks[0].attention = attention
    optimizer = build_optimizer(module, OptimSection(algorithm=algorithm))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * each - 4


def test_a_frozen_parameter_is_skipped():
    module = nn.Linear(3, 3)
    module.weight.requires_grad_(False)
    optimizer = build_optimizer(module, OptimSection())
    assert [each for group in optimizer.param_groups for each in group["params"]] == [module.bias]


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_reloaded_optimizer_continues_bit_for_bit(algorithm, bias_correction):
    optim = OptimSection(algorithm=algorithm, bias_correction=bias_correction)
    straight, stopped, resumed = (tiny_network() for _ in range(3))
    take_steps(straight, build_optimizer(straight, optim), range(6))
    first = build_optimizer(stopped, optim)
    take_steps(stopped, first, range(3))
    resumed.load_state_dict(stopped.state_dict())
    second = build_optimizer(resumed, optim)
    second.load_state_dict(first.state_dict())
    take_steps(resumed, second, range(3, 6))
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, straight.get_parameter(name)), name


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("model_type", ["bert", "albert", "modernbert"])
def test_matrices_first_is_the_order_in_which_pretraining_sums_its_gradient_norm(model_type, weight_decay):
    module = tiny_network(model_type, {"mlm": 0})
    optimizer = build_optimizer(module, OptimSection(weight_decay=weight_decay), order="matrices first")
    decayed, exempt = [], []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            spared = isinstance(owner, nn.LayerNorm) or "bias" in name
            (exempt if spared else decayed).append(parameter)
    expected = list(dict.fromkeys([*decayed, *exempt]))
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(each) for each in found] == [id(each) for each in expected]


def test_parameters_stand_as_defined_within_one_learning_rate_and_decay():
    module = tiny_network(heads={"pooler": 0, "classify": 2})
    (group,) = build_optimizer(module, OptimSection(weight_decay=0.0)).param_groups
    assert [id(each) for each in group["params"]] == [id(each) for each in module.parameters()]


def test_a_recipe_names_the_optimisers_of_the_table():
    assert get_args(Algorithm) == tuple(OPTIMIZERS)


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_the_table_says_how_many_numbers_an_optimiser_keeps_for_each_parameter(algorithm):
    module = tiny_network()
    optimizer = build_optimizer(module, OptimSection(algorithm=algorithm))
    take_steps(module, optimizer, [0])
    kept = [
        sum(each.shape == parameter.shape for each in optimizer.state[parameter].values())
        for parameter in module.parameters()
    ]
    assert max(kept) == OPTIMIZERS[algorithm].moments and min(kept) >= 1
