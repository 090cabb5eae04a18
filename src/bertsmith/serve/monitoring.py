"""The access log, as JSON lines on standard error, and the metrics for Prometheus: never a word of a request.

Labels of metrics come from fixed sets, never from a request: each new value would stay in memory.
"""

import asyncio
import json
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.samples import Sample

from bertsmith.serve.batching import BatchReport
from bertsmith.serve.model_registry import LocalModel

log = logging.getLogger("bertsmith.serve")

LOGGERS = ("bertsmith", "uvicorn", "asyncio")
FAILURE_SECONDS = 10.0
"""Between two lines on the same kind of failure of the event loop."""
MAX_FRAMES = 8
"""Of a traceback that are logged; those further out are always the same."""


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        if record.exc_info and record.exc_info[1] is not None:
            line |= failure_fields(record.exc_info[1])
        return json.dumps(line)


def log_request(fields: dict[str, Any]) -> None:
    """Log how a request ended."""
    # Not by `info`, which walks the stack for a caller that is always the same.
    if log.isEnabledFor(logging.INFO):
        where = (log.name, logging.INFO, __file__, 0)
        log.handle(log.makeRecord(*where, "request", (), None, extra={"fields": fields}))


def log_failure(failure: BaseException, request_id: str) -> None:
    """Log a fault of ours: where it happened, and in which request."""
    log.error("failure", extra={"fields": {"request_id": request_id, **failure_fields(failure)}})


class Repeats:
    """What comes ten thousand times a second and is logged once in so many, by its kind."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._logged: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def left_out(self, kind: str) -> int | None:
        """How many were left out since the last line; None: so is this one."""
        left_out, now = self._left_out.get(kind, 0), time.monotonic()
        if now - self._logged.get(kind, -math.inf) < self._seconds:
            self._left_out[kind] = left_out + 1
            return None
        self._logged[kind], self._left_out[kind] = now, 0
        return left_out


class LoopFailures:
    """Logs what the event loop reports, such as connections that cannot be accepted."""

    def __init__(self) -> None:
        self._repeats = Repeats(FAILURE_SECONDS)  # without it each of them is a traceback

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a failure, unless one of its kind was logged a moment ago."""
        failure = context.get("exception")
        left_out = self._repeats.left_out(type(failure).__name__ if failure else "unknown")
        if left_out is None:
            return
        reason = os.strerror(failure.errno) if isinstance(failure, OSError) and failure.errno else ""
        fields = {"reason": reason, "left_out": left_out, **(failure_fields(failure) if failure else {})}
        log.error("event loop", extra={"fields": fields})


