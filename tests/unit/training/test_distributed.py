"""One process alone: no process group, and every agreement with itself."""

import pytest
import torch
from torch import distributed, nn

from bertsmith.core.errors import UserError
from bertsmith.training.distributed import (
    ALONE,
    TORCHRUN,
    accumulating,
    gradient_norm,
    share_work,
    start_world,
    stop_world,
)


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def with_gradients(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_a_process_alone_agrees_with_itself():
    assert ALONE.sum([1.5, 1e300]) == [1.5, 1e300]
    assert (ALONE.any(True), ALONE.any(False)) == (True, False)
    assert ALONE.broadcast(0.1) == 0.1
    ALONE.barrier()
    assert ALONE.main


def test_the_main_process_alone_acts_and_keeps_its_own_error():
    assert ALONE.on_main(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        ALONE.on_main(lambda: 1 // 0)


def test_without_torchrun_the_world_is_one_process_without_a_process_group():
    world = start_world("cpu")
    assert (world.rank, world.size, world.local_rank, world.device) == (0, 1, 0, torch.device("cpu"))
    assert not distributed.is_initialized()
    stop_world()


def test_torchrun_with_one_process_needs_no_process_group(monkeypatch):
    for name, value in zip(TORCHRUN, ("0", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert start_world("cpu").size == 1
    assert not distributed.is_initialized()


def test_half_of_torchruns_environment_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="WORLD_SIZE and LOCAL_RANK not in the environment.*torchrun"):
        start_world("cpu")


def test_a_gpu_that_is_not_there_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="run.device: torch sees no CUDA GPU; set it to auto or cpu"):
        start_world("cuda")
    assert start_world("auto").device.type == "cpu"


def test_more_processes_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in zip(TORCHRUN, ("1", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="than its 1 GPU; start torchrun with `nproc_per_node=1`"):
        start_world("auto")


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_process_alone_works_on_the_module_itself(how):
    module = nn.Linear(2, 2)
    assert share_work(module, ALONE, how) is module
    with accumulating(module, last=False):
        module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None


def test_the_norm_is_of_all_gradients_together():
    assert gradient_norm(with_gradients([3.0, 0.0], [4.0])).item() == pytest.approx(5.0)


def test_a_parameter_without_gradient_does_not_matter():
    parameters = [*with_gradients([3.0, 4.0]), nn.Parameter(torch.ones(3))]
    assert gradient_norm(parameters).item() == pytest.approx(5.0)
    assert gradient_norm(parameters[1:]).item() == 0.0


def test_the_norm_tells_of_gradients_that_are_no_numbers():
    assert gradient_norm(with_gradients([float("nan"), 1.0])).isnan()
    assert gradient_norm(with_gradients([float("inf"), 1.0])).isinf()
