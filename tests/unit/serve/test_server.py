"""A server on a real port: slow clients, those who hang up, and SIGTERM under load."""

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bertsmith.cli.serve import named_folders
from bertsmith.core.errors import UserError
from bertsmith.serve import server
from bertsmith.serve.server import listen, make_server
from bertsmith.serve.server_config import Limits
from tests.command_line import bertsmith, mistake
from tests.commands import commanded
from tests.unit.serve import serving

BODY = json.dumps({"texts": ["the cat"]}).encode()


def head(length, *more):
    lines = ("POST /classify HTTP/1.1", "Host: here", "Content-Type: application/json", *more)
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def read_all(line):
    parts = []
    while part := line.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def impatient(folders):
    limits = Limits(head_seconds=0.4, body_seconds=0.4, body_bytes=1000)
    with serving.live(serving.application_of({"mood": folders["mood"]}, limits=limits), limits) as address:
        yield address


@pytest.mark.parametrize("sent", [b"", b"POST /classify HT", b"GET /health HTTP/1.1\r\nX: "])
def test_whoever_never_finishes_a_head_is_cut_off(sent, impatient):
    begin = time.monotonic()
    with serving.connected(impatient) as line:
        line.sendall(sent)
        with suppress(ConnectionResetError):
            assert read_all(line) == b""
    assert 0.2 < time.monotonic() - begin < Limits().head_seconds


def test_a_head_in_drips_is_cut_off_too(impatient):
    with serving.connected(impatient) as line, pytest.raises((ConnectionResetError, BrokenPipeError)):
        for letter in b"GET /health HTTP/1.1\r\n" * 10:
            line.sendall(bytes([letter]))
            time.sleep(0.02)


def test_a_slow_body_gets_its_refusal_and_the_line_is_closed(impatient):
    with serving.connected(impatient) as line:
        line.sendall(head(len(BODY)) + BODY[:5])
        reply = read_all(line)
    assert reply.startswith(b"HTTP/1.1 408 ")


def test_a_large_body_gets_its_refusal_though_it_is_sent_to_the_end(impatient):
    reply = httpx.post(f"{impatient}/classify", content=b"x" * 10_000_000)
    assert reply.status_code == 413


def test_whoever_asks_before_sending_too_much_is_reported_at_once(impatient):
    with serving.connected(impatient) as line:
        line.sendall(head(10_000_000, "Expect: 100-continue"))
        assert read_all(line).startswith(b"HTTP/1.1 413 ")


def test_a_connection_serves_many_requests(impatient):
    with httpx.Client(base_url=impatient) as client:
        statuses = [
            client.post("/classify", content=BODY, headers={"content-type": "application/json"}).status_code
        ]
        time.sleep(0.6)  # longer than a head may take: between requests nobody is hurried
        statuses += [client.get("/health").status_code for _ in range(3)]
    assert statuses == [200] * 4


@pytest.mark.parametrize(
    "sent", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n", b"A" * 100_000]
)
def test_what_is_no_http_gets_no_fault(sent, impatient):
    with serving.connected(impatient) as line:
        try:
            line.sendall(sent)
            reply = read_all(line)
        except (ConnectionResetError, BrokenPipeError):
            reply = b""
    assert b" 500 " not in reply and b"Traceback" not in reply
    assert httpx.get(f"{impatient}/health").status_code == 200


def test_the_work_of_whoever_hangs_up_is_dropped(folders):
    application = serving.application_of({"mood": folders["mood"]})
    queue = application.models["mood"].queue
    slow = serving.Slowly(application, "mood")
    with serving.live(application) as address:
        lines = [serving.connected(address) for _ in range(3)]
        for number, line in enumerate(lines):
            line.sendall(head(len(BODY)) + BODY)
            serving.wait_for(lambda: slow.batches == [1])  # the first is at work, the others wait
            serving.wait_for(lambda waiting=number: queue.requests == waiting)
        lines[1].close()
        serving.wait_for(lambda: queue.requests == 1)
        slow.may_go.set()
        for line in (lines[0], lines[2]):
            assert line.recv(20).startswith(b"HTTP/1.1 200 ")
            line.close()
        assert slow.batches == [1, 1]


