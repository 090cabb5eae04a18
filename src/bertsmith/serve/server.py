"""The server behind a port: uvicorn on uvloop (its choice where there is one), which drains at SIGTERM."""

import asyncio
import gc
import socket
import time
from types import FrameType

import uvicorn

from bertsmith.core.errors import UserError
from bertsmith.serve.app import Application
from bertsmith.serve.http_protocol import FLUSH_SECONDS, protocol_with
from bertsmith.serve.server_config import Limits

LINGER_SECONDS = 1.0
"""After SIGTERM the port stays open for so long: new requests get a 503 rather than a closed connection."""
KEEP_ALIVE_SECONDS = 75
"""Of an idle connection; longer than the minute after which most proxies close theirs."""
POLL_SECONDS = 0.05
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's delay off; without it a response waits 40 ms for an ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    # What is loaded by now stays; the garbage collector would otherwise go through it again and again.
    gc.collect()
    gc.freeze()
    make_server(application, limits).run(sockets=[listening])


def make_server(application: Application, limits: Limits) -> "DrainingServer":
    """A server that is still to be run."""
    config = uvicorn.Config(
        application,
        http=protocol_with(limits.head_seconds),
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )
    return DrainingServer(config, application, limits.drain_seconds)


class DrainingServer(uvicorn.Server):
    """At the first signal it finishes the requests it accepted; at the second it stops at once."""

    def __init__(self, config: uvicorn.Config, application: Application, drain_seconds: float) -> None:
        super().__init__(config)
        self._application, self._drain_seconds = application, drain_seconds
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; called by a signal."""
        del sig, frame  # all that are handled mean the same
        if self._draining is None and self.started:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        status = self._application.status
        status.is_draining = True
        begin = time.monotonic()
        await asyncio.sleep(LINGER_SECONDS)
        while status.open_requests and time.monotonic() - begin < self._drain_seconds:
            await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True
