"""The access log (JSON lines on standard error) and the Prometheus metrics; neither contains sent texts.

Labels of metrics are from fixed sets, never from a request: each new value would stay in memory.
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
"""Seconds between two log lines on the same kind of event loop failure."""
MAX_FRAMES = 8
"""Frames of a traceback that are logged; the outer ones are always the same."""


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        if record.exc_info and record.exc_info[1] is not None:
            line |= failure_fields(record.exc_info[1])
        return json.dumps(line)


def log_request(fields: dict[str, Any]) -> None:
    """Log how a request ended."""
    # Not with `info`, which walks the stack for a caller that is always the same.
    if log.isEnabledFor(logging.INFO):
        where = (log.name, logging.INFO, __file__, 0)
        log.handle(log.makeRecord(*where, "request", (), None, extra={"fields": fields}))


def log_failure(failure: BaseException, request_id: str) -> None:
    """Log an internal error: its location, and the id of its request."""
    log.error("failure", extra={"fields": {"request_id": request_id, **failure_fields(failure)}})


class Repeats:
    """Limits log lines by kind, for events that occur ten thousand times a second."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._logged: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def left_out(self, kind: str) -> int | None:
        """Return the number of lines suppressed since the last one, or None to suppress this one too."""
        left_out, now = self._left_out.get(kind, 0), time.monotonic()
        if now - self._logged.get(kind, -math.inf) < self._seconds:
            self._left_out[kind] = left_out + 1
            return None
        self._logged[kind], self._left_out[kind] = now, 0
        return left_out


class LoopFailures:
    """Logs what the event loop reports, for example connections that cannot be accepted."""

    def __init__(self) -> None:
        self._repeats = Repeats(FAILURE_SECONDS)  # otherwise each failure would log a traceback

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
    """A failure in another process, with the fields of its log line."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields["failure"])
        self.fields = fields


def failure_fields(failure: BaseException) -> dict[str, Any]:
    """Return type and location of a failure; not its message, which may quote a text."""
    if isinstance(failure, RemoteFailure):
        return failure.fields
    frames = traceback.extract_tb(failure.__traceback__)[-MAX_FRAMES:]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"failure": type(failure).__name__, "places": places}


def write_json_lines() -> None:
    """Format everything that is logged as JSON lines."""
    # No log line contains these, so do not look them up for each record.
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
"""Name, labels and value of every sample in one process, by metric; can be sent as JSON."""


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
        self._loaded = self._gauge("model_loaded", "1 if the weights are in memory", ["model"])
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
        if (route, status) not in self._ended:  # looking up labels takes longer than counting
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
        """Report the number of open requests whenever the metrics are read."""
        self._open.set_function(open_requests)

    def watch_models(self, models: Iterable[LocalModel]) -> None:
        """Report the queues of these models whenever the metrics are read."""
        for model in models:
            self._waiting.labels(model.name).set_function(partial(getattr, model.queue, "requests"))
            self._waiting_tokens.labels(model.name).set_function(partial(getattr, model.queue, "tokens"))
            self._loaded.labels(model.name).set_function(partial(getattr, model, "is_loaded"))

    def samples(self) -> Samples:
        """Return the samples of this process, to be added up in another one."""
        return {
            metric.name: [(each.name, each.labels, each.value) for each in metric.samples]
            for metric in self._registry.collect()
        }

    def text(self, others: Sequence[Samples] = ()) -> bytes:
        """Return all metrics in Prometheus' text format, including the metrics of other processes."""
        return generate_latest(Summed(self._registry, add_up([self.samples(), *others])))


class Summed(CollectorRegistry):
    """The metrics of a registry, with other samples."""

    def __init__(self, registry: CollectorRegistry, samples: Samples) -> None:
        super().__init__()
        self._of, self._samples = registry, samples

    def collect(self) -> Iterable[Metric]:
        """Yield each metric with its samples."""
        for metric in self._of.collect():
            metric.samples = [Sample(*each) for each in self._samples[metric.name]]
            yield metric


def add_up(several: Iterable[Samples]) -> Samples:
    """Return the sums over several processes: counts, buckets and sums add up, and so do gauges."""
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
    """Return the samples to keep of a process that has ended: all but its open requests."""
    return {metric: own for metric, own in samples.items() if metric != f"{NAMESPACE}_{OPEN_REQUESTS}"}
