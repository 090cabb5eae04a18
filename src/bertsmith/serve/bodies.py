"""Bodies of requests, read whole before anything else happens: never too long, too slowly, or too many."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.types import Message, Receive

from bertsmith.serve.refusals import Refusal
from bertsmith.serve.settings import Limits

MOST_DISCARDED = 64 * 2**20
"""So much of a body that is too long is still taken in: many clients read no reply before all is sent."""
MOST_HELD = 256 * 2**20
"""So many bytes of unanswered requests are in memory at a time: usual ones are a few thousand each."""

CLOSE = {"Connection": "close"}


class Gone(Exception):
    """Whoever asked has hung up."""


class NoRoom(Exception):
    """The bodies of others take all the memory there is for them."""


class Bodies:
    """The bodies of all requests that are not answered yet, those that are still arriving among them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._most = max(MOST_HELD, limits.body_bytes)
        self.held = 0
        """Bytes in memory."""

    @asynccontextmanager
    async def reading(self, receive: Receive, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body, if it is no longer than allowed, there in time, and there is room for it."""
        announced = headers.get("content-length", "")
        if announced.isdecimal() and _is_hopeless(int(announced), headers, self._limits):
            raise _too_large(self._limits)
        parts: list[bytes] = []
        try:
            yield await self._in_time(receive, parts)
        finally:
            self._let_go(parts)

    async def _in_time(self, receive: Receive, parts: list[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._whole(receive, parts)
        except TimeoutError:
            message = f"the body took longer than {self._limits.body_seconds:g} s"
            raise Refusal(408, message, headers=CLOSE) from None

    async def _whole(self, receive: Receive, parts: list[bytes]) -> bytes:
        size, more, has_room = 0, True, True
        while more and size <= max(MOST_DISCARDED, self._limits.body_bytes):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            has_room = has_room and self.held + len(part) <= self._most
            if has_room and size <= self._limits.body_bytes:
                parts.append(part)
                self.held += len(part)
            else:  # it is still taken in, for the reply to be read, but not kept
                self._let_go(parts)
        if size > self._limits.body_bytes:
            raise _too_large(self._limits)
        if not has_room:
            raise NoRoom
        parts[:] = [b"".join(parts)]  # once in memory, not twice
        return parts[0]

    def _let_go(self, parts: list[bytes]) -> None:
        self.held -= sum(map(len, parts))
        parts.clear()


def whole_body(body: bytes) -> Receive:
    """A body that has been read, for those who come after."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    return receive


def _is_hopeless(announced: int, headers: Mapping[str, str], limits: Limits) -> bool:
    """Whether a body is too long, and its sender either waits for our word or has far too much to send."""
    return announced > limits.body_bytes and ("expect" in headers or announced > MOST_DISCARDED)


def _too_large(limits: Limits) -> Refusal:
    message = f"the body is too large; this server takes {limits.body_bytes} bytes"
    return Refusal(413, message, headers=CLOSE)