class RemoteFailure(Exception):
    """A fault in another process, by what the log says of it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields["failure"])
        self.fields = fields


def failure_fields(failure: BaseException) -> dict[str, Any]:
    """What a fault was and where; not its message, in which a text may be quoted."""
    if isinstance(failure, RemoteFailure):
        return failure.fields
    frames = traceback.extract_tb(failure.__traceback__)[-MAX_FRAMES:]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"failure": type(failure).__name__, "places": places}


def write_json_lines() -> None:
    """Let everything that is logged come out as JSON lines."""
    # What no line says need not be looked up for each of them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


NAMESPACE = "bertsmith"
OPEN_REQUESTS = "open_requests"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


Samples = dict[str, list[tuple[str, dict[str, str], float]]]
"""Of each metric the name, the labels and the value of what was counted in one process; goes through JSON."""


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        per_question = ["model", "question"]
        self._requests = self._counter("requests", "Requests by route and status", ["route", "status"])
        self._seconds = self._times("request_seconds", "From a request's head to its response", ["route"])
        self._waited = self._times("wait_seconds", "From arrival in the queue to its turn", ["model"])
        self._batch_seconds = self._times("batch_seconds", "Time of a batch in the model", per_question)
        self._batch_requests = self._sizes("batch_requests", "Requests in a batch", REQUESTS)
        self._batch_tokens = self._sizes("batch_tokens", "Tokens in a batch", TOKENS)
        self._waiting = self._gauge("waiting_requests", "Requests in the queue", ["model"])
        self._waiting_tokens = self._gauge("waiting_tokens", "Tokens in the queue", ["model"])
        self._loaded = self._gauge("model_loaded", "Whether the weights are in memory", ["model"])
        self._open = self._gauge(OPEN_REQUESTS, "Requests between first byte and last", [])
        self._ended: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def _counter(self, name: str, about: str, labels: list[str]) -> Counter:
        return Counter(name, about, labels, namespace=NAMESPACE, registry=self._registry)

    def _gauge(self, name: str, about: str, labels: list[str]) -> Gauge:
        return Gauge(name, about, labels, namespace=NAMESPACE, registry=self._registry)

    def _times(self, name: str, about: str, labels: list[str]) -> Histogram:
        return Histogram(name, about, labels, namespace=NAMESPACE, registry=self._registry, buckets=SECONDS)

    def _sizes(self, name: str, about: str, buckets: tuple[int, ...]) -> Histogram:
        labels = ["model", "question"]
        return Histogram(name, about, labels, namespace=NAMESPACE, registry=self._registry, buckets=buckets)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        if (route, status) not in self._ended:  # to look labels up takes longer than to count
            self._ended[route, status] = (
                self._requests.labels(route, str(status)),
                self._seconds.labels(route),
            )
        count, times = self._ended[route, status]
        count.inc()
        times.observe(seconds)

    def count_batch(self, model: str, report: BatchReport) -> None:
        """Count a batch that a model has computed."""
        question = report.key.operation
        self._batch_seconds.labels(model, question).observe(report.seconds)
        self._batch_requests.labels(model, question).observe(report.requests)
        self._batch_tokens.labels(model, question).observe(report.tokens)
        waited = self._waited.labels(model)
        for seconds in report.waited:
            waited.observe(seconds)

    def watch_requests(self, open_requests: Callable[[], int]) -> None:
        """Show how many requests are open whenever somebody looks."""
        self._open.set_function(open_requests)

    def watch_models(self, models: Iterable[LocalModel]) -> None:
        """Show what waits for these models whenever somebody looks."""
        for model in models:
            self._waiting.labels(model.name).set_function(partial(getattr, model.queue, "requests"))
            self._waiting_tokens.labels(model.name).set_function(partial(getattr, model.queue, "tokens"))
            self._loaded.labels(model.name).set_function(partial(getattr, model, "is_loaded"))

    def samples(self) -> Samples:
        """What was counted here, for another process to add up."""
        return {
            metric.name: [(each.name, each.labels, each.value) for each in metric.samples]
            for metric in self._registry.collect()
        }

    def text(self, others: Sequence[Samples] = ()) -> bytes:
        """All metrics in Prometheus' text format, with those of other processes added."""
        return generate_latest(Summed(self._registry, add_up([self.samples(), *others])))


class Summed(CollectorRegistry):
    """The metrics of a registry, with other samples."""

    def __init__(self, registry: CollectorRegistry, samples: Samples) -> None:
        super().__init__()
        self._of, self._samples = registry, samples

    def collect(self) -> Iterable[Metric]:
        """Each metric with its samples."""
        for metric in self._of.collect():
            metric.samples = [Sample(*each) for each in self._samples[metric.name]]
            yield metric


def add_up(several: Iterable[Samples]) -> Samples:
    """The samples of several processes as one: counts, buckets and sums add up, and so do gauges."""
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for samples in several:
        for metric, own in samples.items():
            of_metric = sums.setdefault(metric, {})
            for name, labels, value in own:
                key, is_time = (name, tuple(labels.items())), name.endswith("_created")
                before = of_metric.get(key, value if is_time else 0.0)
                of_metric[key] = min(before, value) if is_time else before + value
    return {
        metric: [(name, dict(labels), value) for (name, labels), value in of_metric.items()]
        for metric, of_metric in sums.items()
    }


def counts_of(samples: Samples) -> Samples:
    """The samples without those of the moment: what remains of a process that has ended."""
    return {metric: own for metric, own in samples.items() if metric != f"{NAMESPACE}_{OPEN_REQUESTS}"}
