"""Working through a stream of items on several processes, or on a Ray cluster, with the results in order.

The results are the same for any crew: items are cut before, and no worker knows of another.
"""

import importlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from bertsmith.ground.errors import UserError
from bertsmith.ground.processes import leave_with_the_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Item = TypeVar("Item")
Result = TypeVar("Result")
Engine = Literal["pool", "ray"]

FEWER_WORKERS = "use fewer --workers if memory ran out"
FAULT = 1
"""How a Python process ends whose fault nobody caught."""


@dataclass(frozen=True, slots=True)
class Crew:
    """How many processes work, and who runs them."""

    workers: int = 1
    engine: Engine = "pool"

    @property
    def items_at_once(self) -> int:
        """How many items are under way at any time: no worker waits for one, and memory stays flat."""
        return 2 * self.workers + 2


@dataclass(frozen=True, slots=True)
class Job(Generic[Item, Result]):
    """What each worker does: make its tools once, from materials that can travel, and use them on items."""

    make_tools: Callable[[Any], Any]
    materials: Any
    work: Callable[[Item, Any], Result]


def results_in_order(
    items: Iterable[Item], job: Job[Item, Result], crew: Crew
) -> Generator[Result, None, None]:
    """The result for each item, in the order of the items; close it to send the workers home."""
    if crew.engine == "ray":
        return _on_ray(items, job, crew)
    return _here(items, job) if crew.workers == 1 else _on_processes(items, job, crew)


def _here(items: Iterable[Item], job: Job[Item, Result]) -> Generator[Result, None, None]:
    tools = job.make_tools(job.materials)
    return (job.work(item, tools) for item in items)


def _in_order(
    items: Iterable[Item], begin: Callable[[Item], Any], *, finish: Callable[[Any], Result], at_once: int
) -> Generator[Result, None, None]:
    """Begin items ahead of the one that is waited for, but only so many."""
    begun: deque[Any] = deque()
    for item in items:
        begun.append(begin(item))
        if len(begun) >= at_once:
            yield finish(begun.popleft())
    while begun:
        yield finish(begun.popleft())


# --- processes of this machine ---


def _on_processes(items: Iterable[Item], job: Job[Item, Result], crew: Crew) -> Generator[Result, None, None]:
    workers: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()
    threads = ThreadPoolExecutor(crew.workers)  # each waits for one worker

    def work(item: Item) -> Any:
        worker = idle.get()
        try:
            return worker.work(item)
        finally:
            idle.put(worker)  # even a dead one: nobody may wait for it in vain

    try:
        for _ in range(crew.workers):
            workers.append(_Worker(job))
            idle.put(workers[-1])
        yield from _in_order(
            items,
            lambda item: threads.submit(work, item),
            finish=lambda future: future.result(),
            at_once=crew.items_at_once,
        )
    finally:
        for worker in workers:
            worker.end()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A process with a line of its own, on which it takes an item and says what came of it.

    In a pool of `concurrent.futures` all write into one pipe: the death of one in the middle of a result
    leaves the reader, and then everybody, waiting for ever. A line of one's own ends with its process.
    """

    def __init__(self, job: Job[Any, Any]) -> None:
        # Spawned, not forked: the libraries below have threads, which a fork would leave without their locks.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_work_on, args=(job, theirs), daemon=True)
        with _deaf_to_stops():
            self._process.start()
        theirs.close()

    def work(self, item: Any) -> Any:
        """What came of an item."""
        try:
            self._line.send(item)
            found = self._line.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            if self._process.exitcode == FAULT:
                raise UserError("a worker process failed", remedy="its own message stands above") from error
            raise UserError("a worker process died", remedy=FEWER_WORKERS) from error
        if isinstance(found, UserError):
            raise found
        return found

    def end(self) -> None:
        """End the process at once: it holds nothing that could be lost."""
        self._process.kill()
        self._process.join()


@contextmanager
def _deaf_to_stops() -> Iterator[None]:
    """Processes that are started inside leave it to their parent to stop: many stop a whole group at once."""
    resource_tracker.ensure_running()  # the first process would start it, and its start ends the deafness
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_on(job: Job[Any, Any], line: "Connection[Any, Any]") -> None:
    """Work on what comes until nothing can come any more."""
    leave_with_the_parent()
    tools = job.make_tools(job.materials)
    with suppress(EOFError, BrokenPipeError):
        while True:
            line.send(_result(job, line.recv(), tools))


def _result(job: Job[Item, Result], item: Item, tools: Any) -> Result | UserError:
    try:
        return job.work(item, tools)
    except UserError as error:
        return error


# --- Ray ---


def _on_ray(items: Iterable[Item], job: Job[Item, Result], crew: Crew) -> Generator[Result, None, None]:
    ray = _import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _start_ray(ray, crew)
    try:
        turns = cycle(_hire(ray, job, crew))
        yield from _in_order(
            items,
            lambda item: next(turns).work.remote(item),
            finish=lambda promised: _fetch(ray, promised),
            at_once=crew.items_at_once,
        )
    finally:
        if is_ours:
            ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it when it is imported
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError("ray is not installed", remedy="pip install 'bertsmith[cluster]'") from error


def _start_ray(ray: Any, crew: Crew) -> None:
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine alone."""
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError) as error:
            remedy = "start the cluster, or unset RAY_ADDRESS to work on this machine"
            raise UserError(f"no Ray cluster answers ({error})", where=address, remedy=remedy) from error
    else:
        ray.init(num_cpus=crew.workers, include_dashboard=False, **quiet)


def _hire(ray: Any, job: Job[Any, Any], crew: Crew) -> list[Any]:
    """As many workers as were asked for, or as the cluster has processors."""
    processors = int(ray.cluster_resources().get("CPU", 1))
    shipped = ray.put(job)
    return [
        ray.remote(num_cpus=1)(_RayWorker).remote(shipped) for _ in range(min(crew.workers, processors) or 1)
    ]


def _fetch(ray: Any, promised: Any) -> Any:
    try:
        return ray.get(promised)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise UserError("a worker process of Ray died", remedy=FEWER_WORKERS) from error


class _RayWorker:
    """A worker that lives on the cluster."""

    def __init__(self, job: Job[Any, Any]) -> None:
        self._work, self._tools = job.work, job.make_tools(job.materials)

    def work(self, item: Any) -> Any:
        return self._work(item, self._tools)
