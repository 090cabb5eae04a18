"""The server on a port: uvicorn on uvloop (its choice if installed), which drains at SIGTERM.

uvicorn's HTTP/1.1 protocol gets the limits that it lacks, on the time and size of everything but bodies. In
uvicorn alone, a client may hold its connection and memory for ever: it never finishes a request's head, or
never reads its last response. No layer above the protocol can see such a client: its request has not begun
yet, or its response is done. Only this file uses undocumented parts of uvicorn, and
`tests/unit/serve/test_http_protocol.py` shows which of them a new version has changed.
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
from bertsmith.serve import middleware
from bertsmith.serve.api_errors import ApiError, error_response
from bertsmith.serve.app import Application
from bertsmith.serve.early_rejection import EarlyRejection, header_lines
from bertsmith.serve.monitoring import LoopFailures, log_failure, log_request
from bertsmith.serve.server_config import Limits

FLUSH_SECONDS = 60.0
"""Seconds for the client to read a response before its connection is closed."""
MAX_HEAD_BYTES = 2**16
"""Maximum bytes of a request's head, of trailers, and of anything else that httptools would buffer."""
MAX_PIPELINED = 64
"""Maximum requests that wait behind another one of their connection; eight thousand fit into one read."""
LINGER_SECONDS = 1.0
"""Seconds that the port stays open after SIGTERM: new requests get a 503, not a closed connection."""
KEEP_ALIVE_SECONDS = 75
"""Seconds until an idle connection is closed; more than the minute after which most proxies close theirs."""
POLL_SECONDS = 0.05
SWITCH_SECONDS = 0.0005
"""Seconds that a tokenizing thread may keep the GIL from the event loop.

Python's 5 ms, at each of the dozen steps of a request, would add up to a tenth of a second.
"""
RESERVED_FILES = 64
"""Descriptors for everything but connections: the port, the log, weights that are being read."""
BACKLOG = 2048
NO_REQUEST_ID = ""
"""Log id of a request that does not have an id yet."""


# ---- the protocol


def protocol_with(limits: Limits, early_rejection: EarlyRejection) -> type[HttpToolsProtocol]:
    """Return a protocol with these limits, for all connections of one server."""
    bounds = {
        "early_rejection": early_rejection,
        "head_seconds": limits.head_seconds,
        "max_connections": min(limits.connections, max(1, open_file_limit() - RESERVED_FILES)),
        "idle": {},
    }
    return type("BoundedProtocol", (BoundedProtocol,), bounds)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on the time and size of heads, and on the time to read the last response."""

    early_rejection: ClassVar[EarlyRejection]
    head_seconds: ClassVar[float]
    """Seconds for a request's line and headers to arrive."""
    max_connections: ClassVar[int]
    idle: ClassVar[dict["BoundedProtocol", None]]
    """Connections without a request, the longest idle first."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest, which may still wait behind it."""
    _is_receiving = True
    """True while (the rest of) a request is due; a client that sends nothing at all is late, too."""
    _bytes_without_body = 0
    _head_timer: asyncio.TimerHandle | None = None
    _flush_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request; if there are too many connections, close the longest idle one."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            # Otherwise new connections would not get a descriptor. Drop the one that has been idle for
            # longest; if all are busy, drop the new one, and its client has to try again.
            oldest = next(iter(self.idle), self)
            self.idle.pop(oldest, None)
            oldest.transport.abort()
        self.app_state = {**self.app_state, middleware.ABORT: transport.abort}
        self._update_timers()

    def data_received(self, data: bytes) -> None:
        """Parse the data that has arrived, which calls the callbacks below."""
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self._bytes_without_body > MAX_HEAD_BYTES and self._is_receiving:
            self.send_400_response("the head of the request is too long")
        self._update_timers()

    def on_message_begin(self) -> None:
        """Begin to receive a request."""
        if len(self.pipeline) >= MAX_PIPELINED:  # reading pauses, but what was read is parsed in one go
            raise ValueError("too many requests at once")  # to the parser, which stops
        super().on_message_begin()
        self._is_receiving = True

    def on_headers_complete(self) -> None:
        """Answer a request, or queue it behind the current one: its head is complete."""
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
            if not named and self.parser.get_http_version() in middleware.WITHOUT_HOST:
                named, self.headers[:0] = [0], [(b"host", b"")]
            if len(named) == 1:  # else `HostCheck` rejects the request
                self.headers[named[0]] = (b"host", re.split(rb"[/?#]", rest, maxsplit=1)[0])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # If several requests wait on one connection, only the last may be rejected here: rejecting one starts
        # the next within this call, and so on. Nor may one be if its client does not read.
        rejection = None
        if not self.pipeline and not self.flow.write_paused:
            try:
                rejection = self.early_rejection.of(cycle.scope)
            except Exception as failure:  # httptools would report it as an error of the client
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
        """Receive a part of a request's body."""
        super().on_body(body)
        self._bytes_without_body = 0

    def on_message_complete(self) -> None:
        """Finish receiving a request; its response may be long done, if it was rejected by its head."""
        super().on_message_complete()
        self._is_receiving, self._bytes_without_body = False, 0
        self._stop_head_timer()  # the next head gets its full time, even if it arrives before this response

    def on_response_complete(self) -> None:
        """Continue with the next request: a response is written."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._update_timers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel everything that still waits for the client."""
        # uvicorn notifies only the newest request, not the current one before it.
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
        """Reject invalid HTTP with an ordinary error response, and close the connection."""
        if self._running is not None:  # its response may be half written; make it the last one
            self._running.keep_alive = False
            self.flow.pause_reading()
            return
        if self.cycle is not None and self.cycle.scope is self.scope:  # its response is already written
            self.transport.close()
            self._update_timers()
            return
        request_id = middleware.new_request_id()
        log_request({"request_id": request_id, "route": middleware.UNKNOWN_ROUTE, "status": 400})
        response = error_response(ApiError(400, msg, headers=middleware.CLOSE), request_id)
        own = middleware.with_common_headers(response.raw_headers, request_id)
        fields = header_lines([*self.server_state.default_headers, *own])
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (fields, bytes(response.body)))
        self.transport.close()
        self._update_timers()

    def shutdown(self) -> None:
        """Close the connection after the response to the current request."""
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
            # Otherwise it would remain closing for ever, with the response in memory.
            self._flush_timer = self.loop.call_later(FLUSH_SECONDS, self.transport.abort)


