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

from bertsmith.core.errors import UserError

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
    """What each worker does: make its state once, from resources that can be pickled, and use it on items."""

    make_state: Callable[[Any], Any]
    resources: Any
    work: Callable[[Item, Any], Result]


def results_of_processes(
    items: Iterable[Item], job: Job[Item, Result], *, workers: int, at_once: int
) -> Generator[Result, None, None]:
    """The result for each item, in the order of the items; close it to end the workers."""
    with _worker_pool(job, workers) as begin:
        yield from finished_in_order(items, begin, finish=lambda begun: begun.result(), at_once=at_once)


def finished_in_order(
    items: Iterable[Item], begin: Callable[[Item], Begun], *, finish: Callable[[Begun], Result], at_once: int
) -> Generator[Result, None, None]:
    """What came of each item; items are begun ahead of the one that is waited for, but only so many."""
    begun: deque[Begun] = deque()
    for item in items:
        begun.append(begin(item))
        # The oldest is waited for even where a later one is done: results keep the order of the items, and
        # no more than `at_once` of them are ever held.
        if len(begun) >= at_once:
            yield finish(begun.popleft())
    while begun:
        yield finish(begun.popleft())


@contextmanager
def _worker_pool(job: Job[Item, Result], workers: int) -> Iterator[Callable[[Item], Future[Result]]]:
    """A function that begins an item on the next worker who is idle."""
    threads = ThreadPoolExecutor(workers)  # each waits for one worker
    started: list[Future[_Worker]] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def work_on_idle(item: Item) -> Any:
        worker = idle.get()
        try:
            return worker.work(item)
        finally:
            idle.put(worker)  # even a dead one: nobody may wait for it in vain

    try:
        for _ in range(workers):
            # In a thread, which an interrupt never reaches: half a start would end in a worker's traceback.
            started.append(threads.submit(_Worker))
            worker = started[-1].result()
            threads.submit(worker.take, job).result()
            idle.put(worker)
        yield lambda item: threads.submit(work_on_idle, item)
    finally:
        # Killed first: only then do the threads that wait for a result come back, and can be shut down.
        for each in started:
            if each.exception() is None:
                each.result().end()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A process with a pipe of its own, on which it receives an item and sends the result.

    In a pool of `concurrent.futures` all write into one pipe: the death of one in the middle of a result
    leaves the reader, and then everybody, waiting for ever. A pipe of one's own ends with its process.
    """

    def __init__(self) -> None:
        # Spawned, not forked: libraries have threads, which a fork would leave without their locks.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_worker, args=(theirs,), daemon=True)
        with _stops_blocked():
            self._process.start()
        theirs.close()  # a copy here would keep the pipe open after the process has died
        # For whoever forgets to end it: at its own exit, Python asks it to stop and waits for that.
        atexit.register(self.end)

    def take(self, job: Job[Any, Any]) -> None:
        """Send the job: not at the start, which waits for ever for a process that dies over it."""
        with self._reporting_death():
            self._pipe.send(job)

    def work(self, item: Any) -> Any:
        """What came of an item."""
        with self._reporting_death():
            self._pipe.send(item)
            found = self._pipe.recv()
        if isinstance(found, UserError):
            raise found
        return found

    @contextmanager
    def _reporting_death(self) -> Iterator[None]:
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
def _stops_blocked() -> Iterator[None]:
    """Processes that are started inside leave it to their parent to stop: many stop a whole group at once."""
    resource_tracker.ensure_running()  # the first process would start it, and its start unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the worker's process ---


def _run_worker(pipe: "Connection[Any, Any]") -> None:
    """Receive a job, and work on items until none can come any more."""
    threading.Thread(target=_exit_with_the_parent, daemon=True).start()
    job = pipe.recv()
    state = job.make_state(job.resources)
    with suppress(EOFError, BrokenPipeError):
        while True:  # without a name for item and result, which may be large and would stay until the next
            try:
                pipe.send(job.work(pipe.recv(), state))
            except UserError as error:  # for the parent to raise; any other fault ends this process
                pipe.send(error)


def _exit_with_the_parent() -> None:
    """End this process when its parent ends; one that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAULT)
