"""How busy a server of several processes is, in memory that all of them see: a refusal must ask nobody.

The model process writes how much room each model has, and how many requests of each HTTP process it has taken
in; each HTTP process writes how many it has sent. What was sent and not taken in is on its way, and takes of
the room: otherwise all HTTP processes would fill the same room at once, and go on until they hear of it.
Every number has one writer and is written whole, so that nothing needs a lock.
"""

from ctypes import c_double
from multiprocessing.context import BaseContext

PER_MODEL, FREE, RETRY_SECONDS, LOADED = 3, 0, 1, 2
PER_PROCESS, SENT, TAKEN = 2, 0, 1


class SharedLoad:
    """The room of each model, and what is on its way to it."""

    def __init__(self, context: BaseContext, *, models: int, processes: int) -> None:
        self._processes = PER_MODEL * models  # where their numbers begin
        self._numbers = context.RawArray(c_double, PER_MODEL * models + PER_PROCESS * processes)

    # ---- written by the model process

    def publish(self, model: int, *, free: float, retry_seconds: int, is_loaded: bool) -> None:
        """Show how many average requests a model has room for, and what is said to those without."""
        begin = PER_MODEL * model
        self._numbers[begin : begin + PER_MODEL] = [free, retry_seconds, is_loaded]

    def count_taken(self, process: int) -> None:
        """Count a request that has come in."""
        self._numbers[self._processes + PER_PROCESS * process + TAKEN] += 1

    def forget(self, process: int) -> None:
        """Begin anew for an HTTP process in the place of one that has ended."""
        begin = self._processes + PER_PROCESS * process
        self._numbers[begin : begin + PER_PROCESS] = [0, 0]

    # ---- written by HTTP processes

    def count_sent(self, process: int) -> None:
        """Count a request that goes out."""
        self._numbers[self._processes + PER_PROCESS * process + SENT] += 1

    # ---- read by HTTP processes

    def free(self, model: int) -> float:
        """How many more requests a model has room for."""
        counts = self._numbers[self._processes :]
        on_their_way = sum(counts[SENT::PER_PROCESS]) - sum(counts[TAKEN::PER_PROCESS])
        return float(self._numbers[PER_MODEL * model + FREE] - on_their_way)

    def retry_seconds(self, model: int) -> int:
        """When a model should have room again."""
        return int(self._numbers[PER_MODEL * model + RETRY_SECONDS])

    def is_loaded(self, model: int) -> bool:
        """Whether the weights of a model are in memory."""
        return bool(self._numbers[PER_MODEL * model + LOADED])
