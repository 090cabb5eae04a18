"""Several processes on a CPU learn what one would: gradients of a sum over all of them."""

import os
import socket

import pytest
import torch
from torch import distributed

from bertsmith.packed import pack
from bertsmith.training.parallel import (
    ALONE,
    TORCHRUN,
    World,
    accumulating,
    clip_gradients,
    share_work,
    start_world,
    stop_world,
)
from bertsmith.training.signals import StopRequested
from tests.tiny_training import SEQUENCES, TinyObjective, learn, whole
from tests.worlds import run_processes, run_world


def agreements(world: World) -> tuple[object, ...]:
    world.barrier()
    sums = world.sum([world.rank, 0.1, 2.0**53])
    return sums, world.any(world.rank == 1), world.any(False), world.broadcast(world.rank + 0.3), world.main


def test_processes_agree_on_sums_flags_and_the_main_ones_value():
    expected = ([1.0, 0.2, 2.0**54], True, False, 0.3)
    assert run_world(2, agreements) == [(*expected, True), (*expected, False)]


def started(rank: int, port: int) -> tuple[object, ...]:
    place = zip(TORCHRUN, (str(rank), "2", str(rank)), strict=True)
    os.environ |= dict(place) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = start_world("cpu")
    answer = world.rank, world.size, world.local_rank, world.device.type, world.sum([1.0])
    stop_world(world)
    return answer, distributed.is_initialized()


def test_the_processes_that_torchrun_started_find_each_other():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    expected = [((rank, 2, rank, "cpu", [2.0]), False) for rank in range(2)]
    assert run_processes(2, started, port) == expected


def gradients(world: World, how: str, model_type: str) -> tuple[dict[str, list[float]], float]:
    """Every gradient, whole, and their norm, in double precision."""
    objective = share_work(TinyObjective(model_type).double(), world, how)
    learn(objective, world)
    norm = clip_gradients(objective.parameters(), 1e-3)
    named = {name.removeprefix("module."): each.grad for name, each in objective.named_parameters()}
    return {name: whole(gradient).flatten().tolist() for name, gradient in named.items()}, float(norm)


@pytest.mark.parametrize(("how", "model_type"), [("ddp", "bert"), ("fsdp", "bert"), ("fsdp", "albert")])
def test_two_processes_have_the_gradients_of_one(how, model_type):
    expected, expected_norm = gradients(ALONE, how, model_type)
    for found, norm in run_world(2, gradients, how, model_type):
        assert norm == pytest.approx(expected_norm, rel=1e-12)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.tensor(found[name]).allclose(torch.tensor(values), rtol=1e-6, atol=1e-12), name


def one_of_several(world: World, how: str) -> list[float]:
    """The gradients at hand after a micro-batch that is not the step's last."""
    objective = share_work(TinyObjective(), world, how)
    with accumulating(objective, last=False):
        objective(pack([SEQUENCES[world.rank]])).backward()
    return [float(each.grad.sum()) for each in objective.parameters() if each.grad is not None]


def test_nothing_is_exchanged_before_the_last_micro_batch():
    one, other = run_world(2, one_of_several, "ddp")
    assert one != other
    assert run_world(2, one_of_several, "fsdp") == [[], []]


def wish(world: World) -> tuple[bool, bool]:
    with StopRequested() as stop:
        before = stop.anywhere(world)
        stop.here = world.rank == 1
        return before, stop.anywhere(world)


def test_when_one_process_is_asked_to_stop_all_stop():
    assert run_world(2, wish) == [(False, True), (False, True)]
