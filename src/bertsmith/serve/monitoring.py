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
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from bertsmith.serve.batching import BatchReport
from bertsmith.serve.model_registry import ModelRegistry

log = logging.getLogger("bertsmith.serve")

LOGGERS = ("bertsmith", "uvicorn", "asyncio")
REPEAT_SECONDS = 10.0
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


class LoopFailures:
    """Logs what the event loop reports, such as connections that cannot be accepted."""

    # Without it each of them is a traceback, and they may come ten thousand times a second.

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a failure, unless one of its kind was logged a moment ago."""
        failure = context.get("exception")
        kind = type(failure).__name__ if failure else "unknown"
        left_out, now = self._left_out.get(kind, 0), time.monotonic()
        if now - self._logged.get(kind, -math.inf) < REPEAT_SECONDS:
            self._left_out[kind] = left_out + 1
            return
        self._logged[kind], self._left_out[kind] = now, 0
        reason = os.strerror(failure.errno) if isinstance(failure, OSError) and failure.errno else ""
        fields = {"reason": reason, "left_out": left_out, **(failure_fields(failure) if failure else {})}
        log.error("event loop", extra={"fields": fields})


def failure_fields(failure: BaseException) -> dict[str, Any]:
    """What a fault was and where; not its message, in which a text may be quoted."""
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
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """The metrics of one server."""

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
        self._open = self._gauge("open_requests", "Requests between first byte and last", [])
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

    def response(self, models: ModelRegistry, open_requests: int) -> Response:
        """All metrics, in Prometheus' text format."""
        self._open.set(open_requests)
        for model in models:
            self._waiting.labels(model.name).set(model.queue.requests)
            self._waiting_tokens.labels(model.name).set(model.queue.tokens)
            self._loaded.labels(model.name).set(model.is_loaded)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
