"""The server behind a port: uvicorn on uvloop (its choice where there is one), which drains at SIGTERM.

uvicorn's HTTP/1.1 protocol gets the limits that it lacks, on the time and size of what is no body: under
uvicorn alone a client that never finishes a request's head, or never reads its last response, holds its
connection, and memory, for as long as it likes. Nothing above the protocol can see such a client: no request
has begun yet, or its response is done. Whatever uvicorn does not document is used in this one file only, and
`tests/unit/serve/test_http_protocol.py` says what of it a new version has changed.
"""

import asyncio
import gc
import re
import resource
import socket
import sys
import time
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bertsmith.core.errors import UserError
from bertsmith.serve.api_errors import ApiError, error_response
from bertsmith.serve.app import Application
from bertsmith.serve.early_rejection import EarlyRejection, header_lines
from bertsmith.serve.middleware import (
    ABORT,
    CLOSE,
    UNKNOWN_ROUTE,
    WITHOUT_HOST,
    new_request_id,
    with_common_headers,
)
from bertsmith.serve.monitoring import LoopFailures, log_failure, log_request
from bertsmith.serve.server_config import Limits

FLUSH_SECONDS = 60.0
"""For a response to be read, once its connection is to be closed."""
MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers, of trailers, and of whatever else httptools would gather without limit."""
MAX_PIPELINED = 64
"""Requests that may wait behind another one of their connection; eight thousand fit into one read."""
LINGER_SECONDS = 1.0
"""After SIGTERM the port stays open for so long: new requests get a 503 rather than a closed connection."""
KEEP_ALIVE_SECONDS = 75
"""Of an idle connection; longer than the minute after which most proxies close theirs."""
POLL_SECONDS = 0.05
SWITCH_SECONDS = 0.0005
"""For which a thread that tokenises keeps the interpreter from the one that answers: Python's 5 ms, taken at
each of the dozen steps of a request, would make a tenth of a second."""
RESERVED_FILES = 64
"""Descriptors that are no connections: the port, the log, weights that are being read."""
BACKLOG = 2048
NO_REQUEST_ID = ""
"""Of a request that has not come to where ids are given."""


# ---- the protocol


def protocol_with(limits: Limits, early_rejection: EarlyRejection) -> type[HttpToolsProtocol]:
    """A protocol with these limits, for all connections of one server."""
    bounds = {
        "early_rejection": early_rejection,
        "head_seconds": limits.head_seconds,
        "max_connections": min(limits.connections, max(1, open_file_limit() - RESERVED_FILES)),
        "idle": {},
    }
    return type("BoundedProtocol", (BoundedProtocol,), bounds)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose heads arrive in time and in bounded size, and whose last response is read in time."""

    early_rejection: ClassVar[EarlyRejection]
    head_seconds: ClassVar[float]
    """For the line and the headers of a request to arrive."""
    max_connections: ClassVar[int]
    idle: ClassVar[dict["BoundedProtocol", None]]
    """Connections without a request, in the order in which they became so."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest, which may still wait behind it."""
    _is_receiving = True
    """Whether (the rest of) a request has to arrive; a connection that sends nothing at all is late, too."""
    _bytes_without_body = 0
    _head_timer: asyncio.TimerHandle | None = None
    _flush_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            # Else there would soon be no descriptor left to accept anybody with. The one that has been idle
            # for longest is missed the least; where all are busy, the new one has to try again.
            oldest = next(iter(self.idle), self)
            self.idle.pop(oldest, None)
            oldest.transport.abort()
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._update_timers()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived; the callbacks below are called from here."""
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self._bytes_without_body > MAX_HEAD_BYTES and self._is_receiving:
            self.send_400_response("the head of the request is too long")
        self._update_timers()

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= MAX_PIPELINED:  # reading pauses, but what was read is parsed in one go
            raise ValueError("too many requests at once")  # to the parser, which stops
        super().on_message_begin()
        self._is_receiving = True

    def on_headers_complete(self) -> None:
        """A request's head is complete: uvicorn answers it now, or queues it behind the one it answers."""
        self._take_host_of_target()
        super().on_headers_complete()
        self._bytes_without_body = 0
        if not self.pipeline and not self.cycle.response_complete:
            self._running = self.cycle

    def _take_host_of_target(self) -> None:
        """Replace the Host header by the host of an absolute URI (RFC 9112, section 3.2.2)."""
        _, is_absolute, rest = self.url.partition(b"://")
        if is_absolute and not self.url.startswith(b"/"):
            named = [index for index, (name, _) in enumerate(self.headers) if name == b"host"]
            if not named and self.parser.get_http_version() in WITHOUT_HOST:
                named, self.headers[:0] = [0], [(b"host", b"")]
            if len(named) == 1:  # else `HostCheck` rejects the request
                self.headers[named[0]] = (b"host", re.split(rb"[/?#]", rest, maxsplit=1)[0])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # Of several requests that wait on one connection, those before the last are not rejected here: the
        # next one would be started from within this call, and so on. Nor is one whose client does not read.
        rejection = None
        if not self.pipeline and not self.flow.write_paused:
            try:
                rejection = self.early_rejection.of(cycle.scope)
            except Exception as failure:  # httptools would take it for a fault of the client's
                log_failure(failure, NO_REQUEST_ID)
        if rejection is None:
            super()._start_asgi_task(cycle, app)
            return
        closing = b"" if cycle.keep_alive else b"connection: close\r\n"
        own = header_lines(self.server_state.default_headers)
        self.transport.write(b"HTTP/1.1 429 Too Many Requests\r\n%b%b%b" % (own, closing, rejection))
        cycle.response_started = cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.idle.pop(self, None)  # it was busy just now
        self.on_response_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a request's body."""
        super().on_body(body)
        self._bytes_without_body = 0

    def on_message_complete(self) -> None:
        """A request has arrived whole; its response may be long done, where it was rejected by its head."""
        super().on_message_complete()
        self._is_receiving, self._bytes_without_body = False, 0
        self._stop_head_timer()  # the next head has its own time, though no response was waited for

    def on_response_complete(self) -> None:
        """A response is written: go on with the next request."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._update_timers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let nothing wait any more."""
        # uvicorn tells only the newest request, not the one that is being answered while it waits.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self.idle.pop(self, None)
        for timer in (self._head_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._update_timers()

    def send_400_response(self, msg: str) -> None:
        """Reject what is no HTTP, in the shape of every other error, and close."""
        if self._running is not None:  # its response may be half written; let it be the last one
            self._running.keep_alive = False
            self.flow.pause_reading()
            return
        if self.cycle is not None and self.cycle.scope is self.scope:  # it has its response
            self.transport.close()
            self._update_timers()
            return
        request_id = new_request_id()
        log_request({"request_id": request_id, "route": UNKNOWN_ROUTE, "status": 400})
        response = error_response(ApiError(400, msg, headers=CLOSE), request_id)
        own = with_common_headers(response.raw_headers, request_id)
        fields = header_lines([*self.server_state.default_headers, *own])
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (fields, bytes(response.body)))
        self.transport.close()
        self._update_timers()

    def shutdown(self) -> None:
        """Close, once the request that is being answered has its response."""
        super().shutdown()
        self._update_timers()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _update_timers(self) -> None:
        if self._running is not None:
            self.idle.pop(self, None)
        elif not self.transport.is_closing():
            self.idle.setdefault(self)
        is_late_possible = self._running is None and self._is_receiving
        if is_late_possible and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)
        elif not is_late_possible:
            self._stop_head_timer()
        is_idle = self._running is None and not self._is_receiving
        if is_idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            # uvicorn set this timer with the response, and the rest of that request's body has stopped it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if self.transport.is_closing() and self._flush_timer is None:
            # Else it would stay for ever, closing, with the response in memory.
            self._flush_timer = self.loop.call_later(FLUSH_SECONDS, self.transport.abort)


