"""A model process and HTTP processes, all on one event loop, with real sockets between them."""

import asyncio
import multiprocessing
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx

from bertsmith.serve.app import Application
from bertsmith.serve.model_process import HttpChannel, ModelProcess
from bertsmith.serve.remote_models import RemoteModels
from bertsmith.serve.server_config import Limits, ServerConfig


@asynccontextmanager
async def http_sides(folders, count=2, *, limits=None, **more):
    """A model process, and so many clients, each of another HTTP process before it."""
    limits = limits or Limits()
    config = ServerConfig(models=folders, limits=limits, device="cpu", precision="fp32", **more)
    models = ModelProcess(config, multiprocessing.get_context("forkserver"), processes=count)
    loop, clients, applications, channels = asyncio.get_running_loop(), [], [], []
    for number in range(count):
        near, far = socket.socketpair()
        remote = RemoteModels(models.descriptions(), models.load, number)
        applications.append(Application(config, remote))
        remote.channel.samples = applications[-1].metrics.samples
        channels.append(HttpChannel(models, number))
        await loop.create_unix_connection(lambda: channels[-1], sock=near)  # noqa: B023
        await loop.create_unix_connection(lambda: remote.channel, sock=far)  # noqa: B023
        transport = httpx.ASGITransport(applications[-1])
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60))
    sides = SimpleNamespace(
        models={model.name: model for model in models.models},
        load=models.load,
        clients=clients,
        applications=applications,
        channels=channels,
    )
    try:
        yield sides
    finally:
        for channel in channels:
            channel.close()
        for client in clients:
            await client.aclose()
        models.close()
