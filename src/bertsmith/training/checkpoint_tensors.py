"""The tensors of a saved state and their names: `model.<name>` and `optimizer.<parameter>.<moment>`.

The names are the same whatever wraps the module, so a state moves between any numbers of processes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a module by their saved names, sharing its memory."""
    return {f"model.{name}": tensor for name, tensor in _unwrapped(module).state_dict().items()}


def moments_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter by its saved name, sharing its memory."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _parameters(module).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def blank_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Places for all saved moments: the optimizer's own where it has them, else new ones."""
    own, parameters = moments_of(module, optimizer), _parameters(module)
    return {
        name: own[name] if name in own else _new_place(parameters[_split_name(name)[0]], layout)
        for name, layout in saved.items()
        if name.startswith("optimizer.")
    }


def give_moments(module: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Make these the optimizer's moments; it moves a step counter to where it wants it."""
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    number_of = {parameter: number for number, parameter in enumerate(trained)}
    parameters = _parameters(module)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in moments.items():
        parameter, key = _split_name(name)
        state.setdefault(number_of[parameters[parameter]], {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """How much room tensors take, all processes' shares together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    inner = _unwrapped(module)
    inner.state_dict()  # After a forward without backward, FSDP shows whole parameters; this folds them up.
    return dict(inner.named_parameters())


def _split_name(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
    return parameter, key


def _new_place(parameter: nn.Parameter, layout: TensorStorageMetadata) -> Tensor:
    """An empty moment, shared out over the processes as its parameter is; a counter is everywhere."""
    if layout.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=layout.properties.dtype, requires_grad=False)
    return torch.zeros(layout.size, dtype=layout.properties.dtype)
