"""Requests of the plainest form, whole in one piece, as most programs and proxies send them.

They are read and answered without HTTP's state machine, which costs more than all else around a request.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, RequestResponseCycle

# Stricter than RFC 9112: whatever is not of the plainest form goes the long way, where all of it is checked.
HEAD = re.compile(
    rb"POST (/[!-$&-~]*) HTTP/1\.1\r\n((?:[!#-'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n)+)\r\n"
)
FIELD = re.compile(rb"([^:]+):[ \t]*([^\r]*)\r\n")
UNUSUAL = {b"transfer-encoding", b"expect", b"upgrade", b"origin"}
"""Fields that change where a request ends, or what its reply must hold."""

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Plain:
    """A request of the plainest form, whole, with nothing before or behind it."""

    raw_path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    """Names in lower case, each once."""
    body: bytes = field(repr=False)

    @property
    def path(self) -> str:
        """What is asked for; nothing in it is encoded."""
        return self.raw_path.decode("ascii")

    @property
    def given_id(self) -> str:
        """The id that the request brought."""
        return self.headers.get(b"x-request-id", b"").decode("latin-1")

    def scope(self) -> dict[str, Any]:
        """What an app is told of it, beside what holds for the whole line."""
        return {
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "headers": list(self.headers.items()),
        }


def plain_request(data: bytes) -> Plain | None:
    """What these bytes ask, if they are one whole request without anything unusual."""
    found = HEAD.match(data)
    if found is None:
        return None
    fields = FIELD.findall(found[2])
    named: dict[bytes, bytes] = {name.lower(): value.rstrip(b" \t") for name, value in fields}
    is_whole = named.get(b"content-length") == b"%d" % (len(data) - found.end())
    stays = named.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    is_usual = len(named) == len(fields) and b"host" in named and not named.keys() & UNUSUAL
    if not (is_whole and stays and is_usual):
        return None
    path, _, query = found[1].partition(b"?")
    return Plain(path, query, named, data[found.end() :])


class PlainCycle(RequestResponseCycle):
    """A plain request at work; its reply, which always tells its length, is written in one piece."""

    def begin(self, body: bytes) -> None:
        """Have the body ready for whoever asks for it."""
        self.body, self.more_body = bytearray(body), False
        self.message_event.set()
        self._headers: RawHeaders = []
        self._reply: list[bytes] = []

    async def send(self, message: Any) -> None:
        """Keep a part of the reply; the last one lets all of it go."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            self._headers = [*self.default_headers, *message["headers"]]
            self._reply = [reply_head(message["status"], self._headers)]
            return
        self._reply.append(message.get("body", b""))
        if not message.get("more_body", False):
            self._let_go()

    def _let_go(self) -> None:
        self.transport.write(b"".join(self._reply))
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive or CLOSE_HEADER in self._headers:
            self.transport.close()
        self.on_response()


def reply_head(status: int, headers: RawHeaders) -> bytes:
    """The head of a reply, with the empty line behind it."""
    fields = b"".join([b"%b: %b\r\n" % field for field in headers])
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, STATUS_PHRASES[status], fields)
