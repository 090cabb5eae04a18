"""Checkpoints: the resumable state of a run, saved atomically and loadable by any number of processes.

A state is a folder `step-00001000` with safetensors shards of weights and optimizer moments, `state.json`
with everything else, and `checksums.json`. It does not contain the optimizer's settings, which follow from
the recipe and the step. In a run on several machines, all of them must see the folder.
"""

import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.training import checkpoint_storage as storage
from bertsmith.training.distributed import ALONE, World, unwrapped
from bertsmith.training.trainer import Progress, Trainer
from bertsmith.training.weight_average import AVERAGE

FORMAT = 2
LOSS_SCALER, AVERAGED = "loss_scaler", "averaged"
ROOM_FOR_NAMES = 1_000
"""Maximum bytes per tensor for its name, place and size, in addition to its contents."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A run's state without its tensors: progress, and what else its job saves."""

    step: int
    tokens: int
    """Tokens shown so far, over all processes."""
    seconds: float
    """Time spent so far, without the time between two starts."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Other values that the run must save, as JSON."""

    @classmethod
    def at(cls, progress: Progress, scalars: Mapping[str, Any] = {}) -> "TrainingState":
        """Return the state of a run with this progress, and other values that its job must save."""
        scalars = {"position": asdict(progress), **scalars}
        return cls(progress.step, progress.tokens, progress.seconds, scalars)

    @property
    def progress(self) -> Progress:
        """Return the progress of the run."""
        return Progress(**self.scalars["position"])


@dataclass(frozen=True, slots=True)
class SavedState:
    """A complete state on disk."""

    folder: Path
    state: TrainingState
    world_size: int
    """Number of processes that wrote it; any other number can read it."""

    @property
    def averaged(self) -> int:
        """Return the number of steps in its weight average; 0 without an average."""
        return int(self.state.scalars.get(AVERAGED, 0))


def save_state(folder: Path, state: TrainingState, tensors: dict[str, Tensor], world: World) -> None:
    """Save a state under `folder`; every process must call it. On return the state is on the disk.

    A failure leaves the folder unchanged and raises the same error in every process.
    """
    target = storage.step_folder(folder, state.step)
    needed = bytes_of(tensors) + ROOM_FOR_NAMES * len(tensors)
    _check_disk_space(target, needed, world)
    partial_folder = storage.hidden(target, "partial")
    contents = {"format": FORMAT, "world_size": world.size, **asdict(state)}
    writer = storage.StateWriter(partial_folder, partial(storage.seal, partial_folder, contents))
    try:
        _silence_torch()
        save(tensors, storage_writer=writer, no_dist=world.size == 1)
    except CheckpointException as error:
        # The error of one process, reported as a user error if disk or memory caused it.
        cause = next(failure for failure, _ in error.failures.values())
        if not isinstance(cause, OSError | MemoryError):
            raise cause from error
        reason = "memory ran out" if isinstance(cause, MemoryError) else cause.strerror or cause
        what = f"cannot be written ({reason}); it needs {needed:,} bytes"
        raise _not_written(target, what) from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def save_checkpoint(
    folder: Path, state: TrainingState, trainer: Trainer, *, keep_last: int, keep_at: Collection[int] = ()
) -> None:
    """Save a trainer's weights and moments with a state, and remove states that are not to be kept."""
    tensors = state_tensors(trainer.objective, trainer.optimizer)
    save_state(folder, with_counters(state, trainer), tensors, trainer.world)
    trainer.world.on_main(lambda: prune(folder, keep_last=keep_last, keep_at=keep_at))


def with_counters(state: TrainingState, trainer: Trainer) -> TrainingState:
    """Return a state with the loss scale and the weight-average count of its trainer."""
    if trainer.scaler is not None:
        state = replace(state, scalars={**state.scalars, LOSS_SCALER: trainer.scaler.state_dict()})
    if trainer.average is not None:
        state = replace(state, scalars={**state.scalars, AVERAGED: trainer.average.count})
    return state


def load_checkpoint(saved: SavedState, trainer: Trainer) -> None:
    """Load a saved state's weights and moments into a trainer; every process must call it."""
    load_state(saved, trainer.objective, optimizer=trainer.optimizer, world=trainer.world)
    if trainer.graphs is not None:
        trainer.graphs.forget()
    if trainer.scaler is not None and LOSS_SCALER in saved.state.scalars:
        trainer.scaler.load_state_dict(saved.state.scalars[LOSS_SCALER])
    if trainer.average is not None:
        trainer.average.count = saved.averaged


def latest_state(folder: Path, world: World = ALONE) -> SavedState | None:
    """Return the newest undamaged state or None, and remove the remains of killed runs.

    The main process checks the files and decides; damaged states are reported and renamed.
    """

    def tidy_and_check() -> int | None:
        if not folder.is_dir():
            return None
        storage.tidy(folder)
        return storage.newest_sound_step(folder)

    # One process decides for all: a folder on a network may look different from another machine for a moment.
    newest = world.on_main(tidy_and_check)
    step = int(world.broadcast(float(-1 if newest is None else newest)))
    return None if step < 0 else _read_state(storage.step_folder(folder, step))


