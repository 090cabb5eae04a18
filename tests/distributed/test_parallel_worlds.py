"""Several processes on a CPU learn what one would: gradients of a sum over all of them."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

import bertsmith
from bertsmith.packed import pack
from bertsmith.training.callbacks import StopRequested
from bertsmith.training.distributed import (
    ALONE,
    World,
    accumulating,
    gradient_norm,
    share_work,
    start_world,
    stop_world,
)
from bertsmith.training.trainer import GradientGuard, Trainer
from tests.tiny_training import SEQUENCES, TinyObjective, contrasted, learn, whole
from tests.worlds import as_torchrun, meeting, run_processes, run_world


def agreements(world: World) -> tuple[object, ...]:
    world.barrier()
    sums = world.sum([world.rank, 0.1, 2.0**53])
    return sums, world.any(world.rank == 1), world.any(False), world.broadcast(world.rank + 0.3), world.main


def test_processes_agree_on_sums_flags_and_the_main_ones_value():
    expected = ([1.0, 0.2, 2.0**54], True, False, 0.3)
    assert run_world(2, agreements) == [(*expected, True), (*expected, False)]


def started(rank: int, port: int) -> tuple[object, ...]:
    as_torchrun(rank, port)
    world = start_world("cpu")
    answer = world.rank, world.size, world.local_rank, world.device.type, world.sum([1.0])
    stop_world()
    return answer, distributed.is_initialized()


def test_the_processes_that_torchrun_started_find_each_other():
    expected = [((rank, 2, rank, "cpu", [2.0]), False) for rank in range(2)]
    assert run_processes(2, started, meeting()) == expected


def outlasts_torch(rank: int, port: int) -> str | None:
    as_torchrun(rank, port)
    world = start_world("cpu")
    distributed_c10d._set_pg_timeout(timedelta(seconds=0.1))  # half an hour, unless it is told otherwise
    answer = world.on_main(lambda: time.sleep(0.5) or "evaluated")
    stop_world()
    return answer


def test_the_others_wait_for_a_main_process_that_works_alone_for_longer_than_torch_would():
    assert run_processes(2, outlasts_torch, meeting()) == ["evaluated", None]


def gradients(world: World, how: str, model_type: str) -> tuple[dict[str, list[float]], float]:
    """Every gradient, whole, and their norm, in double precision."""
    objective = share_work(TinyObjective(model_type).double(), world, how)
    learn(objective, world)
    norm = gradient_norm(objective.parameters())
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


OF_RANKS = [[SEQUENCES[:2], SEQUENCES[2:3]], [SEQUENCES[3:], []]]
"""Micro-batches of a step by rank: the second has fewer rows, and none in its last one."""


def contrasted_by_rank(world: World, how: str) -> tuple[dict[str, list[float]], float]:
    found, own = contrasted(world, how, OF_RANKS[world.rank])
    return {name: gradient.flatten().tolist() for name, gradient in found.items()}, own


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_have_the_gradients_of_one_for_a_loss_over_the_step(how):
    alone, whole_sum = contrasted(ALONE, how, [SEQUENCES])
    answers = run_world(2, contrasted_by_rank, how)
    assert sum(own for _, own in answers) == pytest.approx(whole_sum, rel=1e-9)
    for found, _ in answers:
        assert found.keys() == alone.keys()
        for name, gradient in alone.items():
            assert found[name] == pytest.approx(gradient.flatten().tolist(), rel=1e-9, abs=1e-12), name


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


def where_bertsmith_lies(_: int) -> str:
    return bertsmith.__file__


def test_these_processes_run_the_code_under_test():
    assert run_processes(1, where_bertsmith_lies) == [bertsmith.__file__]


def led(world: World) -> tuple[object, ...]:
    """What the processes get of an action that works, and how they end where one fails."""
    answer = world.on_main(lambda: f"of rank {world.rank}")
    try:
        world.on_main(lambda: Path("/dev/null/folder").mkdir())
    except NotADirectoryError as error:
        return answer, type(error)
    except SystemExit as ending:
        return answer, ending.code
    return answer, "nothing happened"


def test_where_the_main_process_fails_the_others_end_without_a_word():
    assert run_world(2, led) == [("of rank 0", NotADirectoryError), (None, 2)]


def is_unwatched(world: World, how: str) -> bool:
    objective = share_work(TinyObjective(), world, how)
    optimizer = torch.optim.AdamW(objective.parameters(), fused=True)
    on_gpu = replace(world, device=torch.device("cuda"))
    return Trainer(objective, optimizer, on_gpu, "bf16", 1.0, GradientGuard("off")).runs_ahead


def test_shards_of_weights_are_watched_and_copies_are_not():
    assert run_world(2, is_unwatched, "ddp") == [True, True]
    assert run_world(2, is_unwatched, "fsdp") == [False, False]
