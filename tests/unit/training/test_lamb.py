from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.lamb import Lamb
from bertsmith.training.optimizers import build_optimizer
from tests.tiny import tiny_network

SHAPES = {1: (2, 3), 3: (9, 4), 0: (5,)}
"""For each number of stacked matrices, a parameter; 9 rows on two processes cut the middle matrix."""


def plain_lamb(weights, gradients, *, rate, decay, bias_correction):
    """LAMB on one matrix (You et al. 2019, algorithm 2, in the form of ALBERT's code); the weights after."""
    mean = square = torch.zeros_like(weights)
    for step, gradient in enumerate(gradients, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        first, second = (1 - 0.9**step, 1 - 0.999**step) if bias_correction else (1, 1)
        update = mean / first / ((square / second).sqrt() + 1e-6) + decay * weights
        lengths = weights.norm(), update.norm()
        ratio = lengths[0] / lengths[1] if lengths[0] > 0 and lengths[1] > 0 else 1.0
        weights = weights - rate * ratio * update
    return weights


def example(steps=4):
    """Weights and the gradients of some steps for each of SHAPES, in double precision."""
    stream = torch.Generator().manual_seed(0)
    draw = {parts: torch.randn(steps + 1, *shape, generator=stream) for parts, shape in SHAPES.items()}
    return {parts: (each[0].double(), list(each[1:].double())) for parts, each in draw.items()}


def train(parameters, gradients, *, bias_correction=False):
    """Run LAMB over parameters by their parts, with a list of gradients for each."""
    groups = [
        {"params": [each], "parts": parts, "weight_decay": 0.1 if parts else 0.0}
        for parts, each in parameters.items()
    ]
    optimizer = Lamb(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-6, bias_correction=bias_correction)
    for step in range(len(gradients[1])):
        for parts, parameter in parameters.items():
            parameter.grad = gradients[parts][step]
        optimizer.step()


@pytest.mark.parametrize("bias_correction", [False, True])
def test_lamb_is_the_plain_formula_on_every_matrix(bias_correction):
    cases = example()
    parameters = {parts: nn.Parameter(weights.clone()) for parts, (weights, _) in cases.items()}
    train(parameters, {parts: each[1] for parts, each in cases.items()}, bias_correction=bias_correction)
    for parts in (1, 3):
        weights, gradients = cases[parts]
        pieces = zip(weights.chunk(parts), *(each.chunk(parts) for each in gradients), strict=True)
        expected = [
            plain_lamb(first, rest, rate=0.01, decay=0.1, bias_correction=bias_correction)
            for first, *rest in pieces
        ]
        torch.testing.assert_close(parameters[parts].data, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_a_parameter_without_parts_takes_plain_adam_steps():
    weights, gradients = example()[0]
    lamb, adam = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    optimizer = torch.optim.Adam([adam], lr=0.01, eps=1e-6)
    for gradient in gradients:
        adam.grad = gradient
        optimizer.step()
    train(
        {0: lamb, 1: nn.Parameter(torch.ones(1))},
        {0: gradients, 1: [torch.ones(1)] * 4},
        bias_correction=True,
    )
    torch.testing.assert_close(lamb.data, adam.data, rtol=1e-12, atol=1e-12)


def test_the_trust_ratio_is_1_where_a_norm_is_0():
    zeros, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lamb([zeros, still], lr=1.0, betas=(0.0, 0.0), eps=1e-6, bias_correction=False)
    zeros.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(zeros.data, torch.full((2, 2), -1.0))
    torch.testing.assert_close(still.data, torch.ones(2, 2))


def test_only_query_key_and_value_are_distinguished():
    network = tiny_network("albert", {"mlm": 0})
    optimizer = build_optimizer(network, OptimSection(algorithm="lamb"))
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    parts = {names[id(each)]: group["parts"] for group in optimizer.param_groups for each in group["params"]}
    assert {name for name, count in parts.items() if count == 3} == {
        "encoder.blocks.0.attention.project.weight"
    }
    assert parts["encoder.blocks.0.attention.project.bias"] == 0
    assert parts["encoder.embeddings.norm.weight"] == 0
    assert parts["encoder.embeddings.words.weight"] == 1


def test_a_parameter_without_a_gradient_stays():
    trained, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Lamb([trained, idle], lr=1.0, betas=(0.9, 0.999), eps=1e-6, bias_correction=False)
    trained.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(idle.data, torch.ones(2))


def train_sharded(rank, rendezvous, results):
    """One of two processes that share every parameter's rows; saves the whole parameters."""
    torch.set_num_threads(1)  # a forked process must not touch its parent's threads, as in a DataLoader
    init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2,))
    parameters, gradients = {}, {}
    for parts, (weights, listed) in {**example(), 1: one_row()}.items():
        parameters[parts] = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))
        gradients[parts] = [distribute_tensor(each, mesh, [Shard(0)]) for each in listed]
    train(parameters, gradients)
    torch.save({parts: each.detach().full_tensor() for parts, each in parameters.items()}, f"{results}{rank}")
    destroy_process_group()


def one_row():
    """A matrix of which the second process holds nothing."""
    weights, gradients = example()[1]
    return weights[:1], [each[:1] for each in gradients]


def test_lamb_on_two_processes_that_share_the_rows_is_lamb_on_one(tmp_path):
    cases = {**example(), 1: one_row()}
    whole = {parts: nn.Parameter(weights.clone()) for parts, (weights, _) in cases.items()}
    train(whole, {parts: gradients for parts, (_, gradients) in cases.items()})
    places = (tmp_path / "meeting", tmp_path / "result")
    torch.multiprocessing.start_processes(train_sharded, places, nprocs=2, start_method="fork")
    for rank in range(2):
        shared = torch.load(tmp_path / f"result{rank}", weights_only=True)
        for parts, parameter in whole.items():
            torch.testing.assert_close(shared[parts], parameter.data, rtol=1e-12, atol=1e-12)
