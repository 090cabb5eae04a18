"""Real processes: an HTTP process that is killed is replaced, SIGTERM loses nothing, nobody stays behind."""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from bertsmith.serve.app import Application
from bertsmith.serve.http_process import HttpServer
from bertsmith.serve.remote_models import RemoteModels
from bertsmith.serve.server import uvicorn_config
from bertsmith.serve.server_config import Limits, ServerConfig
from bertsmith.serve.shared_load import SharedLoad
from tests.unit.serve.serving import load_until_nobody_listens


def started(log):
    """The ids of the HTTP processes that have begun to take requests."""
    told = [json.loads(line) for line in log]
    return [line["pid"] for line in told if line["event"] == "an HTTP process takes requests"]


def wait_for(holds):
    for _ in range(2400):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")


def is_there(pid):
    """Whether a process runs; one that nobody has asked for its end is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_http_process_is_replaced_and_sigterm_loses_no_accepted_request(folders):
    command = [sys.executable, "-m", "bertsmith", "serve", "--port", "0", "--device", "cpu"]
    command += ["--http-processes", "2", "--model", f"mood={folders['mood']}"]
    log: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        address = server.stderr.readline().split()[0]
        lines = threading.Thread(target=lambda: log.extend(server.stderr))
        lines.start()
        wait_for(lambda: len(started(log)) == 2)
        assert httpx.get(f"{address}/ready", timeout=20).status_code == 200
        os.kill(started(log)[0], signal.SIGKILL)
        wait_for(lambda: len(started(log)) == 3)
        for _ in range(8):  # connections of their own: both processes answer
            assert httpx.post(f"{address}/classify", json={"texts": ["a cat"]}, timeout=20).status_code == 200
        outcomes = asyncio.run(load_until_nobody_listens(address, server.terminate))
        assert server.wait(30) == 0
        lines.join()
    assert set(outcomes) <= {200, 503, "refused"}
    assert outcomes.count(200) >= 40
    told = [json.loads(line) for line in log]
    answered = [line for line in told if line.get("route") == "/classify" and line["status"] == 200]
    assert len(answered) == outcomes.count(200) + 8
    (ended,) = [line for line in told if line["level"] == "error"]
    assert ended["event"] == "an HTTP process has ended; another is started"
    wait_for(lambda: not any(is_there(pid) for pid in started(log)))


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