def test_replies_do_not_wait_for_acknowledgements():
    # Of asyncio's own loop: uvloop turns Nagle's delay off by itself.
    async def main():
        accepted = asyncio.get_running_loop().create_future()

        def accept(_, writer):
            line = writer.get_extra_info("socket")
            accepted.set_result(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(accept, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await accepted

    assert asyncio.run(main())


def test_a_taken_port_is_reported():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"127\.0\.0\.1:{port}: cannot listen .*; choose another with --host and --port"
        ):
            listen("127.0.0.1", port)


# ---- draining


def seconds_to_drain(application, drain_seconds, *, busy_seconds):
    """How long a server waits after a signal for a request that takes so long."""
    server = make_server(application, Limits(drain_seconds=drain_seconds))
    server.started = True

    async def main():
        application.status.open_requests = 1
        asyncio.get_running_loop().call_later(busy_seconds, setattr, application.status, "open_requests", 0)
        begin = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        while not server.should_exit:
            await asyncio.sleep(0.01)
        return time.monotonic() - begin

    return asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize(
    ("drain_seconds", "busy_seconds", "least"),
    [(0.5, 9.0, 0.5), (9.0, 0.3, 0.3), (9.0, 0.0, 0.1)],
    ids=["a request without an end", "a request that ends", "nothing"],
)
def test_a_server_waits_for_accepted_requests_but_only_so_long(
    drain_seconds, busy_seconds, least, folders, monkeypatch
):
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.1)
    application = serving.application_of({"mood": folders["mood"]})
    waited = seconds_to_drain(application, drain_seconds, busy_seconds=busy_seconds)
    assert least <= waited < max(drain_seconds, busy_seconds)
    assert application.status.is_draining


# ---- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "toy"), "toy: this folder does not exist"),
        (("--model", "a="), "--model: is 'a='; write NAME=FOLDER"),
        (("--model", ""), "--model: is ''; write NAME=FOLDER"),
        (("--model", "=toy"), "--model =toy: '' is not a valid model name; write NAME=FOLDER"),
        (
            ("--model", "runs/my model"),
            "'my model' is not a valid model name; write NAME=FOLDER, for example",
        ),
        (("--model", "a=x", "--model", "a=y"), "two models have the name a; rename one"),
        (("--model", "x/a", "--model", "y/a/"), "two models have the name a; rename one: --model"),
        (("--model", "a=/nowhere"), "/nowhere: this folder does not exist"),
        (("--http-processes", "0"), "--http-processes': Input should be greater than or equal to 1"),
        (("--http-processes", "1000"), "--http-processes': Input should be less than or equal to 128"),
        (("--allow-host", "a:8000"), "--allow-host a:8000: is not a host name; write only the name"),
        (("--allow-origin", "*"), "every web site could use"),
        (("--allow-origin", "null"), "--allow-origin null: every web site could use"),
        (
            ("--allow-origin", "foo"),
            "--allow-origin foo: is not an origin as browsers send it; write only scheme and",
        ),
        (("--allow-origin", "https://a.example/"), "is not an origin as browsers send it"),
        (("--allow-origin", "https://A.example"), "is not an origin as browsers send it"),
    ],
)
def test_mistakes_of_the_operator_are_one_line(words, message, capsys):
    assert message in mistake(capsys, "serve", "--port", "0", *words)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "the key is blank; give a key, or unset it to serve everyone"),
        (" \n", "the key is blank"),
        ("a\nb", "an HTTP header cannot contain this key; remove its line breaks"),
        ("a\udcff", "an HTTP header cannot contain this key"),  # a byte that is not UTF-8
    ],
)
def test_a_key_that_nobody_can_send_ends_the_command(key, message, capsys, monkeypatch):
    expected = f"--api-key or BERTSMITH_API_KEY: {message}"
    command = ("serve", "--model", "a=/nowhere")
    as_word = "argument 5" if "\udcff" in key else expected  # any word that is not UTF-8 is refused before
    assert as_word in mistake(capsys, *command, "--api-key", key)
    monkeypatch.setenv("BERTSMITH_API_KEY", key)
    assert expected in mistake(capsys, *command)


def test_a_key_from_a_file_opens_without_its_line_break(folders, monkeypatch):
    monkeypatch.setenv("BERTSMITH_API_KEY", " schl\u00fcssel\r\n")
    with commanded("serve", "--port", "0", "--device", "cpu", "--model", folders["mood"]) as server:
        address = server.stderr.readline().split()[0]
        given = {"authorization": "Bearer schl\u00fcssel".encode()}
        replies = [httpx.get(f"{address}/models", headers=each, timeout=20) for each in (given, {})]
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    assert [reply.status_code for reply in replies] == [200, 401]


