"""Real processes: an HTTP process that is killed is replaced, SIGTERM loses nothing, nobody stays behind."""

import asyncio
import errno
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from bertsmith.core.errors import UserError
from bertsmith.serve import process_server
from bertsmith.serve.app import Application
from bertsmith.serve.http_process import HttpServer
from bertsmith.serve.process_server import ProcessServer
from bertsmith.serve.remote_models import RemoteModels
from bertsmith.serve.server import uvicorn_config
from bertsmith.serve.server_config import Limits, ServerConfig
from bertsmith.serve.shared_load import SharedLoad
from tests.unit.serve.serving import load_until_nobody_listens, wait_for


def started(log):
    """The ids of the HTTP processes that have begun to take requests."""
    told = [json.loads(line) for line in log]
    return [line["pid"] for line in told if line["event"] == "an HTTP process takes requests"]


def is_there(pid):
    """Whether a process runs; one that nobody has asked for its end is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def two_http_processes(folder):
    """A server of two HTTP processes that have begun to take requests; its log grows meanwhile."""
    command = [sys.executable, "-m", "bertsmith", "serve", "--port", "0", "--device", "cpu"]
    command += ["--http-processes", "2", "--model", f"mood={folder}"]
    log: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        address = process.stderr.readline().split()[0]
        lines = threading.Thread(target=lambda: log.extend(process.stderr))
        lines.start()
        try:
            wait_for(lambda: len(started(log)) == 2)
            yield SimpleNamespace(process=process, address=address, log=log)
        finally:
            process.kill()
            lines.join()


def test_a_killed_http_process_is_replaced_and_sigterm_loses_no_accepted_request(folders):
    with two_http_processes(folders["mood"]) as server:
        address, log = server.address, server.log
        wait_for(lambda: httpx.get(f"{address}/ready", timeout=60).status_code == 200)
        os.kill(started(log)[0], signal.SIGKILL)
        wait_for(lambda: len(started(log)) == 3)
        for _ in range(8):  # connections of their own: both processes answer
            assert httpx.post(f"{address}/classify", json={"texts": ["a cat"]}, timeout=20).status_code == 200
        outcomes = asyncio.run(load_until_nobody_listens(address, server.process.terminate))
        assert server.process.wait(30) == 0
    assert set(outcomes) <= {200, 503, "refused"}
    assert outcomes.count(200) >= 40
    told = [json.loads(line) for line in log]
    answered = [line for line in told if line.get("route") == "/classify" and line["status"] == 200]
    assert len(answered) == outcomes.count(200) + 8
    (ended,) = [line for line in told if line["level"] == "error"]
    assert ended["event"] == "an HTTP process has ended; another is started"
    wait_for(lambda: not any(is_there(pid) for pid in started(log)))


def test_a_stopped_http_process_is_replaced_and_every_connection_is_answered_again(folders):
    with two_http_processes(folders["mood"]) as server:
        deaf = started(server.log)[0]
        os.kill(deaf, signal.SIGSTOP)
        try:
            wait_for(lambda: len(started(server.log)) > 2)
            assert not is_there(deaf)
        finally:
            with suppress(ProcessLookupError):
                os.kill(deaf, signal.SIGCONT)
        for _ in range(8):  # connections of their own, which the kernel spreads over both processes
            assert httpx.get(f"{server.address}/health", timeout=60).status_code == 200
        server.process.terminate()
        assert server.process.wait(60) == 0
    ended = [json.loads(line) for line in server.log if "an HTTP process has ended" in line]
    assert ended[0]["reason"] == "silent for 10 s"


@pytest.fixture
def server(folders):
    """An HTTP process that is not run, and its channel."""
    load = SharedLoad(multiprocessing.get_context("forkserver"), models=0, processes=1)
    config = ServerConfig({"mood": folders["mood"]}, device="cpu")
    application = Application(config, RemoteModels([], load, 0))
    own = SimpleNamespace(server=config, channel=None)
    made = HttpServer(uvicorn_config(application, Limits()), application, own)
    return SimpleNamespace(server=made, channel=application.remote.channel, application=application)


def test_an_http_process_without_its_model_process_ends_and_says_so_once(server, caplog):
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        server.channel.connection_lost(None)
        server.channel.on_end()
    assert server.server.should_exit
    assert [record.getMessage() for record in caplog.records] == ["the model process has ended"]


def test_an_http_process_leaves_signals_to_the_model_process(server):
    server.server.started = True
    server.server.handle_exit(signal.SIGTERM, None)
    assert not server.server.should_exit
    assert not server.application.status.is_draining


def test_an_http_process_that_does_not_listen_yet_ends_when_it_is_told_to_drain(server):
    server.channel.on_drain()
    assert server.server.should_exit


# ---- the process that starts the others


class StartedProcess:
    """In place of an HTTP process: it ends when it is killed."""

    exitcode = None

    def __init__(self, target, args, daemon):
        (self.config,) = args
        self.joined = 0

    def start(self):
        self.listening = socket.socket(fileno=os.dup(self.config.listening.fileno()))
        self.channel = socket.socket(fileno=os.dup(self.config.channel.fileno()))

    def join(self, _seconds):
        self.joined += 1

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.exitcode = -9


@pytest.fixture
def keeper(monkeypatch):
    """A server of one HTTP process, without models and without the process."""
    monkeypatch.setattr(process_server, "RESTART_SECONDS", 0.0)
    made = ProcessServer.__new__(ProcessServer)
    load = SharedLoad(multiprocessing.get_context("forkserver"), models=0, processes=1)
    made._models = SimpleNamespace(
        load=load, add=lambda _: None, remove=lambda _: None, publish_soon=lambda: None
    )
    made._config = made._descriptions = None
    made._running, made._is_draining = {}, False
    made._listening = [socket.create_server(("127.0.0.1", 0))]
    made._context = SimpleNamespace(Process=StartedProcess)
    yield made
    made._listening[0].close()


def ends_as(keeper, monkeypatch, *endings):
    """Let HTTP processes end like this one after the other, and the server drain with the last."""
    left = [*endings]

    async def run_one(_number):
        ending = left.pop(0)
        keeper._is_draining = not left
        return ending

    monkeypatch.setattr(keeper, "_run_one", run_one)
    asyncio.run(keeper._keep(0))


def test_the_first_http_process_that_takes_no_request_ends_the_server(keeper, monkeypatch):
    with pytest.raises(UserError, match=r"before it accepted requests \(exit status 1\)"):
        ends_as(keeper, monkeypatch, (False, "exit status 1"), (True, "exit status 0"))


def test_one_that_cannot_be_started_again_is_tried_again_while_the_others_go_on(keeper, monkeypatch, caplog):
    again = (False, "exit status -9"), (False, "no process")
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        ends_as(keeper, monkeypatch, (True, "exit status -9"), *again, (True, "exit status 0"))
    assert [record.fields["reason"] for record in caplog.records] == [
        "exit status -9",
        "exit status -9",
        "no process",
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.ENOMEM, ""), "Cannot allocate memory"), (EOFError("unexpected EOF"), "no process")],
)
def test_a_process_that_cannot_be_forked_is_one_that_has_ended(keeper, monkeypatch, error, reason):
    def start(_self):
        raise error

    monkeypatch.setattr(StartedProcess, "start", start)
    assert asyncio.run(keeper._run_one(0)) == (False, reason)


def test_a_signal_while_an_http_process_starts_does_not_take_its_socket_away(keeper, monkeypatch):
    start = StartedProcess.start

    def start_late(process):
        keeper._listening[0].close()  # as a signal does
        start(process)

    monkeypatch.setattr(StartedProcess, "start", start_late)

    async def main():
        _, process = await keeper._start(0)
        assert process.listening.getsockname()[1]
        process.listening.close()
        process.channel.close()

    asyncio.run(main())


def test_a_process_that_lives_on_without_its_channel_is_killed_before_another_takes_its_place(keeper):
    async def main():
        running = asyncio.create_task(keeper._run_one(0))
        while not keeper._running:
            await asyncio.sleep(0)
        (process,) = keeper._running.values()
        keeper._models.load.count_sent(0)  # which nobody takes any more
        process.channel.close()
        process.listening.close()
        return await running, process.joined

    assert asyncio.run(main()) == ((False, "exit status -9"), 2)
    assert not keeper._running


def watched(keeper, monkeypatch, *, sign_of_life):
    """Return why an HTTP process ended: it was deaf, or else by itself after dozens of looks at it."""
    monkeypatch.setattr(process_server, "WATCH_SECONDS", 0.0)

    async def main():
        running = asyncio.create_task(keeper._run_one(0))
        while not keeper._running:
            await asyncio.sleep(0)
        ((channel, process),) = keeper._running.items()
        for _ in range(200):  # a look takes some rounds of the event loop
            sign_of_life(channel)
            await asyncio.sleep(0)
        process.exitcode = process.exitcode or 0
        process.channel.close()
        process.listening.close()
        return await running

    return asyncio.run(main())


def ready(channel):
    channel.is_ready = True


def test_an_http_process_that_gives_no_sign_of_life_is_killed(keeper, monkeypatch):
    assert watched(keeper, monkeypatch, sign_of_life=ready) == (True, "silent for 0 s")


def test_one_that_gives_a_sign_of_life_at_each_look_is_left_alone(keeper, monkeypatch):
    def beats(channel):
        ready(channel)
        channel.data_received(b"")

    assert watched(keeper, monkeypatch, sign_of_life=beats) == (True, "exit status 0")


def test_one_that_still_starts_is_not_taken_for_deaf(keeper, monkeypatch):
    assert watched(keeper, monkeypatch, sign_of_life=lambda _: None) == (False, "exit status 0")


def test_a_new_http_process_has_sent_nothing_yet(keeper):
    async def main():
        keeper._models.load.count_sent(0)
        _, process = await keeper._start(0)
        process.channel.close()
        process.listening.close()

    asyncio.run(main())
    assert keeper._models.load._numbers[:] == [0, 0]
