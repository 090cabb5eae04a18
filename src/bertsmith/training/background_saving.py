"""Saving beside the steps that follow: a state is copied on the GPU, and a thread writes the copy.

To write the state of a BERT-Base takes two seconds, in which thirty steps could be taken; to copy it takes
milliseconds, and as much memory of the GPU as weights and moments do. Where that is not left, on a CPU and
where several processes write one state, it is written before the next step as ever.
"""

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bertsmith.training.checkpoint import (
    TrainingState,
    bytes_of,
    prune,
    save_checkpoint,
    save_state,
    state_tensors,
    with_counters,
)
from bertsmith.training.distributed import World
from bertsmith.training.trainer import Trainer

log = logging.getLogger("bertsmith")
ROOM = 2
"""Copies are made where this many of them would fit: steps may still come that need more memory."""


@dataclass
class BackgroundSaving:
    """Saves a trainer's states one after the other; at the end of a `with` block all of them are there."""

    folder: Path
    trainer: Trainer
    keep_last: int
    keep_at: Collection[int] = ()
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saving"), init=False)
    _pending: Future[None] | None = field(default=None, init=False)
    _have_fitted: bool = field(default=False, init=False)
    """Whether copies were made before: their memory is torch's now, and no longer counts as left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()
        # An error on its way is not to be hidden behind another.
        elif self._pending is not None and (error := self._pending.exception()) is not None:
            log.error("%s", error)

    def save(self, state: TrainingState) -> None:
        """Save the weights and moments of now with a state, and remove states that are not to be kept."""
        self.wait()
        copies = self._copies(state_tensors(self.trainer.objective, self.trainer.optimizer))
        if copies is None:
            keep_last, keep_at = self.keep_last, self.keep_at
            save_checkpoint(self.folder, state, self.trainer, keep_last=keep_last, keep_at=keep_at)
            return
        state = with_counters(state, self.trainer)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._pending = self._thread.submit(self._write, state, copies)

    def wait(self) -> None:
        """Return when the last state is on the disk; raise what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise what went wrong with the last state, if that is known by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Copies of the tensors, or nothing where there is no memory for them."""
        if not (self._have_fitted or room_for_copies(tensors, self.trainer.world)):
            return None
        try:
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        except torch.OutOfMemoryError:
            self._have_fitted = False
            return None
        self._have_fitted = True
        return copies

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        """Where copies are read; on the stream of the steps, reading would wait for steps."""
        device = self.trainer.world.device
        if device.type != "cuda":
            return None
        # Streams of one priority come round again: one of the usual might be that which records steps.
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def _write(self, state: TrainingState, copies: dict[str, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            save_state(self.folder, state, copies, self.trainer.world)
        prune(self.folder, keep_last=self.keep_last, keep_at=self.keep_at)


def room_for_copies(tensors: dict[str, Tensor], world: World) -> bool:
    """Whether copies of all tensors fit into the memory that the GPU has left."""
    if world.device.type != "cuda" or world.size > 1:
        return False
    free, _ = torch.cuda.mem_get_info(world.device)
    return free > ROOM * bytes_of(tensors)
