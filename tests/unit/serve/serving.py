"""Servers to test: tiny models of every kind, in this process or behind a real port."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from uvicorn.server import ServerState

from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from bertsmith.recipe.finetuning_schema import AnswersSection, TextSection
from bertsmith.serve.app import Application
from bertsmith.serve.server import listen, make_server
from bertsmith.serve.server_config import Limits, ServerConfig
from bertsmith.tasks.task_config import TaskConfig, write_task_config
from tests.tiny import tiny_encoder_config
from tests.toy_folder import toy_vocabulary, write_toy_folder

Found = TypeVar("Found")
TAGS = ("O", "B-PER", "I-PER", "B-LOC")


def write_folders(place: Path) -> dict[str, Path]:
    """A folder of each kind of model, with lively heads that nobody trained."""
    write_toy_folder(place / "toy")
    text = TextSection(longest=64, step=32, longest_question=16)
    pairs = TaskConfig(task="stsb", kind="regress", metrics=(), pairs=True, text=text)
    answers = AnswersSection(null_threshold=0.0)
    choice = TaskConfig(task="swag", kind="choice", metrics=(), text=text)
    span = TaskConfig(task="squad2", kind="span", metrics=(), text=text, answers=answers)
    return {
        "toy": place / "toy",
        "mood": _write(place / "mood", {"classify": 2}, labels=("cold", "warm")),
        "topics": _write(
            place / "topics",
            {"classify": 3},
            labels=("a", "b", "c"),
            problem_type="multi_label_classification",
        ),
        "alike": _write(place / "alike", {"classify": 1}, note=pairs),
        "names": _write(place / "names", {"tag": 4}, labels=TAGS),
        "reader": _write(place / "reader", {"span": 2}, note=span),
        "chooser": _write(place / "chooser", {"choice": 1}, note=choice),
    }


def _write(
    folder: Path,
    heads: dict[str, int],
    *,
    labels: tuple[str, ...] = (),
    note: TaskConfig | None = None,
    **extras: Any,
) -> Path:
    config = tiny_encoder_config(vocabulary=len(toy_vocabulary()), positions=64)
    network = new_network(config, {"pooler": 0, **heads}, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in network.heads.parameters():
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(parameter)))
    write_toy_folder(folder)
    named = {"id2label": {str(number): label for number, label in enumerate(labels)}} if labels else {}
    write_model(folder, Model(network, {**named, **extras}))
    if note:
        write_task_config(folder / "task.json", note)
    return folder


def application_of(folders: dict[str, Path], *, limits: Limits | None = None, **more: Any) -> Application:
    """A server over these folders."""
    # Not auto: a CPU with bf16 would round more than the tests allow.
    return Application(
        ServerConfig(models=folders, limits=limits or Limits(), device="cpu", precision="fp32", **more)
    )


def talk(application: Application, say: Callable[[httpx.AsyncClient], Awaitable[Found]]) -> Found:
    """What comes of talking to an application in this process."""

    async def main() -> Found:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            return await say(client)

    return asyncio.run(main())


def post(application: Application, path: str, body: Any, **options: Any) -> httpx.Response:
    """The reply to one request."""
    content = json.dumps(body).encode()  # not httpx' own way, which cannot spell half characters
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return talk(application, lambda client: client.post(path, content=content, headers=headers, **options))


def get(application: Application, path: str, **options: Any) -> httpx.Response:
    """The reply to one request."""
    return talk(application, lambda client: client.get(path, **options))


def error_of(reply: httpx.Response) -> str:
    """The one line of a failure, once its form was looked at."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "request_id"}
    assert error["request_id"] == reply.headers["x-request-id"]
    assert "\n" not in error["message"]
    assert "Traceback" not in reply.text
    return str(error["message"])


class Slowly:
    """In place of a queue's model: waits until it is let go, and counts."""

    def __init__(self, application: Application, model: str) -> None:
        self._queue = application.models[model].queue
        self._predict = self._queue._predict
        self.may_go = threading.Event()
        self.batches: list[int] = []
        self._queue._predict = self

    def __call__(self, key: Any, inputs: Any) -> list[Any]:
        self.batches.append(len(inputs))
        assert self.may_go.wait(30)
        return self._predict(key, inputs)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something to come true."""
    for _ in range(12_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def wait_for(holds: Callable[[], bool]) -> None:
    """The same, where no event loop is at work."""
    for _ in range(12_000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def connected(address: str) -> socket.socket:
    """A line to a server, without any client's ways."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@contextmanager
def live(application: Application, limits: Limits | None = None) -> Iterator[str]:
    """The address of an application behind a real port."""
    with listen("127.0.0.1", 0) as listening:
        server = make_server(application, limits or Limits())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_cut = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_cut

    def close(self) -> None:
        self.is_cut = True

    def abort(self) -> None:
        self.is_cut = self.is_aborted = True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def on_a_line(
    application: Application, say: Callable[[Any, Wire], Awaitable[None]], *, head_seconds: float = 0.1
) -> None:
    """Talk to the protocol of a line."""

    async def main() -> None:
        config = make_server(application, Limits(head_seconds=head_seconds)).config
        config.load()
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        wire = Wire()
        protocol.connection_made(wire)
        try:
            await say(protocol, wire)
        finally:
            protocol.connection_lost(None)  # otherwise a task would wait for its reader for ever
            await asyncio.gather(*protocol.tasks)

    asyncio.run(main())


async def load_until_nobody_listens(address: str, terminate: Callable[[], None]) -> list[Any]:
    """How requests end that are sent from before the signal until nobody listens any more."""
    begin, outcomes = time.monotonic(), list[Any]()

    async def one(client: httpx.AsyncClient) -> None:
        while "refused" not in outcomes and time.monotonic() - begin < 80:
            try:
                reply = await client.post("/classify", json={"texts": ["the cat sits on the mat"] * 8})
                outcomes.append(reply.status_code)
                await asyncio.sleep(0.01 if reply.status_code == 200 else 0.1)
            except httpx.ConnectError:
                outcomes.append("refused")
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                outcomes.append(
                    "refused"
                )  # hung up before any of the reply: the log tells whether it was lost

    async def end() -> None:
        while outcomes.count(200) < 40 and time.monotonic() - begin < 60:
            await asyncio.sleep(0.02)
        terminate()

    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        await asyncio.gather(end(), *(one(client) for _ in range(8)))
    return outcomes
