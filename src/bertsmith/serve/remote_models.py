"""The models of a server in an HTTP process: texts are tokenized here and computed elsewhere."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from bertsmith.inference.text_reader import Reader
from bertsmith.serve import channel as frames
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import CONNECTION, BatchKey
from bertsmith.serve.model_registry import ModelInfo
from bertsmith.serve.monitoring import Samples
from bertsmith.serve.operations import OPERATIONS
from bertsmith.serve.shared_load import SharedLoad
from bertsmith.text.tokenizer import Tokenizer

CONNECTION_NUMBERS = 2**63
ALIVE_SECONDS = 5.0
"""Seconds for the model process to show that it runs."""


@dataclass(frozen=True, slots=True)
class RemoteModelInfo:
    """Description of a model for an HTTP process."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer


class ModelChannel(frames.Channel):
    """The connection to the model process."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[tuple[frames.Kind, bytes]]] = {}
        self.on_drain: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.samples: Callable[[], Samples] = dict

    async def ask(self, kind: frames.Kind, content: bytes) -> Any:
        """Return the reply of the model process; if cancelled, cancel the request there, too."""
        if not self.is_open:
            raise _ended()
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self.send(kind, number, content)
        try:
            found, answer = await reply
        except asyncio.CancelledError:
            self.send(frames.Kind.CANCEL, number)
            raise
        finally:
            self._replies.pop(number, None)
        if found is frames.Kind.ERROR:
            raise frames.decode_error(answer)
        return await frames.in_thread_if(len(answer) > frames.LARGE_FRAME, frames.decode_results, answer)

    def tell_samples(self) -> None:
        """Send the metrics of this process, which another process may need for the sum."""
        self.send(frames.Kind.SAMPLES, content=json.dumps(self.samples()).encode())

    def on_frame(self, kind: frames.Kind, number: int, content: bytes) -> None:
        """Handle a received frame."""
        match kind:
            case frames.Kind.RESULTS | frames.Kind.ERROR:
                reply = self._replies.get(number)
                if reply is not None and not reply.done():
                    reply.set_result((kind, content))
            case frames.Kind.SAMPLES:
                self.tell_samples()
            case frames.Kind.DRAIN:
                self.on_drain()
            case _:
                raise ValueError(f"an HTTP process was sent a frame of kind {kind.name}")

    def on_lost(self) -> None:
        """Fail all requests to the model process, which has ended."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_ended())
        self.on_end()


def _ended() -> ApiError:
    return ApiError(503, "the process that computes has ended", headers={"Retry-After": "1"})


class RemoteQueue:
    """The queue of a model in the model process."""

    def __init__(self, channel: ModelChannel, load: SharedLoad, *, model: int, process: int) -> None:
        self._channel, self._load = channel, load
        self._model, self._process = model, process

    @property
    def is_full(self) -> bool:
        """True if a request as long as the average waiting item would be rejected."""
        return self._load.free(self._model) <= 0

    @property
    def is_loaded(self) -> bool:
        """True if the model's weights are in memory."""
        return self._load.is_loaded(self._model)

    def retry_seconds(self) -> int:
        """Return the seconds until there should be room again."""
        return self._load.retry_seconds(self._model)

    async def check_in_time(self, wanted: int, *, since: float) -> None:
        """Reject a request, begun at `since`, if `wanted` more tokens cannot be computed in time."""
        # The monotonic clock is the same in all processes of a machine.
        await self._channel.ask(frames.Kind.IN_TIME, json.dumps([self._model, wanted, since]).encode())

    async def predict(
        self, key: BatchKey, inputs: Sequence[Any], tokens: Sequence[int], *, admitted: bool = False
    ) -> list[Any]:
        """Return the result of each input; cancellation removes inputs that have not begun."""
        texts = inputs[0] if OPERATIONS[key.operation].joint else inputs
        client = CONNECTION.get()
        connection = None if client is None else hash(client) % CONNECTION_NUMBERS
        asked = frames.RemotePrediction(self._model, connection, admitted, key, texts)
        content = await frames.in_thread_if(
            sum(tokens) * frames.TOKEN_BYTES > frames.LARGE_FRAME, frames.encode_prediction, asked
        )
        self._load.count_sent(self._process)
        found: list[Any] = await self._channel.ask(frames.Kind.PREDICT, content)
        return found


class RemoteModel:
    """A model in the model process."""

    def __init__(self, known: RemoteModelInfo, queue: RemoteQueue) -> None:
        self.name, self.info, self.queue = known.name, known.info, queue
        self._reader = Reader(known.tokenizer, known.info.max_tokens)
        if "fill" in known.info.abilities:
            known.tokenizer.prepare_masks()

    @property
    def is_loaded(self) -> bool:
        """True if its weights are in memory."""
        return self.queue.is_loaded

    async def reader(self) -> Reader:
        """Return the reader that tokenizes texts for the model."""
        return self._reader

    def close(self) -> None:
        """Do nothing: the model computes in another process."""


class RemoteModels:
    """All models of a server, in the order they were named."""

    def __init__(self, known: Sequence[RemoteModelInfo], load: SharedLoad, process: int) -> None:
        self.channel = ModelChannel()
        self.models = [
            RemoteModel(each, RemoteQueue(self.channel, load, model=index, process=process))
            for index, each in enumerate(known)
        ]

    async def check_alive(self) -> None:
        """Raise a 503 if the model process does not answer."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await self.models[0].queue.check_in_time(0, since=time.monotonic())
        except TimeoutError:
            raise ApiError(503, "the process that computes does not answer") from None

    async def metrics(self, own: Samples) -> bytes:
        """Return the metrics of all processes as text."""
        text: bytes = await self.channel.ask(frames.Kind.METRICS, json.dumps(own).encode())
        return text