def load_state(
    saved: SavedState, module: nn.Module, *, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Load a saved state's tensors into a module and its optimizer; every process must call it."""
    held = HuggingFaceStorageReader(str(saved.folder)).read_metadata().state_dict_metadata
    layouts = {name: layout for name, layout in held.items() if isinstance(layout, TensorStorageMetadata)}
    weights = model_tensors(module)
    _check_same_model(saved.folder, weights, layouts)
    # An optimizer's moments are created at its first step: here they get the sizes of the saved ones.
    moments = blank_moments(module, optimizer, layouts)
    reader = HuggingFaceStorageReader(str(saved.folder))
    # Read into the existing tensors: each process reads its own parts, however many processes wrote them, and
    # never copies the whole.
    _silence_torch()
    load({**weights, **moments}, storage_reader=reader, no_dist=world.size == 1)
    give_moments(module, optimizer, moments)


def load_weights(saved: SavedState, module: nn.Module, *, prefix: str) -> None:
    """Load the saved weights with names that begin with `prefix` into a module that is not trained.

    If the state contains averaged weights, load these, as the run's finished model would have them.
    """
    held = HuggingFaceStorageReader(str(saved.folder)).read_metadata().state_dict_metadata
    start = f"model.{prefix}"
    layouts = {
        name: layout
        for name, layout in held.items()
        if isinstance(layout, TensorStorageMetadata) and name.startswith(start)
    }
    weights = {f"{start}{name}": tensor for name, tensor in module.state_dict().items()}
    _check_same_model(saved.folder, weights, layouts)
    averages = {f"optimizer.{prefix}{name}.{AVERAGE}": tensor for name, tensor in module.state_dict().items()}
    averages = {name: tensor for name, tensor in averages.items() if saved.averaged and name in held}
    _silence_torch()
    # Weights first, then averages: both are read into the tensors of the module.
    for tensors in (weights, averages) if averages else (weights,):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(saved.folder)), no_dist=True)


def kept_states(folder: Path) -> list[SavedState]:
    """Return the states in a folder, oldest first, without checking their tensors."""
    return [_read_state(storage.step_folder(folder, step)) for step in storage.saved_steps(folder)]


def prune(folder: Path, *, keep_last: int, keep_at: Collection[int] = ()) -> None:
    """Remove saved states except the newest `keep_last` and the steps `keep_at`; call it in one process."""
    for step in storage.saved_steps(folder)[:-keep_last]:
        if step not in keep_at:
            target = storage.step_folder(folder, step)
            removed = target.rename(storage.hidden(target, "removed"))  # a kill must not leave half a state
            shutil.rmtree(removed)


def _check_disk_space(target: Path, needed: int, world: World) -> None:
    """Raise in all processes if the disk is too full, after removing an earlier attempt at this step."""
    free = 0
    if world.main:
        shutil.rmtree(storage.hidden(target, "partial"), ignore_errors=True)
        free = shutil.disk_usage(next(place for place in target.parents if place.exists())).free
    free = int(world.broadcast(float(free)))
    if free < needed:
        raise _not_written(target, f"needs {needed:,} bytes, but the disk has {free:,} left")


def _not_written(target: Path, what: str) -> UserError:
    left = storage.saved_steps(target.parent)
    kept = f"the state of step {left[-1]} stays" if left else "there is no earlier state"
    return UserError(
        what, where=str(target), remedy=f"make room, or choose another place, and start again; {kept}"
    )


def _read_state(target: Path) -> SavedState:
    contents = read_json(target / storage.STATE, remedy="remove the folder and start again")
    if contents["format"] != FORMAT:
        what = f"has format {contents['format']}, but this bertsmith reads {FORMAT}"
        remedy = "continue with the version that wrote it"
        raise UserError(what, where=str(target / storage.STATE), remedy=remedy)
    state = TrainingState(*(contents[key] for key in ("step", "tokens", "seconds", "scalars")))
    return SavedState(target, state, contents["world_size"])


def _check_same_model(
    folder: Path, weights: Mapping[str, Tensor], layouts: Mapping[str, TensorStorageMetadata]
) -> None:
    saved = {name: tuple(layout.size) for name, layout in layouts.items() if name.startswith("model.")}
    ours = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    different = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if different:
        there, here = (held.get(different[0], "missing") for held in (saved, ours))
        what = f"contains another model: {different[0]} is {there} in it and {here} in this run"
        raise UserError(what, where=str(folder), remedy="continue with the recipe that wrote it")


def _silence_torch() -> None:
    """Suppress torch's warning about the missing process group of a single process."""
    # Permanently: filters are global, and a thread must not restore what others have changed since.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def state_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the current weights and moments by their saved names, sharing their memory."""
    return {**model_tensors(module), **moments_of(module, optimizer)}


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a module by their saved names, sharing its memory."""
    return {f"model.{name}": tensor for name, tensor in unwrapped(module).state_dict().items()}


def moments_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter by its saved names, sharing its memory."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _parameters(module).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def blank_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Return tensors to load all saved moments into: the optimizer's own if it has them, else new ones."""
    own, parameters = moments_of(module, optimizer), _parameters(module)
    return {
        name: own[name] if name in own else _new_place(parameters[_split_name(name)[0]], layout)
        for name, layout in saved.items()
        if name.startswith("optimizer.")
    }


def give_moments(module: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Set the optimizer's moments; it moves a step counter to the device that it requires."""
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    number_of = {parameter: number for number, parameter in enumerate(trained)}
    parameters = _parameters(module)
    # torch's optimizers number their parameters, in an order that files should not depend on: on the disk
    # they have the names of the model.
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in moments.items():
        parameter, key = _split_name(name)
        state.setdefault(number_of[parameters[parameter]], {})[key] = tensor
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    # torch has replaced these tensors by copies, but a recorded step reads its rates at the old addresses.
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the tensors, including the shards of all processes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    inner = unwrapped(module)
    inner.state_dict()  # After a forward without backward, FSDP shows whole parameters; this folds them up.
    return dict(inner.named_parameters())


def _split_name(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
    return parameter, key


def _new_place(parameter: nn.Parameter, layout: TensorStorageMetadata) -> Tensor:
    """Return an empty moment, sharded like its parameter; a counter is the same in each process."""
    if layout.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=layout.properties.dtype, requires_grad=False)
    return torch.zeros(layout.size, dtype=layout.properties.dtype)
