"""Progress callbacks of a run, and the signals that ask it to stop."""

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
        """Show a message of one line; warnings are messages, too."""

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Show a line of metrics; progress is the fraction of the run that is done."""

    def on_progress(self, progress: float) -> None:
        """Note that a step is done; progress is the fraction of the run that is done."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """Show that `seconds` of the run's time limit of `total` seconds remain."""

    def on_signal(self, text: str) -> None:
        """Show a message from a signal handler, which may interrupt anything: take no lock."""


class SilentCallback:
    """A callback that prints nothing, for all processes but the main one."""

    def on_message(self, text: str) -> None:
        """Ignore a message."""

    def on_step(self, progress: float, values: dict[str, Any]) -> None:
        """Ignore a line of metrics."""

    def on_progress(self, progress: float) -> None:
        """Ignore a step."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """Ignore a deadline."""

    def on_signal(self, text: str) -> None:
        """Ignore a message from a signal handler."""


if TYPE_CHECKING:
    from bertsmith.training.distributed import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OPEN, ASKED, CLOSED = range(3)
PARENT_SECONDS = 60.0
"""Seconds that a forked process with a SIGTERM waits for its parent to get one, too; during a long matrix
product, the parent cannot handle it yet.
"""


class StopRequested(AbstractContextManager["StopRequested"]):
    """A context that turns Ctrl-C or SIGTERM into a flag; a second Ctrl-C interrupts at once.

    A second SIGTERM does not: launchers repeat it. Enter it before forking the processes that build batches:
    a Ctrl-C reaches them too, as may a scheduler's SIGTERM, and they must live until the step is done. A
    context inside another (a run of a study) hands its flag on at its end: a signal in the last step of the
    run also stops the study.
    """

    def __init__(self, on_signal: Callable[[str], None] = lambda _: None) -> None:
        self.here = False
        """True if this process was asked to stop."""
        self._on_signal = on_signal
        self._owner = os.getpid()
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}
        self._outer: StopRequested | None = None
        self._shared = mmap(-1, 1)
        """State that forked processes read, in shared memory: OPEN, ASKED or CLOSED."""

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
        # Flags are only set, never cleared: a signal may reach the outer context between these lines.
        if self._outer is not None and self.here:
            self._outer.here = True
            self._outer._shared[0] = ASKED
            if self._interrupted:
                self._outer._interrupted = True

    def anywhere(self, world: "World") -> bool:
        """True if any process was asked to stop; all must call it after the same steps, and stop together."""
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
        """Handle a signal in a forked process: its parent decides, and may send the SIGTERM itself."""
        if number != signal.SIGTERM:
            return
        # A signal to all processes is handled by the parent, but may arrive here first.
        patience = time.monotonic() + PARENT_SECONDS
        while self._shared[0] == OPEN and os.getppid() == self._owner and time.monotonic() < patience:
            time.sleep(0.01)
        if self._shared[0] == CLOSED:
            os._exit(0)  # the parent has finished; torch would report another status as a failure
        if self._shared[0] == OPEN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def obey_in_a_child(self) -> None:
        """Handle SIGTERM in this forked process again, after a library has replaced the handler."""
        signal.signal(signal.SIGTERM, self._handle)


def outlive_sigterm(_worker: int) -> None:
    """Replace torch's SIGTERM handler in a loader's worker: the run that forked it decides when it ends."""
    stop = _handled_by(signal.getsignal(signal.SIGINT))
    if stop is not None:
        stop.obey_in_a_child()


def _handled_by(handler: Any) -> StopRequested | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequested) else None
