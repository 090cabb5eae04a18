"""The body of a request, read whole before anything else happens: never too long, never too slowly."""

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Receive

from bertsmith.serve.refusals import Refusal
from bertsmith.serve.settings import Limits

MOST_DISCARDED = 64 * 2**20
"""So much of a body that is too long is still taken in: many clients read no reply before all is sent."""

CLOSE = {"Connection": "close"}


class Gone(Exception):
    """Whoever asked has hung up."""


async def read_body(receive: Receive, headers: Mapping[str, str], *, limits: Limits) -> bytes:
    """The body, if it is no longer than allowed and there in time."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and _is_hopeless(int(announced), headers, limits):
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _whole(receive, limits)
    except TimeoutError:
        message = f"the body took longer than {limits.body_seconds:g} s"
        raise Refusal(408, message, headers=CLOSE) from None


def whole_body(body: bytes) -> Receive:
    """A body that has been read, for those who come after."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    return receive


def _is_hopeless(announced: int, headers: Mapping[str, str], limits: Limits) -> bool:
    """Whether a body is too long, and its sender either waits for our word or has far too much to send."""
    return announced > limits.body_bytes and ("expect" in headers or announced > MOST_DISCARDED)


async def _whole(receive: Receive, limits: Limits) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        size += len(message.get("body", b""))
        if size > MOST_DISCARDED:
            break
        if size <= limits.body_bytes:
            parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    if size > limits.body_bytes:
        raise _too_large(limits)
    return b"".join(parts)


def _too_large(limits: Limits) -> Refusal:
    message = f"the body is too large; this server takes {limits.body_bytes} bytes"
    return Refusal(413, message, headers=CLOSE)
