"""Frames between the HTTP processes of a server and its model process, over a pair of sockets.

A frame is its length, kind, number and content. HTTP processes send only JSON and rows of 32-bit integers, so
that a process that faces the network cannot make the model process run anything. Results have many types and
are pickled: only HTTP processes read them, and only from the model process.

Nothing here waits for the other side to read. Buffers are bounded elsewhere: by the number of requests that
an HTTP process may have open, and by the one reply that each of them gets.
"""

import asyncio
import copyreg
import io
import json
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from struct import Struct
from typing import Any, TypeVar, cast

import numpy as np
import torch

from bertsmith.core.errors import UserError
from bertsmith.inference.text_reader import TextOrPair, TokenizedText
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import BatchKey
from bertsmith.serve.monitoring import RemoteFailure, failure_fields
from bertsmith.serve.operations import OPERATIONS
from bertsmith.text.tokenizer import Encoded

Given = TypeVar("Given")
Found = TypeVar("Found")

HEAD = Struct("=IBQ")
"""Header of a frame: number of bytes that follow, kind and number."""
SIZE = Struct("=I")
ROWS = 6
"""Integers per token: id, segment, both offsets, sequence and word."""
TOKEN_BYTES = 4 * ROWS
NO_WORD = -1
LARGE_FRAME = 2**18
"""Bytes of a frame above which it is written and read in a thread; about 10,000 tokens."""


class Kind(IntEnum):
    """Kinds of frames."""

    READY = 1  # an HTTP process accepts requests; contains its process id
    DRAIN = 2  # finish the open requests, then end
    PREDICT = 3  # a request, or a part of one, for a model
    IN_TIME = 4  # check that the rest of a long request can be computed in time
    CANCEL = 5  # the client no longer waits for this request
    METRICS = 6  # asks for the sum of all metrics; contains the sender's
    SAMPLES = 7  # asks an HTTP process for its metrics, or contains them
    RESULTS = 8  # the reply to a request
    ERROR = 9  # the error of a request


class Channel(asyncio.Protocol):
    """One end of the socket between two processes."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    @property
    def is_open(self) -> bool:
        """True while the other process is connected."""
        return self._transport is not None

    def send(self, kind: Kind, number: int = 0, content: bytes = b"") -> None:
        """Send a frame; do nothing if the other process has ended."""
        if self._transport is not None:
            self._transport.write(HEAD.pack(len(content), kind, number) + content)

    def close(self) -> None:
        """Drop the connection, so that the other process sees the end."""
        if self._transport is not None:
            self._transport.abort()

    def on_frame(self, kind: Kind, number: int, content: bytes) -> None:
        """Handle a received frame."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """Handle the end of the other process."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to send with."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are complete by now."""
        self._buffer += data
        begin, size = 0, len(self._buffer)
        while size - begin >= HEAD.size:
            length, kind, number = HEAD.unpack_from(self._buffer, begin)
            end = begin + HEAD.size + length
            if end > size:
                break
            self.on_frame(Kind(kind), number, bytes(self._buffer[begin + HEAD.size : end]))
            begin = end
        del self._buffer[:begin]

    def connection_lost(self, _: Exception | None) -> None:
        """Handle the end of the connection."""
        self._transport = None
        self.on_lost()


# ---- requests


@dataclass(frozen=True, slots=True)
class RemotePrediction:
    """A prediction request from an HTTP process to the model process."""

    model: int
    """Index of the model in the server's list."""
    connection: int | None
    """Number of the client's connection in its HTTP process, if known, for fairness between connections."""
    admitted: bool
    """True for the rest of a request that was already admitted."""
    key: BatchKey
    texts: Sequence[TokenizedText]

    def inputs(self) -> Sequence[Any]:
        """Return the inputs for the queue: each text, or all of them as one input."""
        return [self.texts] if OPERATIONS[self.key.operation].joint else self.texts

    def tokens(self) -> list[int]:
        """Return the number of tokens of each input."""
        lengths = [len(text) for text in self.texts]
        return [sum(lengths)] if OPERATIONS[self.key.operation].joint else lengths


