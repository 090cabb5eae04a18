"""The resumable state of a run: saved whole or not at all, found again after a crash, loaded in any world.

A state is a folder `step-00001000` with safetensors shares of weights and optimizer moments, `state.json`
with everything else, and `checksums.json`. The optimizer's settings are not in it: they follow from the
recipe and the step. In a run on several machines, all of them must see the folder.
"""

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import read_json
from bertsmith.training.checkpoint_files import (
    STATE,
    hidden,
    newest_sound_step,
    saved_steps,
    seal,
    step_folder,
    tidy,
)
from bertsmith.training.checkpoint_tensors import (
    blank_moments,
    bytes_of,
    give_moments,
    model_tensors,
    moments_of,
)
from bertsmith.training.checkpoint_writer import StateWriter
from bertsmith.training.parallel import ALONE, World

FORMAT = 1
ROOM_FOR_NAMES = 1_000
"""Bytes a tensor that its name, place and size take at most beside its contents."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """How far a run is, beside its tensors."""

    step: int
    tokens: int
    """Tokens shown so far, over all processes."""
    seconds: float
    """Time spent so far, without the waiting between two starts."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Whatever else the run must remember, as JSON."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A complete state on disk."""

    folder: Path
    state: TrainingState
    world_size: int
    """How many processes wrote it; any other number can read it."""


def save_state(
    folder: Path, state: TrainingState, *, module: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Save a state under `folder`; all processes call it, and when it returns the state is on the disk.

    A failure leaves the folder as it was and is the same error in every process.
    """
    target = step_folder(folder, state.step)
    tensors = {**model_tensors(module), **moments_of(module, optimizer)}
    needed = bytes_of(tensors) + ROOM_FOR_NAMES * len(tensors)
    _refuse_a_full_disk(target, needed, world)
    partial_folder = hidden(target, "partial")
    contents = {"format": FORMAT, "world_size": world.size, **asdict(state)}
    writer = StateWriter(partial_folder, partial(seal, partial_folder, contents))
    try:
        with _torch_warnings_off():
            save(tensors, storage_writer=writer, no_dist=world.size == 1)
    except CheckpointException as error:
        raise _failure(error, target, needed) from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def latest_state(folder: Path, world: World = ALONE) -> SavedState | None:
    """The newest whole state, or nothing; called when a run starts, it also removes what a killed one left.

    The main process checks the files and decides; damaged states are reported and put aside.
    """
    newest = world.lead(partial(_tidied_and_checked, folder))
    step = int(world.broadcast(float(-1 if newest is None else newest)))
    return None if step < 0 else _read_state(step_folder(folder, step))


def load_state(
    saved: SavedState, module: nn.Module, *, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Put a saved state's tensors into a module and its optimizer; all processes call it."""
    layouts = _layouts(saved.folder)
    weights = model_tensors(module)
    _refuse_another_model(saved.folder, weights, layouts)
    moments = blank_moments(module, optimizer, layouts)
    reader = HuggingFaceStorageReader(str(saved.folder))
    with _torch_warnings_off():
        load({**weights, **moments}, storage_reader=reader, no_dist=world.size == 1)
    give_moments(module, optimizer, moments)


def prune(folder: Path, *, keep_last: int, keep_at: Collection[int] = ()) -> None:
    """Remove saved states except the newest `keep_last` and those of the steps `keep_at`; for one process."""
    for step in saved_steps(folder)[:-keep_last]:
        if step not in keep_at:
            target = step_folder(folder, step)
            shutil.rmtree(target.rename(hidden(target, "removed")))  # a kill must not leave half a state


def _tidied_and_checked(folder: Path) -> int | None:
    """The newest step whose state is whole, in a folder that is freed of remains."""
    if not folder.is_dir():
        return None
    tidy(folder)
    return newest_sound_step(folder)


def _refuse_a_full_disk(target: Path, needed: int, world: World) -> None:
    """Stop all processes if there is no room; remains of an earlier attempt at this step do not count."""
    free = 0
    if world.main:
        shutil.rmtree(hidden(target, "partial"), ignore_errors=True)
        free = shutil.disk_usage(next(place for place in target.parents if place.exists())).free
    free = int(world.broadcast(float(free)))
    if free < needed:
        raise _not_written(target, f"needs {needed:,} bytes, and the disk has {free:,} left")


def _failure(error: CheckpointException, target: Path, needed: int) -> BaseException:
    """What went wrong in some process, as an error for people where the disk is to blame."""
    cause = next(failure for failure, _ in error.failures.values())
    if not isinstance(cause, OSError):
        return cause
    return _not_written(target, f"cannot be written ({cause.strerror or cause}); it needs {needed:,} bytes")


def _not_written(target: Path, what: str) -> UserError:
    left = saved_steps(target.parent)
    kept = f"the state of step {left[-1]} stays" if left else "no earlier state is there"
    return UserError(
        what, where=str(target), remedy=f"make room, or choose another place, and start again; {kept}"
    )


def _read_state(target: Path) -> SavedState:
    contents = read_json(target / STATE, remedy="remove the folder and start again")
    if contents["format"] != FORMAT:
        what = f"is of format {contents['format']}, and this bertsmith reads {FORMAT}"
        raise UserError(what, where=str(target / STATE), remedy="continue with the version that wrote it")
    state = TrainingState(*(contents[key] for key in ("step", "tokens", "seconds", "scalars")))
    return SavedState(target, state, contents["world_size"])


def _layouts(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Size and type of every tensor in a state's folder."""
    held = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: layout for name, layout in held.items() if isinstance(layout, TensorStorageMetadata)}


def _refuse_another_model(
    folder: Path, weights: Mapping[str, Tensor], layouts: Mapping[str, TensorStorageMetadata]
) -> None:
    saved = {name: tuple(layout.size) for name, layout in layouts.items() if name.startswith("model.")}
    ours = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    different = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if different:
        there, here = (held.get(different[0], "missing") for held in (saved, ours))
        what = f"holds another model: {different[0]} is {there} in it and {here} in this run"
        raise UserError(what, where=str(folder), remedy="continue with the recipe that wrote it")


@contextmanager
def _torch_warnings_off() -> Iterator[None]:
    """Without torch's remark that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
