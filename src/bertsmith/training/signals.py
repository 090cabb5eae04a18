"""Ctrl-C and SIGTERM as a wish to stop, granted at the end of a step."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.training.parallel import World

WISHES = (signal.SIGINT, signal.SIGTERM)


class StopRequested(AbstractContextManager["StopRequested"]):
    """While it is open, Ctrl-C or SIGTERM only raises a flag; a second Ctrl-C interrupts at once.

    A second SIGTERM does not: launchers repeat it. Open it before processes are forked that build batches: a
    Ctrl-C reaches them too, and they must live until the step is done.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.here = False
        """Whether this process was asked to stop."""
        self._tell = tell  # it is called amid anything else, so it must wait for nothing
        self._owner = os.getpid()
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequested":
        self._before = {wish: signal.signal(wish, self._heard) for wish in WISHES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for wish, handler in self._before.items():
            signal.signal(wish, handler)

    def anywhere(self, world: "World") -> bool:
        """Whether some process was asked to stop; all ask at the same step ends, and all stop together."""
        return world.any(self.here)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            _heard_in_a_child(number)
            return
        if self._interrupted and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if number == signal.SIGINT:
            self._interrupted = True
            self._tell("stopping after this step; Ctrl-C again to stop now")
        elif not self.here:
            self._tell("stopping after this step")
        self.here = True


def _heard_in_a_child(number: int) -> None:
    """What a forked process does: its parent decides about a Ctrl-C, and SIGTERM is its parent's decision."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