@pytest.mark.parametrize(
    ("host", "key", "warnings"), [("0.0.0.0", "", 1), ("0.0.0.0", "k", 0), ("localhost", "", 0)]
)
def test_a_server_that_other_machines_reach_warns_once_of_a_missing_key(host, key, warnings, folders):
    words = ("--host", host, "--port", "0", "--device", "cpu", *(("--api-key", key) if key else ()))
    with commanded("serve", *words, "--model", folders["mood"]) as server:
        address = server.stderr.readline().split()[0]
        assert httpx.get(f"{address}/health", timeout=60).status_code == 200  # from here on it can drain
        server.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in server.stderr]
    told = [line["event"] for line in lines if line["level"] == "warning"]
    assert len(told) == warnings and all("no API key" in each for each in told)


AT_TORCH = """
import os, sys
class AtTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("LRU_CACHE_CAPACITY"))
            sys.exit()
sys.meta_path.insert(0, AtTorch())
sys.argv = ["bertsmith", "serve"]
from bertsmith.cli.app import main
main()
"""


@pytest.mark.parametrize("given", [{}, {"LRU_CACHE_CAPACITY": "7"}])
def test_few_prepared_products_are_kept_by_each_thread_unless_the_user_says_how_many(given):
    others = {name: value for name, value in os.environ.items() if name != "LRU_CACHE_CAPACITY"}
    command = [sys.executable, "-c", AT_TORCH]
    told = subprocess.run(command, env=others | given, capture_output=True, text=True, check=True)
    own = "64" if platform.machine() == "x86_64" else "None"
    assert told.stdout == f"{given.get('LRU_CACHE_CAPACITY', own)}\n"


def test_a_model_without_a_name_is_called_as_its_folder(tmp_path, monkeypatch):
    (tmp_path / "run" / "lr=3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    given = ["runs/sst2/", "qa=runs/squad2", "org/name=there=is", ".", "~/ner"]
    monkeypatch.setenv("HOME", "/home/me")
    assert named_folders(given) == {
        "sst2": Path("runs/sst2"),
        "qa": Path("runs/squad2"),
        "org/name": Path("there=is"),
        "run": Path(),
        "ner": Path("/home/me/ner"),
    }
    with pytest.raises(UserError, match="'lr=3' is not a valid model name"):
        named_folders([str(tmp_path / "run" / "lr=3")])


def test_help_teaches_keys_hosts_several_models_and_a_request(capsys):
    told = " ".join(bertsmith(capsys, "serve", "--help").out.split())
    assert "Example: bertsmith serve --model runs/sst2 --model qa=runs/squad2" in told
    assert "BERTSMITH_API_KEY=" in told and "--host 0.0.0.0" in told
    request = told[told.index("Example: curl localhost:8000/classify") :]
    assert "Authorization: Bearer" in request and '{"texts": ["A warm day."]' in request


def test_sigterm_under_load_loses_no_accepted_request(folders):
    models = [word for name in ("toy", "mood") for word in ("--model", f"{name}={folders[name]}")]
    with commanded("serve", "--port", "0", "--device", "cpu", *models) as server:
        first = server.stderr.readline()
        address = first.split()[0]
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(server.stderr))
        reader.start()
        outcomes = asyncio.run(
            serving.load_until_nobody_listens(address, lambda: server.send_signal(signal.SIGTERM))
        )
        assert server.wait(30) == 0
        reader.join()
    assert "serves toy, mood" in first
    assert set(outcomes) <= {200, 503, "refused"}
    assert outcomes.count(200) >= 40
    assert outcomes.count(503) >= 1
    lines = [json.loads(line) for line in log]
    answered = [line for line in lines if line.get("route") == "/classify" and line["status"] == 200]
    assert len(answered) == outcomes.count(200)
    assert not [line for line in lines if line["level"] == "error"]


def test_the_command_cuts_long_texts_if_told_to(folders):
    words = ("serve", "--port", "0", "--device", "cpu", "--truncate", "--model", folders["toy"])
    with commanded(*words) as server:
        address = server.stderr.readline().split()[0]
        reply = httpx.post(f"{address}/v1/embeddings", json={"input": "cat " * 500}, timeout=20)
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    assert reply.json()["usage"]["prompt_tokens"] == 128