# ---- the server


def open_file_limit() -> int:
    """Return the maximum number of file descriptors of this process."""
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if now == resource.RLIM_INFINITY else now


def raise_open_file_limit(wanted: int) -> None:
    """Raise the limit of file descriptors to `wanted`, or as far as allowed; it begins at 1024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    if now != resource.RLIM_INFINITY and now < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets that listen on one port, between which the kernel spreads connections."""
    with listen(host, port) as alone:  # if another program has the port, the sockets would just share it
        port = alone.getsockname()[1]
    return [listen(host, port, socket.SO_REUSEPORT) for _ in range(count)]


def listen(host: str, port: int, *options: int) -> socket.socket:
    """Return a socket that listens on the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's delay off; otherwise a response waits 40 ms for an ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            listening.setsockopt(socket.SOL_SOCKET, option, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        remedy = "choose another with --host and --port, or stop the program that uses it"
        what = f"cannot listen ({error.strerror or error})"
        raise UserError(what, where=f"{host}:{port}", remedy=remedy) from error
    return listening


def serve(application: Application, listening: socket.socket, *, limits: Limits) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    run_server(make_server(application, limits), listening, limits)


def run_server(server: uvicorn.Server, listening: socket.socket, limits: Limits) -> None:
    """Run a server in this process, which does nothing else."""
    raise_open_file_limit(limits.connections + RESERVED_FILES)
    prepare_process()
    server.run(sockets=[listening])


def prepare_process(switch_seconds: float = SWITCH_SECONDS) -> None:
    """Speed up a process that has loaded everything."""
    # Loaded objects remain: do not let the garbage collector scan them again and again.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(switch_seconds)


def make_server(application: Application, limits: Limits) -> "DrainingServer":
    """Return a server that is ready to run."""
    return DrainingServer(uvicorn_config(application, limits), application, limits.drain_seconds)


def uvicorn_config(application: Application, limits: Limits) -> uvicorn.Config:
    """Return uvicorn's configuration for an application."""
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
    """Finishes the accepted requests at the first signal; stops at once at the second."""

    def __init__(self, config: uvicorn.Config, application: Application, drain_seconds: float) -> None:
        super().__init__(config)
        self._application, self._drain_seconds = application, drain_seconds
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(LoopFailures())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, as a signal asks; stop at once at the second."""
        del sig, frame  # all handled signals mean the same
        if self._draining is None and self.started:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Finish the accepted requests, then end; end at once if not listening yet."""
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
