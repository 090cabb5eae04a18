"""An HTTP process of a server: it reads, checks and tokenizes requests, and asks the model process.

Only the model process handles signals. A terminal sends Ctrl-C and a service manager SIGTERM to every process
of a server, and all of them must drain together. So an HTTP process obeys its channel alone: it drains on
request, and ends when the model process has ended.
"""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import uvicorn

from bertsmith.serve.app import Application
from bertsmith.serve.channel import Kind
from bertsmith.serve.monitoring import write_json_lines
from bertsmith.serve.remote_models import RemoteModelInfo, RemoteModels
from bertsmith.serve.server import DrainingServer, run_server, uvicorn_config
from bertsmith.serve.server_config import ServerConfig
from bertsmith.serve.shared_load import SharedLoad

SAMPLES_SECONDS = 2.0
"""Seconds between two reports of metrics, which also show that the process runs (`process_server`).
Requests since the last report are not counted if the process crashes."""

log = logging.getLogger("bertsmith.serve")


@dataclass(frozen=True, slots=True)
class HttpProcessConfig:
    """Start arguments of an HTTP process."""

    process: int
    """Number of the process."""
    server: ServerConfig
    """Configuration of the server, with the limits of one process."""
    models: Sequence[RemoteModelInfo]
    load: SharedLoad
    channel: socket.socket
    """Socket to the model process."""
    listening: socket.socket


def run_http_process(config: HttpProcessConfig) -> None:
    """Answer requests until the model process asks to drain, or has ended."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    write_json_lines()
    remote = RemoteModels(config.models, config.load, config.process)
    application = Application(config.server, remote)
    server = HttpServer(uvicorn_config(application, config.server.limits), application, config)
    run_server(server, config.listening, config.server.limits)


class HttpServer(DrainingServer):
    """A server that the model process controls."""

    def __init__(self, config: uvicorn.Config, application: Application, own: HttpProcessConfig) -> None:
        super().__init__(config, application, own.server.limits.drain_seconds)
        assert application.remote is not None
        self._channel, self._socket = application.remote.channel, own.channel
        self._channel.on_drain, self._channel.on_end = self.drain, self._end
        self._channel.samples = application.metrics.samples

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the model process, then begin to listen."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._channel, sock=self._socket)
        await super().startup(sockets)
        self._channel.send(Kind.READY, content=json.dumps(os.getpid()).encode())
        self._tell_samples()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ignore a signal, which the model process handles."""
        del sig, frame

    def _tell_samples(self) -> None:
        self._channel.tell_samples()
        asyncio.get_running_loop().call_later(SAMPLES_SECONDS, self._tell_samples)

    def _end(self) -> None:
        if not self.should_exit:
            log.error("the model process has ended")
        self.should_exit = True
