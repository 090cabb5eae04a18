"""Working through a stream of items on several processes, or on a Ray cluster, with the results in order.

The results are the same for any crew: items are cut before, and no worker knows of another.
"""

import importlib
import os
import signal
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, TypeVar

from bertsmith.ground.errors import UserError
from bertsmith.ground.processes import FEWER_WORKERS, Job, finished_in_order, results_of_processes

Item = TypeVar("Item")
Result = TypeVar("Result")
Engine = Literal["pool", "ray"]


@dataclass(frozen=True, slots=True)
class Crew:
    """How many processes work, and who runs them."""

    workers: int = 1
    engine: Engine = "pool"

    @property
    def items_at_once(self) -> int:
        """How many items are under way at any time: no worker waits for one, and memory stays flat."""
        return 2 * self.workers + 2


def results_in_order(
    items: Iterable[Item], job: Job[Item, Result], crew: Crew
) -> Generator[Result, None, None]:
    """The result for each item, in the order of the items; close it to send the workers home."""
    if crew.engine == "ray":
        return _on_ray(items, job, crew)
    if crew.workers == 1:
        return _here(items, job)
    return results_of_processes(items, job, workers=crew.workers, at_once=crew.items_at_once)


def _here(items: Iterable[Item], job: Job[Item, Result]) -> Generator[Result, None, None]:
    tools = job.make_tools(job.materials)
    return (job.work(item, tools) for item in items)


# --- Ray ---


def _on_ray(items: Iterable[Item], job: Job[Item, Result], crew: Crew) -> Generator[Result, None, None]:
    ray = _import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _start_ray(ray, crew)
    try:
        turns = cycle(_hire(ray, job, crew))
        yield from finished_in_order(
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
    before = signal.getsignal(signal.SIGTERM)
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError) as error:
            remedy = "start the cluster, or unset RAY_ADDRESS to work on this machine"
            raise UserError(f"no Ray cluster answers ({error})", where=address, remedy=remedy) from error
    else:
        ray.init(num_cpus=crew.workers, include_dashboard=False, **quiet)
    if threading.current_thread() is threading.main_thread():  # only there Ray puts a handler of its own
        signal.signal(signal.SIGTERM, before)


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
