"""Load counters in shared memory, so that an HTTP process can refuse a request without asking another.

The model process writes the room of each model, and the number of requests received from each HTTP process.
Each HTTP process writes the number that it has sent. Requests that are sent but not received yet count as
well: otherwise all HTTP processes would fill the same room at once, until they hear of it. Every number has
one writer and is written whole, so that no lock is needed.
"""

from ctypes import c_double
from multiprocessing.context import BaseContext

PER_MODEL, FREE, RETRY_SECONDS, LOADED = 3, 0, 1, 2
PER_PROCESS, SENT, TAKEN = 2, 0, 1


class SharedLoad:
    """The room of each model, and the number of requests on their way."""

    def __init__(self, context: BaseContext, *, models: int, processes: int) -> None:
        self._processes = PER_MODEL * models  # index of the first number of a process
        self._numbers = context.RawArray(c_double, PER_MODEL * models + PER_PROCESS * processes)

    # ---- written by the model process

    def publish(self, model: int, *, free: float, retry_seconds: int, is_loaded: bool) -> None:
        """Publish a model's room, in requests of average length, and the seconds to wait for room."""
        begin = PER_MODEL * model
        self._numbers[begin : begin + PER_MODEL] = [free, retry_seconds, is_loaded]

    def count_taken(self, process: int) -> None:
        """Count a received request."""
        self._numbers[self._processes + PER_PROCESS * process + TAKEN] += 1

    def forget(self, process: int) -> None:
        """Reset the counts of an HTTP process that has ended, for its successor."""
        begin = self._processes + PER_PROCESS * process
        self._numbers[begin : begin + PER_PROCESS] = [0, 0]

    # ---- written by HTTP processes

    def count_sent(self, process: int) -> None:
        """Count a sent request."""
        self._numbers[self._processes + PER_PROCESS * process + SENT] += 1

    # ---- read by HTTP processes

    def free(self, model: int) -> float:
        """Return the number of further requests that fit into a model's queue."""
        counts = self._numbers[self._processes :]
        on_their_way = sum(counts[SENT::PER_PROCESS]) - sum(counts[TAKEN::PER_PROCESS])
        return float(self._numbers[PER_MODEL * model + FREE] - on_their_way)

    def retry_seconds(self, model: int) -> int:
        """Return the seconds until a model should have room again."""
        return int(self._numbers[PER_MODEL * model + RETRY_SECONDS])

    def is_loaded(self, model: int) -> bool:
        """True if the weights of a model are in memory."""
        return bool(self._numbers[PER_MODEL * model + LOADED])
