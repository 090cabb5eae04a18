"""The process that holds the models of a server, and answers the HTTP processes before it.

All queues are here, so that batches, limits and fairness are those of the whole server, whichever HTTP
process a request came through. All state lives on the event loop, as in a server of one process.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from multiprocessing.context import BaseContext
from typing import Any

from bertsmith.serve.batching import CONNECTION, BatchReport
from bertsmith.serve.channel import (
    LARGE_FRAME,
    Channel,
    Kind,
    decode_prediction,
    encode_error,
    encode_results,
    in_thread_if,
)
from bertsmith.serve.json_route import is_large
from bertsmith.serve.model_registry import open_models
from bertsmith.serve.monitoring import Metrics, Samples, add_up, counts_of
from bertsmith.serve.remote_models import RemoteModelInfo
from bertsmith.serve.server_config import ServerConfig
from bertsmith.serve.shared_load import SharedLoad

SAMPLES_SECONDS = 1.0
"""For an HTTP process to tell its metrics; of one that does not, those count that it told before."""

Answer = Callable[..., Awaitable[Any]]
"""Called in the task that can be cancelled: what was cancelled before it began leaves nothing behind."""

log = logging.getLogger("bertsmith.serve")


class ModelProcess:
    """The models, and the HTTP processes that ask them."""

    def __init__(self, config: ServerConfig, context: BaseContext, *, processes: int) -> None:
        self._metrics, self._channels = Metrics(), set[HttpChannel]()
        self.models = open_models(config, self._count_batch)
        self._metrics.watch_models(self.models)
        self._ended: Samples = {}  # what was counted in HTTP processes that are no more
        self.load = SharedLoad(context, models=len(self.models), processes=processes)
        self._publish()

    def descriptions(self) -> list[RemoteModelInfo]:
        """What HTTP processes have to know of the models."""
        return [RemoteModelInfo(model.name, model.info, model.tokenizer) for model in self.models]

    def close(self) -> None:
        """Let every model's thread end."""
        for model in self.models:
            model.close()

    # ---- what HTTP processes ask for

    async def predict(self, process: int, content: bytes) -> list[Any]:
        """The results of a request."""
        asked = await in_thread_if(len(content) > LARGE_FRAME, decode_prediction, content)
        CONNECTION.set(None if asked.connection is None else (process, asked.connection))
        model = self.models[asked.model]
        if not model.is_loaded:
            await model.loaded()
            self._publish()
        return await model.queue.predict(asked.key, asked.inputs(), asked.tokens(), admitted=asked.admitted)

    async def check_in_time(self, content: bytes) -> None:
        """Reject a long request whose rest cannot be computed in time."""
        model, wanted, since = json.loads(content)
        await self.models[model].queue.check_in_time(wanted, since=since)

    async def metrics(self, asking: "HttpChannel", content: bytes) -> bytes:
        """The metrics of all processes as text."""
        asking.samples = json.loads(content)
        told = [channel.ask_samples() for channel in self._channels if channel is not asking]
        if told:
            await asyncio.wait(told, timeout=SAMPLES_SECONDS)
        return self._metrics.text([self._ended, *(channel.samples for channel in self._channels)])

    # ---- who is there, and what they see

    def add(self, channel: "HttpChannel") -> None:
        """Take requests of an HTTP process."""
        self._channels.add(channel)

    def remove(self, channel: "HttpChannel") -> None:
        """Forget an HTTP process that has ended, except for what it has counted."""
        self._channels.discard(channel)
        self._ended = add_up([self._ended, counts_of(channel.samples)])
        self.load.forget(channel.process)
        self.publish_soon()

    def publish_soon(self) -> None:
        """Show the load to the HTTP processes, once what came in now has found its place."""
        # In this round of the event loop requests come to their queue, in the next one into a batch.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._publish)

    def _publish(self) -> None:
        for index, model in enumerate(self.models):
            free, retry_seconds = model.queue.free, model.queue.retry_seconds()
            self.load.publish(index, free=free, retry_seconds=retry_seconds, is_loaded=model.is_loaded)

    def _count_batch(self, model: str, report: BatchReport) -> None:
        self._metrics.count_batch(model, report)
        self.publish_soon()


class HttpChannel(Channel):
    """The way to one HTTP process."""

    def __init__(self, models: ModelProcess, process: int) -> None:
        super().__init__()
        self.process = process
        self.is_ready = False
        """Whether it has begun to take requests."""
        self.is_silent = False
        """True if nothing has come from it since this was last set."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has ended."""
        self.samples: Samples = {}
        """Its metrics, as it told them last."""
        self._models = models
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._told: asyncio.Future[None] | None = None
        models.add(self)

    def ask_samples(self) -> asyncio.Future[None]:
        """Done once the HTTP process has told its metrics."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
            self.send(Kind.SAMPLES)
        return self._told

    def data_received(self, data: bytes) -> None:
        """Take the frames that are complete by now."""
        super().data_received(data)
        self.is_silent = False
        self._models.publish_soon()

    def on_frame(self, kind: Kind, number: int, content: bytes) -> None:
        """Take a frame."""
        match kind:
            case Kind.PREDICT:
                self._models.load.count_taken(self.process)
                self._answer(number, self._models.predict, self.process, content)
            case Kind.IN_TIME:
                self._answer(number, self._models.check_in_time, content)
            case Kind.METRICS:
                self._answer(number, self._models.metrics, self, content)
            case Kind.CANCEL:
                if number in self._tasks:  # else it was answered meanwhile
                    self._tasks[number].cancel()
            case Kind.SAMPLES:
                self.samples = json.loads(content)
                self._end_telling()
            case Kind.READY:
                self.is_ready = True
                fields = {"process": self.process, "pid": json.loads(content)}
                log.info("an HTTP process takes requests", extra={"fields": fields})
            case _:
                raise ValueError(f"the model process was sent a frame of kind {kind.name}")

    def on_lost(self) -> None:
        """Drop what nobody waits for any more."""
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
            content = await in_thread_if(is_large(found), encode_results, found)
            kind = Kind.RESULTS
        except Exception as error:
            kind, content = Kind.ERROR, encode_error(error)
        self.send(kind, number, content)
