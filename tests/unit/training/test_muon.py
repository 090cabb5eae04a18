"""Muon: each hidden matrix takes the orthogonal step of the plain formula, everything else AdamW's."""

from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bertsmith.core.errors import UserError
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.training.muon import AdamWSettings, Muon, orthogonalised
from bertsmith.training.optimizers import build_optimizer
from tests.tiny import tiny_network

SHAPES = {"wide": (1, (4, 10)), "tall": (1, (10, 4)), "stacked": (3, (12, 4)), "square": (1, (4, 4))}
"""For each name, how many matrices a parameter stacks, and its shape; two of them hold matrices of 4 x 4."""
RATE, DECAY = 0.02, 0.1


def plain_muon(weights, gradients, *, scale):
    """Muon on one matrix, as published (muon.py of Keller Jordan), one product after the other."""
    buffer = torch.zeros_like(weights)
    rows, columns = weights.shape
    factors = {"original": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
    for gradient in gradients:
        buffer = 0.95 * buffer + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * buffer
        update = update / update.norm()
        for _ in range(5):
            gram = update @ update.T
            update = 3.4445 * update - 4.7750 * gram @ update + 2.0315 * gram @ gram @ update
        weights = (1 - RATE * DECAY) * weights - RATE * factors[scale] * update
    return weights


def example(steps=3):
    """Weights and the gradients of some steps for each of SHAPES, in double precision."""
    stream = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(steps + 1, *shape, generator=stream) for name, (_, shape) in SHAPES.items()}
    return {name: (each[0].double(), list(each[1:].double())) for name, each in drawn.items()}


def muon_of(parameters, *, scale="original"):
    groups = [
        {"params": [each], "parts": SHAPES[name][0] if name in SHAPES else 0, "weight_decay": DECAY}
        for name, each in parameters.items()
    ]
    return Muon(groups, lr=RATE, momentum=0.95, scale=scale, adamw=AdamWSettings())


def train(optimizer, parameters, gradients):
    for step in range(3):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][step].clone()
        optimizer.step()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_every_matrix_takes_the_step_of_the_plain_formula(scale):
    cases = example()
    parameters = {name: nn.Parameter(weights.clone()) for name, (weights, _) in cases.items()}
    train(muon_of(parameters, scale=scale), parameters, {name: each[1] for name, each in cases.items()})
    for name, (weights, gradients) in cases.items():
        parts = SHAPES[name][0]
        pieces = zip(weights.chunk(parts), *(each.chunk(parts) for each in gradients), strict=True)
        expected = torch.cat([plain_muon(first, rest, scale=scale) for first, *rest in pieces])
        torch.testing.assert_close(parameters[name].data, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("name", ["wide", "tall", "square"])
def test_a_matrix_takes_the_step_of_torch_muon_up_to_its_bf16(name, scale):
    weights, gradients = example()[name]
    ours, theirs = nn.Parameter(weights.float()), nn.Parameter(weights.float())
    settings = {"lr": RATE, "momentum": 0.95, "weight_decay": DECAY, "adjust_lr_fn": scale}
    oracle = torch.optim.Muon([theirs], **settings)
    train(oracle, {name: theirs}, {name: [each.float() for each in gradients]})
    train(muon_of({name: ours}, scale=scale), {name: ours}, {name: [each.float() for each in gradients]})
    taken = (theirs.data - weights).norm()
    assert (ours.data - theirs.data).norm() <= 0.02 * taken


def test_singular_values_come_near_1_and_a_matrix_of_zeros_stays():
    matrices_MRC = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    matrices_MRC[2] = 0
    found = torch.linalg.svdvals(orthogonalised(matrices_MRC))
    assert found[:2].min() >= 0.6 and found[:2].max() <= 1.3
    assert found[2].max() == 0


def test_what_is_no_hidden_matrix_takes_the_steps_of_adamw():
    stream = torch.Generator().manual_seed(0)
    gradients = {name: list(torch.randn(3, *shape, generator=stream)) for name, (_, shape) in SHAPES.items()}
    gradients["vector"] = list(torch.randn(3, 5, generator=stream))
    parameters = {name: nn.Parameter(torch.ones_like(each[0])) for name, each in gradients.items()}
    adam = nn.Parameter(torch.ones(5))
    oracle = torch.optim.AdamW([adam], lr=RATE, eps=1e-6, weight_decay=DECAY)
    train(oracle, {"vector": adam}, gradients)
    train(muon_of(parameters), parameters, gradients)
    torch.testing.assert_close(parameters["vector"].data, adam.data)


def test_the_scale_of_gradients_is_divided_out():
    cases = example()
    small, large = ({name: nn.Parameter(each[0].float()) for name, each in cases.items()} for _ in range(2))
    gradients = {name: [gradient.float() for gradient in each[1]] for name, each in cases.items()}
    train(muon_of(small), small, gradients)
    optimizer = muon_of(large)
    optimizer.grad_scale = torch.tensor(8.0)  # a power of two: not a bit may differ
    train(optimizer, large, {name: [8 * gradient for gradient in each] for name, each in gradients.items()})
    assert all(torch.equal(small[name], large[name]) for name in cases)


def test_an_update_that_is_left_out_changes_no_bit():
    cases = example()
    parameters = {name: nn.Parameter(each[0].float()) for name, each in cases.items()}
    parameters["vector"] = nn.Parameter(torch.ones(5))
    optimizer = muon_of(parameters)
    gradients = {name: [gradient.float() for gradient in each[1]] for name, each in cases.items()}
    gradients["vector"] = [torch.ones(5)] * 3
    train(optimizer, parameters, gradients)
    held = [*parameters.values(), *(each for state in optimizer.state.values() for each in state.values())]
    before = [each.detach().clone() for each in held]
    optimizer.found_inf = torch.tensor(1.0)
    train(optimizer, parameters, {name: [each[0] * torch.nan] * 3 for name, each in gradients.items()})
    assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))
    optimizer.found_inf = torch.tensor(0.0)
    train(optimizer, parameters, gradients)
    assert not torch.equal(before[0], held[0])
    assert all(each.isfinite().all() for each in held)


