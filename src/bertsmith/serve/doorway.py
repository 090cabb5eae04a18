"""Requests that are sent away by their bytes alone: while all is full, a refusal must cost next to nothing.

Parsing a request, waking a task for it and writing a reply through a state machine costs about as much as
a small request that is answered. What is spent on the refused is missing for the accepted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from starlette.datastructures import MutableHeaders

from bertsmith.serve.gate import Ending, Gate, add_common_headers, request_id_of
from bertsmith.serve.refusals import crowded, error_reply

RawHeaders = Iterable[tuple[bytes, bytes]]

# Stricter than RFC 9112: whatever is not of the plainest form goes the long way, where all of it is checked.
HEAD = re.compile(
    rb"POST (/[!-$&-~]*) HTTP/1\.1\r\n((?:[!#-'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+)\r\n"
)
FIELD = re.compile(rb"([^:]+):[ \t]*([^\r]*)\r\n")
UNUSUAL = {b"transfer-encoding", b"expect", b"upgrade", b"origin"}
"""Fields that change where a request ends, or what its reply must hold."""
STATUS = 429
STATUS_LINE = b"HTTP/1.1 429 Too Many Requests\r\n"
BLANK = "~"
"""Stands for each letter of an id in a reply's form; nothing else in it is one."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A request of the plainest form, whole, with nothing before or behind it."""

    path: str
    given_id: str


class Doorway:
    """Sends requests away while a gate would send away every one."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def turn_away(self, data: bytes, headers: RawHeaders) -> bytes | None:
        """The reply, with these headers too; nothing where the request has to be looked at."""
        if not self._gate.is_crowded or self._gate.is_draining:
            return None
        asked = plain_request(data)
        if asked is None:
            return None
        request_id = request_id_of(asked.given_id)
        self._gate.record(Ending(request_id, "POST", self._gate.route_of(asked.path), STATUS, seconds=0.0))
        own = b"".join(b"%b: %b\r\n" % field for field in headers)
        form = reply_form(self._gate.retry_seconds(), len(request_id))
        return STATUS_LINE + own + form.replace(BLANK.encode() * len(request_id), request_id.encode())


def plain_request(data: bytes) -> Plain | None:
    """What these bytes ask, if they are one whole request without anything unusual."""
    found = HEAD.match(data)
    if found is None:
        return None
    fields = FIELD.findall(found[2])
    named: dict[bytes, bytes] = {name.lower(): value.rstrip() for name, value in fields}
    is_whole = named.get(b"content-length") == b"%d" % (len(data) - found.end())
    stays = named.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    is_usual = len(named) == len(fields) and b"host" in named and not named.keys() & UNUSUAL
    if not (is_whole and stays and is_usual):
        return None
    return Plain(
        found[1].partition(b"?")[0].decode("ascii"), named.get(b"x-request-id", b"").decode("latin-1")
    )


@cache
def reply_form(seconds: int, id_length: int) -> bytes:
    """The refusal behind its status line, the same as the gate's, with blanks for the id."""
    request_id = BLANK * id_length
    reply = error_reply(crowded(seconds), request_id)
    add_common_headers(MutableHeaders(raw=reply.raw_headers), request_id)
    head = b"".join(b"%b: %b\r\n" % field for field in reply.raw_headers)
    return head + b"\r\n" + bytes(reply.body)