def encode_prediction(asked: RemotePrediction) -> bytes:
    """Return a request as bytes."""
    texts, key = asked.texts, asked.key
    lengths = [len(text) for text in texts]
    strings: dict[str, int] = {}  # each once: a long text may be in pairs with many others
    parts = [(each.text,) if isinstance(each.text, str) else each.text for each in texts]
    numbers = [[strings.setdefault(part, len(strings)) for part in several] for several in parts]
    fields = [asked.model, asked.connection, asked.admitted, key.operation, key.options]
    head = json.dumps([*fields, list(strings), numbers, lengths]).encode()
    rows = array("i")
    for text in texts:
        encoded = text.encoded
        rows.extend(encoded.ids)
        rows.extend(encoded.segments)
        rows.extend(chain.from_iterable(encoded.offsets))
        rows.extend(encoded.sequence)
        rows.extend([NO_WORD if word is None else word for word in encoded.words])
    return SIZE.pack(len(head)) + head + rows.tobytes()


def decode_prediction(content: bytes) -> RemotePrediction:
    """Return the request that `content` encodes."""
    (size,) = SIZE.unpack_from(content)
    begin = SIZE.size + size
    *fields, strings, numbers, lengths = json.loads(content[SIZE.size : begin])
    model, connection, admitted, operation, options = fields
    rows = array("i", content[begin:]).tolist()
    read, at = [], 0
    for parts, length in zip(numbers, lengths, strict=True):
        text: TextOrPair = strings[parts[0]] if len(parts) == 1 else (strings[parts[0]], strings[parts[1]])
        read.append(TokenizedText(text, _encoded(rows[at : at + ROWS * length], length)))
        at += ROWS * length
    return RemotePrediction(model, connection, admitted, BatchKey(operation, tuple(options)), read)


def _encoded(rows: list[int], length: int) -> Encoded:
    ids, segments, starts, ends, sequence, words = (
        rows[:length],
        rows[length : 2 * length],
        rows[2 * length : 4 * length : 2],
        rows[2 * length + 1 : 4 * length : 2],
        rows[4 * length : 5 * length],
        rows[5 * length :],
    )
    numbered = [None if word == NO_WORD else word for word in words]
    return Encoded(ids, segments, list(zip(starts, ends, strict=True)), sequence, numbered)


# ---- replies


async def in_thread_if(is_large: bool, work: Callable[[Given], Found], given: Given) -> Found:
    """Return the result of some work, done in a thread if it would hold up the event loop."""
    return await asyncio.to_thread(work, given) if is_large else work(given)


def _as_array(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any]]:
    return np.asarray, (tensor.detach().numpy(),)


class ResultPickler(pickle.Pickler):
    """Pickles tensors as arrays, which takes a tenth of the time and only the bytes that they show."""

    dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _as_array}


def encode_results(results: Any) -> bytes:
    """Return results as bytes."""
    written = io.BytesIO()
    ResultPickler(written, pickle.HIGHEST_PROTOCOL).dump(results)
    return written.getvalue()


def decode_results(content: bytes) -> Any:
    """Return the results that the model process encoded."""
    return pickle.loads(content)


def encode_error(error: Exception) -> bytes:
    """Return the error of a request as bytes."""
    told: dict[str, Any]
    match error:
        case ApiError():
            told = {"api": [error.status, error.message, error.error_type, error.headers]}
        case UserError():
            names = ("what", "where", "field", "index", "remedy")
            told = {"user": {name: getattr(error, name) for name in names}}
        case _:
            told = {"failure": failure_fields(error)}
    return json.dumps(told).encode()


def decode_error(content: bytes) -> Exception:
    """Return the error that `content` encodes."""
    ((kind, told),) = json.loads(content).items()
    match kind:
        case "api":
            status, message, error_type, headers = told
            return ApiError(status, message, error_type=error_type, headers=headers)
        case "user":
            return UserError(**told)
    return RemoteFailure(told)
