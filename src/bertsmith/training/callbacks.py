"""How a run reports its progress, and how it is asked to stop."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from mmap import mmap
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol


class ProgressCallback(Protocol):
    """Receives the messages and metrics of a run."""

    def on_message(self, text: str) -> None:
        """A message worth a line, warnings included."""

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """A line of metrics; progress is the fraction of the run that is done."""

    def on_progress(self, progress: float) -> None:
        """A step is done; progress is the fraction of the run that is."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """The run goes by the clock: so many of its seconds remain, of so many in all."""

    def on_signal(self, text: str) -> None:
        """A message from a signal handler, amid anything else: it must not wait for any lock."""


class SilentCallback:
    """Says nothing: of several processes, the main one speaks."""

    def on_message(self, text: str) -> None:
        """A message."""

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """A line of metrics."""

    def on_progress(self, progress: float) -> None:
        """A step is done."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """The run goes by the clock."""

    def on_signal(self, text: str) -> None:
        """A message from a signal handler."""


if TYPE_CHECKING:
    from bertsmith.training.distributed import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OPEN, ASKED, CLOSED = range(3)
PARENT_SECONDS = 60.0
"""How long a forked process that gets a SIGTERM waits to see whether its parent got one, too; amid a long
product, the parent does not see it yet."""


class StopRequested(AbstractContextManager["StopRequested"]):
    """While it is open, Ctrl-C or SIGTERM only raises a flag; a second Ctrl-C interrupts at once.

    A second SIGTERM does not: launchers repeat it. Open it before processes are forked that build batches: a
    Ctrl-C reaches them too, as may a scheduler's SIGTERM, and they must live until the step is done. One that
    is opened inside another, as by a run of a study, hands its flag on when it closes: a wish in the last
    step of a run is of the study.
    """

    def __init__(self, on_signal: Callable[[str], None] = lambda _: None) -> None:
        self.here = False
        """Whether this process was asked to stop."""
        self._on_signal = on_signal
        self._owner = os.getpid()
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}
        self._outer: StopRequested | None = None
        self._shared = mmap(-1, 1)
        """What forked processes see of this one: OPEN, ASKED or CLOSED."""

    def __enter__(self) -> "StopRequested":
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._outer = _handled_by(self._before[signal.SIGINT])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._shared[0] = CLOSED
        # Only ever set, never written back: a signal may reach the outer one amid these lines.
        if self._outer is not None and self.here:
            self._outer.here = True
            self._outer._shared[0] = ASKED
            if self._interrupted:
                self._outer._interrupted = True

    def anywhere(self, world: "World") -> bool:
        """Whether some process was asked to stop; all call it after the same steps, and all stop together."""
        return world.any(self.here)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            self._handle_in_a_child(number)
            return
        if self._interrupted and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if number == signal.SIGINT:
            self._interrupted = True
            self._on_signal("stopping after this step; Ctrl-C again to stop now")
        elif not self.here:
            self._on_signal("stopping after this step")
        self.here = True
        self._shared[0] = ASKED

    def _handle_in_a_child(self, number: int) -> None:
        """What a forked process does: its parent decides about both, and may end it with SIGTERM itself."""
        if number != signal.SIGTERM:
            return
        # One that all processes got is the parent's to handle, but this process may be told first.
        patience = time.monotonic() + PARENT_SECONDS
        while self._shared[0] == OPEN and os.getppid() == self._owner and time.monotonic() < patience:
            time.sleep(0.01)
        if self._shared[0] == CLOSED:
            os._exit(0)  # no failure, which torch would report of its worker: the parent is done with it
        if self._shared[0] == OPEN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def obey_in_a_child(self) -> None:
        """Handle SIGTERM as above, where a library took it over in this forked process."""
        signal.signal(signal.SIGTERM, self._handle)


def outlive_sigterm(_worker: int) -> None:
    """In a worker of a loader, where torch's own handler ends it: leave the end to the run that forked it."""
    stop = _handled_by(signal.getsignal(signal.SIGINT))
    if stop is not None:
        stop.obey_in_a_child()


def _handled_by(handler: Any) -> StopRequested | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequested) else None