# ---- the server


def open_file_limit() -> int:
    """How many descriptors this process may have."""
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if now == resource.RLIM_INFINITY else now


def raise_open_file_limit(wanted: int) -> None:
    """Let this process have so many descriptors, or as many as it may ask for; it begins with 1024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    if now != resource.RLIM_INFINITY and now < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets that listen on one port, between which the system spreads connections."""
    with listen(host, port) as alone:  # where somebody else has the port, the others would just share it
        port = alone.getsockname()[1]
    return [listen(host, port, socket.SO_REUSEPORT) for _ in range(count)]


def listen(host: str, port: int, *options: int) -> socket.socket:
    """A socket that listens on the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's delay off; without it a response waits 40 ms for an ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            listening.setsockopt(socket.SOL_SOCKET, option, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        remedy = "choose another with --host and --port, or stop what is there"
        what = f"cannot listen ({error.strerror or error})"
        raise UserError(what, where=f"{host}:{port}", remedy=remedy) from error
    return listening


def serve(application: Application, listening: socket.socket, *, limits: Limits) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    run_server(make_server(application, limits), listening, limits)


def run_server(server: uvicorn.Server, listening: socket.socket, limits: Limits) -> None:
    """Run a server in this process, which is its own."""
    raise_open_file_limit(limits.connections + RESERVED_FILES)
    prepare_process()
    server.run(sockets=[listening])


def prepare_process(switch_seconds: float = SWITCH_SECONDS) -> None:
    """Make a process that has loaded everything a quick one."""
    # What is loaded by now stays; the garbage collector would otherwise go through it again and again.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(switch_seconds)


def make_server(application: Application, limits: Limits) -> "DrainingServer":
    """A server that is still to be run."""
    return DrainingServer(uvicorn_config(application, limits), application, limits.drain_seconds)


def uvicorn_config(application: Application, limits: Limits) -> uvicorn.Config:
    """How uvicorn runs an application."""
    return uvicorn.Config(
        application,
        http=protocol_with(limits, application.early_rejection),
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )


class DrainingServer(uvicorn.Server):
    """At the first signal it finishes the requests it accepted; at the second it stops at once."""

    def __init__(self, config: uvicorn.Config, application: Application, drain_seconds: float) -> None:
        super().__init__(config)
        self._application, self._drain_seconds = application, drain_seconds
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(LoopFailures())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; called by a signal."""
        del sig, frame  # all that are handled mean the same
        if self._draining is None and self.started:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Finish the requests that were accepted, and end; one that does not listen yet ends at once."""
        if not self.started:
            self.should_exit = True
        elif self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        status = self._application.status
        status.is_draining = True
        begin = time.monotonic()
        await asyncio.sleep(LINGER_SECONDS)
        while status.open_requests and time.monotonic() - begin < self._drain_seconds:
            await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True