@pytest.mark.parametrize(
    ("model_type", "stacked"),
    [
        ("bert", {"project": 3, "output": 1, "expand": 1, "contract": 1}),
        ("modernbert", {"project": 3, "output": 1, "expand": 2, "contract": 1}),
    ],
)
def test_muon_takes_the_matrices_of_the_layers_and_nothing_else(model_type, stacked):
    network = tiny_network(model_type, {"mlm": 0})
    optimizer = build_optimizer(network, OptimSection(algorithm="muon", matrix_lr_factor=4.0))
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = {names[id(each)]: group for group in optimizer.param_groups for each in group["params"]}
    assert found.keys() == set(names.values())
    for name, group in found.items():
        hidden = name.startswith("encoder.blocks.") and network.get_parameter(name).dim() == 2
        assert group["parts"] == (stacked[name.split(".")[-2]] if hidden else 0), name
        assert group["lr_factor"] == (4.0 if hidden else 1.0), name


def test_muon_without_a_hidden_matrix_is_rejected():
    with pytest.raises(UserError, match="none of them is trained"):
        build_optimizer(nn.Linear(2, 2), OptimSection(algorithm="muon"))


def train_sharded(rank, rendezvous, results):
    """One of two processes that share every parameter's rows; saves the whole parameters."""
    torch.set_num_threads(1)  # a forked process must not touch its parent's threads, as in a DataLoader
    init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2,))
    parameters, gradients = {}, {}
    for name, (weights, listed) in example().items():
        parameters[name] = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))
        gradients[name] = [distribute_tensor(each, mesh, [Shard(0)]) for each in listed]
    train(muon_of(parameters), parameters, gradients)
    torch.save({name: each.detach().full_tensor() for name, each in parameters.items()}, f"{results}{rank}")
    destroy_process_group()


def test_muon_on_two_processes_that_share_the_rows_is_muon_on_one(tmp_path):
    cases = example()
    alone = {name: nn.Parameter(weights.clone()) for name, (weights, _) in cases.items()}
    train(muon_of(alone), alone, {name: gradients for name, (_, gradients) in cases.items()})
    places = (tmp_path / "meeting", tmp_path / "result")
    torch.multiprocessing.start_processes(train_sharded, places, nprocs=2, start_method="fork")
    for rank in range(2):
        shared = torch.load(tmp_path / f"result{rank}", weights_only=True)
        for name, parameter in alone.items():
            torch.testing.assert_close(shared[name], parameter.data, rtol=1e-12, atol=1e-12)
