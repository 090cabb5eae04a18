"""Background saving: a state is copied on the GPU, and a thread writes the copy during the next steps.

Writing the state of a BERT-Base takes two seconds, the time of thirty steps. Copying it takes milliseconds,
and as much GPU memory as weights and moments. Without that memory, on a CPU or with several processes, the
state is written before the next step.
"""

import logging
from collections.abc import Callable, Collection, Sequence
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
"""Copies are made only if this many of them would fit: later steps may need more memory."""


@dataclass
class BackgroundSaving:
    """Saves a trainer's states one after the other; at the end of a `with` block all are on the disk."""

    folder: Path
    trainer: Trainer
    keep_last: int
    keep_at: Collection[int] = ()
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saving"), init=False)
    _pending: Future[None] | None = field(default=None, init=False)
    _have_fitted: bool = field(default=False, init=False)
    """True if copies were made before: torch keeps their memory, which no longer counts as free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()
        # An error that is already being raised must not be hidden by another.
        elif self._pending is not None and (error := self._pending.exception()) is not None:
            log.error("%s", error)

    def save(self, state: TrainingState, then: Sequence[Callable[[], None]] = ()) -> None:
        """Save the current weights and moments with a state, and remove superseded states.

        The functions `then` are called when the state is on the disk.
        """
        self.wait()
        copies = self._copies(state_tensors(self.trainer.objective, self.trainer.optimizer))
        if copies is None:
            keep_last, keep_at = self.keep_last, self.keep_at
            save_checkpoint(self.folder, state, self.trainer, keep_last=keep_last, keep_at=keep_at)
            for follow in then:
                follow()
            return
        state = with_counters(state, self.trainer)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._pending = self._thread.submit(self._write, state, copies, then)

    def wait(self) -> None:
        """Wait until the last state is on the disk; raise the error of its writing, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise the error of writing the last state if it has failed by now; do not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return copies of the tensors, or None if they do not fit into memory."""
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
        """Return a stream for reading copies: on the stream of the steps, reading would wait for steps."""
        device = self.trainer.world.device
        if device.type != "cuda":
            return None
        # torch hands out streams of one priority in turn: a default one might be the recording stream.
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def _write(
        self, state: TrainingState, copies: dict[str, Tensor], then: Sequence[Callable[[], None]]
    ) -> None:
        with torch.cuda.stream(self._stream):
            save_state(self.folder, state, copies, self.trainer.world)
        prune(self.folder, keep_last=self.keep_last, keep_at=self.keep_at)
        for follow in then:
            follow()


def room_for_copies(tensors: dict[str, Tensor], world: World) -> bool:
    """True if copies of all tensors fit into the free memory of the GPU; False with several processes."""
    if world.device.type != "cuda" or world.size > 1:
        return False
    free, _ = torch.cuda.mem_get_info(world.device)
    return free > ROOM * bytes_of(tensors)
