"""Working through a stream of items on several processes of this machine, with the results in order.

The results are the same for any number of processes: no worker knows of another.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bertsmith.ground.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Item = TypeVar("Item")
Begun = TypeVar("Begun")
Result = TypeVar("Result")

FEWER_WORKERS = "use fewer --workers if memory ran out"
FAULT = 1
"""How a Python process ends whose fault nobody caught."""


@dataclass(frozen=True, slots=True)
class Job(Generic[Item, Result]):
    """What each worker does: make its tools once, from materials that can travel, and use them on items."""

    make_tools: Callable[[Any], Any]
    materials: Any
    work: Callable[[Item, Any], Result]


def results_of_processes(
    items: Iterable[Item], job: Job[Item, Result], *, workers: int, at_once: int
) -> Generator[Result, None, None]:
    """The result for each item, in the order of the items; close it to send the workers home."""
    with _crew(job, workers) as begin:
        yield from finished_in_order(items, begin, finish=lambda begun: begun.result(), at_once=at_once)


def finished_in_order(
    items: Iterable[Item], begin: Callable[[Item], Begun], *, finish: Callable[[Begun], Result], at_once: int
) -> Generator[Result, None, None]:
    """What came of each item; items are begun ahead of the one that is waited for, but only so many."""
    begun: deque[Begun] = deque()
    for item in items:
        begun.append(begin(item))
        if len(begun) >= at_once:
            yield finish(begun.popleft())
    while begun:
        yield finish(begun.popleft())


@contextmanager
def _crew(job: Job[Item, Result], workers: int) -> Iterator[Callable[[Item], Future[Result]]]:
    """A function that begins an item on the next worker who is idle."""
    threads = ThreadPoolExecutor(workers)  # each waits for one worker
    hired: list[Future[_Worker]] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()
    try:
        for _ in range(workers):
            # In a thread, which an interrupt never reaches: half a start would end in a worker's traceback.
            hired.append(threads.submit(_Worker))
            worker = hired[-1].result()
            threads.submit(worker.take, job).result()
            idle.put(worker)
        yield lambda item: threads.submit(_work_by_the_next, idle, item)
    finally:
        for each in hired:
            if each.exception() is None:
                each.result().end()
        threads.shutdown(cancel_futures=True)


def _work_by_the_next(idle: "SimpleQueue[_Worker]", item: Any) -> Any:
    worker = idle.get()
    try:
        return worker.work(item)
    finally:
        idle.put(worker)  # even a dead one: nobody may wait for it in vain


class _Worker:
    """A process with a line of its own, on which it takes an item and says what came of it.

    In a pool of `concurrent.futures` all write into one pipe: the death of one in the middle of a result
    leaves the reader, and then everybody, waiting for ever. A line of one's own ends with its process.
    """

    def __init__(self) -> None:
        # Spawned, not forked: libraries have threads, which a fork would leave without their locks.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_work_on, args=(theirs,), daemon=True)
        with _deaf_to_stops():
            self._process.start()
        theirs.close()
        # For whoever forgets to send it home: at its own exit, Python asks it to stop and waits for that.
        atexit.register(self.end)

    def take(self, job: Job[Any, Any]) -> None:
        """Say what is to be done: not at the start, which waits for ever for a process that dies over it."""
        with self._death_told():
            self._line.send(job)

    def work(self, item: Any) -> Any:
        """What came of an item."""
        with self._death_told():
            self._line.send(item)
            found = self._line.recv()
        if isinstance(found, UserError):
            raise found
        return found

    @contextmanager
    def _death_told(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._process.join()
            if self._process.exitcode == FAULT:
                raise UserError("a worker process failed", remedy="its own message stands above") from error
            raise UserError("a worker process died", remedy=FEWER_WORKERS) from error

    def end(self) -> None:
        """End the process at once: it holds nothing that could be lost."""
        self._process.kill()
        self._process.join()
        atexit.unregister(self.end)


@contextmanager
def _deaf_to_stops() -> Iterator[None]:
    """Processes that are started inside leave it to their parent to stop: many stop a whole group at once."""
    resource_tracker.ensure_running()  # the first process would start it, and its start ends the deafness
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the worker's process ---


def _work_on(line: "Connection[Any, Any]") -> None:
    """Take a job, and work on what comes until nothing can come any more."""
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    job = line.recv()
    tools = job.make_tools(job.materials)
    with suppress(EOFError, BrokenPipeError):
        while True:  # without a name for item and result, which may be large and would stay until the next
            line.send(_result(job, line.recv(), tools))


def _leave_with_the_parent() -> None:
    """End this process when its parent ends; one that was killed cannot send its workers home."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAULT)


def _result(job: Job[Item, Result], item: Item, tools: Any) -> Result | UserError:
    try:
        return job.work(item, tools)
    except UserError as error:
        return error
