"""Working through a stream of items on several processes, or on a Ray cluster, with the results in order.

The results are the same for any number of workers: items are cut before, and no worker knows of another.
"""

import importlib
import os
import signal
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, TypeVar

from bertsmith.core.errors import UserError
from bertsmith.core.processes import FEWER_WORKERS, Job, finished_in_order, results_of_processes

Item = TypeVar("Item")
Result = TypeVar("Result")
Engine = Literal["pool", "ray"]


@dataclass(frozen=True, slots=True)
class Workers:
    """How many worker processes there are, and what runs them."""

    count: int = 1
    engine: Engine = "pool"

    @property
    def items_at_once(self) -> int:
        """How many items are in flight at any time: no worker waits for one, and memory stays flat."""
        return 2 * self.count + 2


def results_in_order(
    items: Iterable[Item], job: Job[Item, Result], workers: Workers
) -> Generator[Result, None, None]:
    """The result for each item, in the order of the items; close it to stop the workers."""
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
        # As many workers as were asked for, or as the cluster has processors; the job is shipped once.
        count = min(workers.count, int(ray.cluster_resources().get("CPU", 1))) or 1
        shipped, worker = ray.put(job), ray.remote(num_cpus=1)(_RayWorker)
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
    if threading.current_thread() is threading.main_thread():  # only there Ray puts a handler of its own
        signal.signal(signal.SIGTERM, before)


class _RayWorker:
    """A worker that lives on the cluster."""

    def __init__(self, job: Job[Any, Any]) -> None:
        self._work, self._state = job.work, job.make_state(job.resources)

    def work(self, item: Any) -> Any:
        return self._work(item, self._state)
