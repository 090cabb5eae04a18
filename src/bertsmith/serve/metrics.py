"""What Prometheus is told: requests, waiting, batches. Labels come from fixed sets, never from a request."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from bertsmith.serve.batching import Batch
from bertsmith.serve.models import Models

OURS = "bertsmith"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """Counts of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        per_question = ["model", "question"]
        self._requests = self._counter("requests", "Requests by route and status", ["route", "status"])
        self._seconds = self._times("request_seconds", "From a request's head to its reply", ["route"])
        self._waited = self._times("wait_seconds", "From arrival in the line to its turn", ["model"])
        self._batch_seconds = self._times("batch_seconds", "Time of a batch in the model", per_question)
        self._batch_requests = self._sizes("batch_requests", "Requests asked together", REQUESTS)
        self._batch_tokens = self._sizes("batch_tokens", "Tokens asked together", TOKENS)
        self._waiting = self._gauge("waiting_requests", "Requests in line", ["model"])
        self._waiting_tokens = self._gauge("waiting_tokens", "Tokens in line", ["model"])
        self._loaded = self._gauge("model_loaded", "Whether the weights are in memory", ["model"])
        self._open = self._gauge("open_requests", "Requests between first byte and last", [])
        self._ended: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def _counter(self, name: str, about: str, labels: list[str]) -> Counter:
        return Counter(name, about, labels, namespace=OURS, registry=self._registry)

    def _gauge(self, name: str, about: str, labels: list[str]) -> Gauge:
        return Gauge(name, about, labels, namespace=OURS, registry=self._registry)

    def _times(self, name: str, about: str, labels: list[str]) -> Histogram:
        return Histogram(name, about, labels, namespace=OURS, registry=self._registry, buckets=SECONDS)

    def _sizes(self, name: str, about: str, buckets: tuple[int, ...]) -> Histogram:
        labels = ["model", "question"]
        return Histogram(name, about, labels, namespace=OURS, registry=self._registry, buckets=buckets)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        if (route, status) not in self._ended:  # to look labels up takes longer than to count
            self._ended[route, status] = (
                self._requests.labels(route, str(status)),
                self._seconds.labels(route),
            )
        count, times = self._ended[route, status]
        count.inc()
        times.observe(seconds)

    def batch(self, model: str, batch: Batch) -> None:
        """Count a batch that a model has done."""
        question = batch.kind.question
        self._batch_seconds.labels(model, question).observe(batch.seconds)
        self._batch_requests.labels(model, question).observe(batch.requests)
        self._batch_tokens.labels(model, question).observe(batch.tokens)
        waited = self._waited.labels(model)
        for seconds in batch.waited:
            waited.observe(seconds)

    def reply(self, models: Models, open_requests: int) -> Response:
        """All counts, in Prometheus' text format."""
        self._open.set(open_requests)
        for model in models:
            self._waiting.labels(model.name).set(model.queue.requests)
            self._waiting_tokens.labels(model.name).set(model.queue.tokens)
            self._loaded.labels(model.name).set(model.is_loaded)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
