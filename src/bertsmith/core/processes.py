"""Parallel work on a stream of items, in several processes or on a Ray cluster, with the results in order.

The results are the same for any number of workers: items are independent, and formed before they are sent.
"""

import atexit
import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


Item = TypeVar("Item")
Begun = TypeVar("Begun")
Result = TypeVar("Result")
Engine = Literal["pool", "ray"]

FEWER_WORKERS = "use fewer `workers` if memory ran out"
FAULT = 1
"""Exit status of a Python process after an uncaught exception."""


@dataclass(frozen=True, slots=True)
class Job(Generic[Item, Result]):
    """The job of a worker: make a state once, from resources that can be pickled, and use it on items."""

    make_state: Callable[[Any], Any]
    resources: Any
    work: Callable[[Item, Any], Result]


def results_of_processes(
    items: Iterable[Item], job: Job[Item, Result], *, workers: int, at_once: int
) -> Generator[Result, None, None]:
    """Yield the result for each item, in order; close the generator to end the workers."""
    with _worker_pool(job, workers) as begin:
        yield from finished_in_order(items, begin, finish=lambda begun: begun.result(), at_once=at_once)


def finished_in_order(
    items: Iterable[Item], begin: Callable[[Item], Begun], *, finish: Callable[[Begun], Result], at_once: int
) -> Generator[Result, None, None]:
    """Yield the result for each item, in order, with at most `at_once` items in flight."""
    begun: deque[Begun] = deque()
    for item in items:
        begun.append(begin(item))
        # Wait for the oldest even if a later one is done: results keep the order of the items, and at most
        # `at_once` of them are held.
        if len(begun) >= at_once:
            yield finish(begun.popleft())
    while begun:
        yield finish(begun.popleft())


@contextmanager
def _worker_pool(job: Job[Item, Result], workers: int) -> Iterator[Callable[[Item], Future[Result]]]:
    """Yield a function that begins an item on the next idle worker."""
    threads = ThreadPoolExecutor(workers)  # each waits for one worker
    started: list[Future[_Worker]] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def work_on_idle(item: Item) -> Any:
        worker = idle.get()
        try:
            return worker.work(item)
        finally:
            idle.put(worker)  # even a dead one: another thread may be waiting for it

    try:
        for _ in range(workers):
            # In a thread, which an interrupt never reaches: half a start would end in a worker's traceback.
            started.append(threads.submit(_Worker))
            worker = started[-1].result()
            threads.submit(worker.take, job).result()
            idle.put(worker)
        yield lambda item: threads.submit(work_on_idle, item)
    finally:
        # Kill the workers first: only then do the threads that wait for a result return and can be shut down.
        for each in started:
            if each.exception() is None:
                each.result().end()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A process with a separate pipe, on which it receives an item and sends the result.

    In a pool of `concurrent.futures` all workers write into one pipe: if one dies in the middle of a result,
    the reader and then all others wait for ever. A separate pipe ends with its process.
    """

    def __init__(self) -> None:
        # Spawned, not forked: libraries have threads, which a fork would leave without their locks.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_worker, args=(theirs,), daemon=True)
        # Stop signals often go to a whole group of processes, and the worker leaves them to its parent. It
        # inherits the blocked signals; the tracker is started first, because its start would unblock them.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # a copy here would keep the pipe open after the process has died
        # In case the caller does not end it: at exit, Python asks it to stop and waits for that.
        atexit.register(self.end)

    def take(self, job: Job[Any, Any]) -> None:
        """Send the job, but not as part of the start, which waits for ever if the process dies over it."""
        with self._reporting_death():
            self._pipe.send(job)

    def work(self, item: Any) -> Any:
        """Return the result for an item."""
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
                raise UserError("a worker process failed", remedy="see its own message above") from error
            raise UserError("a worker process died", remedy=FEWER_WORKERS) from error

    def end(self) -> None:
        """End the process at once: it has nothing to save."""
        self._process.kill()
        self._process.join()
        atexit.unregister(self.end)


# --- in the worker's process ---


def _run_worker(pipe: "Connection[Any, Any]") -> None:
    """Receive a job, and work on items until the pipe is closed."""
    threading.Thread(target=_exit_with_the_parent, daemon=True).start()
    job = pipe.recv()
    state = job.make_state(job.resources)
    with suppress(EOFError, BrokenPipeError):
        while True:  # no names for item and result: they may be large, and would be kept until the next
            try:
                pipe.send(job.work(pipe.recv(), state))
            except UserError as error:  # for the parent to raise; any other fault ends this process
                pipe.send(error)


def _exit_with_the_parent() -> None:
    """End this process when its parent ends: a parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAULT)


@dataclass(frozen=True, slots=True)
class Workers:
    """Number of worker processes, and the engine that runs them."""

    count: int = 1
    engine: Engine = "pool"

    @property
    def items_at_once(self) -> int:
        """Return the maximum number of items in flight: workers stay busy, and memory is bounded."""
        return 2 * self.count + 2


def results_in_order(
    items: Iterable[Item], job: Job[Item, Result], workers: Workers
) -> Generator[Result, None, None]:
    """Return a generator of each item's result, in order; close it to stop the workers."""
    if workers.engine == "ray":
        return _on_ray(items, job, workers)
    if workers.count == 1:
        state = job.make_state(job.resources)
        return (job.work(item, state) for item in items)
    return results_of_processes(items, job, workers=workers.count, at_once=workers.items_at_once)


# --- Ray ---


def _on_ray(items: Iterable[Item], job: Job[Item, Result], workers: Workers) -> Generator[Result, None, None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it when it is imported
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UserError("ray is not installed", remedy="pip install 'bertsmith[cluster]'") from error

    def fetch(promised: Any) -> Any:
        try:
            return ray.get(promised)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            raise UserError("a worker process of Ray died", remedy=FEWER_WORKERS) from error

    is_ours = not ray.is_initialized()
    if is_ours:
        _start_ray(ray, workers)
    try:
        # As many workers as requested, but at most as many as the cluster has CPUs; the job is sent once.
        count = min(workers.count, int(ray.cluster_resources().get("CPU", 1))) or 1
        shipped, worker = ray.put(job), ray.remote(num_cpus=1)(_RayWorker)
        # In turn, not to an idle worker: results are awaited in order, so a faster worker gains nothing.
        turns = cycle([worker.remote(shipped) for _ in range(count)])
        yield from finished_in_order(
            items,
            lambda item: next(turns).work.remote(item),
            finish=fetch,
            at_once=workers.items_at_once,
        )
    finally:
        if is_ours:
            ray.shutdown()


def _start_ray(ray: Any, workers: Workers) -> None:
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine alone."""
    quiet = {"log_to_driver": False, "logging_level": "error"}
    before = signal.getsignal(signal.SIGTERM)
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError) as error:
            remedy = "start the cluster, or unset RAY_ADDRESS to work on this machine"
            raise UserError(f"no Ray cluster answers ({error})", where=address, remedy=remedy) from error
    else:
        ray.init(num_cpus=workers.count, include_dashboard=False, **quiet)
    if threading.current_thread() is threading.main_thread():  # Ray replaces the handler only there
        signal.signal(signal.SIGTERM, before)


class _RayWorker:
    """A worker on the Ray cluster."""

    def __init__(self, job: Job[Any, Any]) -> None:
        self._work, self._state = job.work, job.make_state(job.resources)

    def work(self, item: Any) -> Any:
        return self._work(item, self._state)
