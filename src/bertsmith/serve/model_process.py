"""The model process of a server: it holds the models and answers the HTTP processes.

All queues are here, so that batches, limits and fairness span the whole server, whichever HTTP process a
request came through. All state lives on the event loop, as in a server of one process.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from multiprocessing.context import BaseContext
from typing import Any

from bertsmith.serve import channel as frames
from bertsmith.serve.batching import CONNECTION, BatchReport
from bertsmith.serve.json_route import is_large
from bertsmith.serve.model_registry import open_models
from bertsmith.serve.monitoring import Metrics, Samples, add_up, counts_of
from bertsmith.serve.remote_models import RemoteModelInfo
from bertsmith.serve.server_config import ServerConfig
from bertsmith.serve.shared_load import SharedLoad

SAMPLES_SECONDS = 1.0
"""Seconds for an HTTP process to send its metrics; after that, its last ones count."""

Answer = Callable[..., Awaitable[Any]]
"""Function called in the cancellable task: a request cancelled before it began leaves nothing behind."""

log = logging.getLogger("bertsmith.serve")


class ModelProcess:
    """The models, and the HTTP processes that use them."""

    def __init__(self, config: ServerConfig, context: BaseContext, *, processes: int) -> None:
        self._metrics, self._channels = Metrics(), set[HttpChannel]()
        self.models = open_models(config, self._count_batch)
        self._metrics.watch_models(self.models)
        self._ended: Samples = {}  # counts of HTTP processes that have ended
        self.load = SharedLoad(context, models=len(self.models), processes=processes)
        self._publish()

    def descriptions(self) -> list[RemoteModelInfo]:
        """Return the descriptions of the models for HTTP processes."""
        return [RemoteModelInfo(model.name, model.info, model.tokenizer) for model in self.models]

    def close(self) -> None:
        """End the thread of every model."""
        for model in self.models:
            model.close()

    # ---- requests of HTTP processes

    async def predict(self, process: int, content: bytes) -> list[Any]:
        """Return the results of a request."""
        asked = await frames.in_thread_if(
            len(content) > frames.LARGE_FRAME, frames.decode_prediction, content
        )
        CONNECTION.set(None if asked.connection is None else (process, asked.connection))
        model = self.models[asked.model]
        if not model.is_loaded:
            await model.loaded()
            self._publish()
        return await model.queue.predict(asked.key, asked.inputs(), asked.tokens(), admitted=asked.admitted)

    async def check_in_time(self, content: bytes) -> None:
        """Reject a long request if the rest of it cannot be computed in time."""
        model, wanted, since = json.loads(content)
        await self.models[model].queue.check_in_time(wanted, since=since)

    async def metrics(self, asking: "HttpChannel", content: bytes) -> bytes:
        """Return the metrics of all processes as text."""
        asking.samples = json.loads(content)
        told = [channel.ask_samples() for channel in self._channels if channel is not asking]
        if told:
            await asyncio.wait(told, timeout=SAMPLES_SECONDS)
        return self._metrics.text([self._ended, *(channel.samples for channel in self._channels)])

    # ---- connected HTTP processes, and the load that they see

    def add(self, channel: "HttpChannel") -> None:
        """Add an HTTP process to the processes that report metrics."""
        self._channels.add(channel)

    def remove(self, channel: "HttpChannel") -> None:
        """Remove an HTTP process that has ended, but keep its counts."""
        self._channels.discard(channel)
        self._ended = add_up([self._ended, counts_of(channel.samples)])
        self.load.forget(channel.process)
        self.publish_soon()

    def publish_soon(self) -> None:
        """Publish the load to the HTTP processes, once requests that have just arrived are queued."""
        # In this round of the event loop requests enter their queue, in the next one a batch.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._publish)

    def _publish(self) -> None:
        for index, model in enumerate(self.models):
            free, retry_seconds = model.queue.free, model.queue.retry_seconds()
            self.load.publish(index, free=free, retry_seconds=retry_seconds, is_loaded=model.is_loaded)

    def _count_batch(self, model: str, report: BatchReport) -> None:
        self._metrics.count_batch(model, report)
        self.publish_soon()


class HttpChannel(frames.Channel):
    """The connection to one HTTP process."""

    def __init__(self, models: ModelProcess, process: int) -> None:
        super().__init__()
        self.process = process
        self.is_ready = False
        """True once it accepts requests."""
        self.is_silent = False
        """True if the process has sent nothing since this was last set."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the process has ended."""
        self.samples: Samples = {}
        """Its metrics, as it sent them last."""
        self._models = models
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._told: asyncio.Future[None] | None = None
        models.add(self)

    def ask_samples(self) -> asyncio.Future[None]:
        """Ask for metrics; return a future that is done once they have arrived."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
            self.send(frames.Kind.SAMPLES)
        return self._told

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are complete by now."""
        super().data_received(data)
        self.is_silent = False
        self._models.publish_soon()

    def on_frame(self, kind: frames.Kind, number: int, content: bytes) -> None:
        """Handle a received frame."""
        match kind:
            case frames.Kind.PREDICT:
                self._models.load.count_taken(self.process)
                self._answer(number, self._models.predict, self.process, content)
            case frames.Kind.IN_TIME:
                self._answer(number, self._models.check_in_time, content)
            case frames.Kind.METRICS:
                self._answer(number, self._models.metrics, self, content)
            case frames.Kind.CANCEL:
                if number in self._tasks:  # else it was answered meanwhile
                    self._tasks[number].cancel()
            case frames.Kind.SAMPLES:
                self.samples = json.loads(content)
                self._end_telling()
            case frames.Kind.READY:
                self.is_ready = True
                fields = {"process": self.process, "pid": json.loads(content)}
                log.info("an HTTP process takes requests", extra={"fields": fields})
            case _:
                raise ValueError(f"the model process was sent a frame of kind {kind.name}")

    def on_lost(self) -> None:
        """Cancel the work for a process that has ended."""
        for task in self._tasks.values():
            task.cancel()
        self._end_telling()
        self._models.remove(self)
        self.lost.set_result(None)

    def _end_telling(self) -> None:
        if self._told is not None:
            self._told.set_result(None)
            self._told = None

    def _answer(self, number: int, answer: Answer, *asked: Any) -> None:
        task = self._tasks[number] = asyncio.create_task(self._reply(number, answer, *asked))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _reply(self, number: int, answer: Answer, *asked: Any) -> None:
        try:
            found = await answer(*asked)
            content = await frames.in_thread_if(is_large(found), frames.encode_results, found)
            kind = frames.Kind.RESULTS
        except Exception as error:
            kind, content = frames.Kind.ERROR, frames.encode_error(error)
        self.send(kind, number, content)
