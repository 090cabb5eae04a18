"""Whoever does not read replies cannot keep a line for ever, what comes on one is taken for what it is."""

import asyncio
import inspect
import json
import logging
import re
import resource

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bertsmith.serve import server
from bertsmith.serve.monitoring import JsonLines, LoopFailures
from bertsmith.serve.server_config import Limits, allowed_hosts
from tests.unit.serve.serving import Slowly, application_of, connected, live, on_a_line, until, wait_for

BODY = json.dumps({"texts": ["a cat"]}).encode()
LENGTH = len(BODY)
LIMITS = Limits(request_seconds=0.1, body_seconds=0.1)


def request(*fields, length=LENGTH):
    lines = ("POST /classify HTTP/1.1", "Host: here", "Content-Type: application/json", *fields)
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


@pytest.fixture
def mood(folders):
    return application_of({"mood": folders["mood"]}, limits=LIMITS)


def statuses(caplog):
    return [each.fields["status"] for each in caplog.records if each.name == "bertsmith.serve"]


@pytest.mark.parametrize(
    "sent",
    [[request() + BODY], [request(), BODY], [request("Connection: close") + BODY], [request(length=10**9)]],
    ids=["whole", "parts", "close", "refused"],
)
def test_a_line_on_which_nobody_reads_is_cut_off_and_the_log_says_so(sent, mood, caplog):
    async def say(protocol, wire):
        protocol.pause_writing()
        for part in sent:
            protocol.data_received(part)
        await until(lambda: wire.is_aborted)

    with caplog.at_level(logging.INFO):
        on_a_line(mood, say)
    assert statuses(caplog) == [499]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert mood.status.open_requests == 0


def test_a_reply_that_is_read_late_but_in_time_arrives(folders, caplog):
    mood = application_of({"mood": folders["mood"]})

    async def say(protocol, wire):
        protocol.pause_writing()
        protocol.data_received(request() + BODY)
        await asyncio.sleep(0.2)
        assert not wire.written
        protocol.resume_writing()
        await until(lambda: wire.written.startswith(b"HTTP/1.1 200 "))

    with caplog.at_level(logging.INFO):
        on_a_line(mood, say)
    assert statuses(caplog) == [200]


@pytest.mark.parametrize(
    "sent",
    [
        request("Connection: close") + BODY,
        request(length=10**9),
        request("Transfer-Encoding: chunked").replace(b"Content-Length", b"X") + b"no length\r\n",
    ],
    ids=["asked", "refused", "no HTTP"],
)
def test_a_line_that_is_closed_is_cut_off_where_the_last_reply_is_never_read(sent, mood, monkeypatch):
    monkeypatch.setattr(server, "FLUSH_SECONDS", 0.05)

    async def say(protocol, wire):
        protocol.data_received(sent)
        await until(lambda: wire.is_aborted)
        assert wire.written.startswith(b"HTTP/1.1 ")

    on_a_line(mood, say)
    assert mood.status.open_requests == 0


def test_a_plain_request_whose_reply_closes_the_line_is_no_exception(mood, monkeypatch):
    monkeypatch.setattr(server, "FLUSH_SECONDS", 0.05)

    async def say(protocol, wire):
        mood.status.is_draining = True
        protocol.data_received(request() + BODY)
        await until(lambda: wire.is_aborted)
        assert b"\r\nconnection: close\r\n" in wire.written.lower()

    on_a_line(mood, say)


def test_nor_is_a_line_that_the_server_closes_when_it_stops(mood, monkeypatch):
    monkeypatch.setattr(server, "FLUSH_SECONDS", 0.05)

    async def say(protocol, wire):
        protocol.data_received(request() + BODY)
        await until(lambda: b"HTTP/1.1 " in wire.written)
        assert not wire.is_closing()
        protocol.shutdown()
        await until(lambda: wire.is_aborted)
        assert wire.written.count(b"HTTP/1.1 ") == 1

    on_a_line(mood, say)


# ---- where a request may begin


def test_a_body_that_looks_like_a_request_is_none_though_its_own_was_answered(mood):
    async def say(protocol, wire):
        inner = request() + BODY
        protocol.data_received(request(length=len(inner)).replace(b"/classify", b"/nowhere"))
        protocol.data_received(inner)
        await until(lambda: b"HTTP/1.1 404 " in wire.written)
        await asyncio.sleep(0.05)
        assert wire.written.count(b"HTTP/1.1 ") == 1

    on_a_line(mood, say)


def test_nor_is_one_whose_head_was_rejected_before_it_came(mood, monkeypatch):
    monkeypatch.setattr(type(mood.load_shedding), "is_overloaded", property(lambda _: True))

    async def say(protocol, wire):
        inner = request() + BODY
        protocol.data_received(request(length=len(inner)))
        await until(lambda: b"HTTP/1.1 429 " in wire.written)
        protocol.data_received(inner)
        await asyncio.sleep(0.05)
        assert wire.written.count(b"HTTP/1.1 ") == 1

    on_a_line(mood, say)


def test_a_request_behind_one_that_is_at_work_waits_for_its_turn(folders):
    application = application_of({"mood": folders["mood"]})
    slow = Slowly(application, "mood")

    async def say(protocol, wire):
        protocol.data_received(request())
        protocol.data_received(BODY)
        await until(lambda: slow.batches == [1])
        protocol.data_received(request(length=2) + b"{}")
        await asyncio.sleep(0.05)
        assert not wire.written
        slow.may_go.set()
        await until(lambda: wire.written.count(b"HTTP/1.1 ") == 2)
        first, second = wire.written.split(b"HTTP/1.1 ")[1:]
        assert (first[:3], second[:3]) == (b"200", b"422")

    on_a_line(application, say)


def test_what_is_no_http_waits_for_the_response_before_it(folders):
    application = application_of({"mood": folders["mood"]})
    slow = Slowly(application, "mood")

    async def say(protocol, wire):
        protocol.data_received(request() + BODY)
        await until(lambda: slow.batches == [1])
        protocol.data_received(b"\x00 no HTTP\r\n\r\n")
        assert not wire.written
        slow.may_go.set()
        await until(lambda: wire.is_cut)
        assert wire.written.count(b"HTTP/1.1 ") == wire.written.count(b"HTTP/1.1 200 ") == 1

    on_a_line(application, say)


# ---- the host that a request is for


@pytest.fixture(scope="module")
def local(folders):
    """A server that is called localhost and nothing else."""
    application = application_of({"mood": folders["mood"]}, allow_hosts=allowed_hosts("127.0.0.1", []))
    with live(application) as address:
        yield address


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("/models HTTP/1.1|Host: localhost", 200),
        ("/models?from=http://evil.example/ HTTP/1.1|Host: localhost", 200),
        ("/models HTTP/1.1", 400),
        ("/models HTTP/1.1|Host: localhost|Host: localhost", 400),
        ("/models HTTP/1.0|Host: localhost|Host: localhost", 400),
        ("/models HTTP/1.0", 200),
        ("/models HTTP/1.0|Host: evil.example", 421),
        ("http://localhost/models HTTP/1.1|Host: localhost", 200),
        ("HTTP://LocalHost:8000/models HTTP/1.1|Host: evil.example", 200),
        ("http://evil.example/models HTTP/1.1|Host: localhost", 421),
        ("http://evil.example/models HTTP/1.0", 421),
        ("http://localhost@evil.example/models HTTP/1.1|Host: localhost", 400),
        ("http://localhost/models HTTP/1.1", 400),
    ],
)
def test_a_request_is_for_the_host_of_its_target_or_of_its_one_host_header(sent, status, local):
    with connected(local) as line:
        line.sendall("\r\n".join(["GET " + sent.replace("|", "\r\n"), "Connection: close", "", ""]).encode())
        assert int(line.recv(12).split()[1]) == status


# ---- what httptools would gather without limit


CHUNKED = request("Transfer-Encoding: chunked").replace(b"Content-Length", b"X")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a"),
        (b"GET / HTTP/1.1\r\nX: ", b"a"),
        (b"GET / HTTP/1.1\r\n", b"X: a\r\n"),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: a\r\n"),
        (CHUNKED + b"2;", b"a"),
    ],
    ids=["path", "header", "headers", "trailers", "chunk extension"],
)
def test_a_head_without_an_end_is_cut_off(begin, more, mood):
    async def say(protocol, wire):
        protocol.data_received(begin)
        for _ in range(5):
            protocol.data_received((more * 16384)[:16384])
            await asyncio.sleep(0)
        await until(lambda: wire.is_cut)
        assert b" 200 " not in wire.written

    on_a_line(mood, say)


def test_a_request_that_others_wait_behind_is_reported_of_a_lost_connection(folders, caplog):
    application = application_of({"mood": folders["mood"]})
    slow = Slowly(application, "mood")

    async def say(protocol, wire):
        protocol.data_received(request() + BODY)
        await until(lambda: slow.batches == [1])
        protocol.data_received(request() + BODY)
        protocol.connection_lost(None)
        await until(lambda: application.status.open_requests == 0)
        slow.may_go.set()

    with caplog.at_level(logging.INFO):
        on_a_line(application, say)
    assert statuses(caplog) == [499]


def test_what_is_no_http_is_logged_under_the_id_that_its_reply_has(mood, caplog):
    async def say(protocol, wire):
        protocol.data_received(b"\x00 no HTTP\r\n\r\n")
        (record,) = [each for each in caplog.records if each.name == "bertsmith.serve"]
        assert (record.fields["status"], record.fields["route"]) == (400, "elsewhere")
        assert record.fields["request_id"].encode() in wire.written

    with caplog.at_level(logging.INFO):
        on_a_line(mood, say)


# ---- connections


def test_the_oldest_idle_connection_makes_room_for_a_new_one(folders):
    limits = Limits(connections=3)
    application = application_of({"mood": folders["mood"]}, limits=limits)
    slow = Slowly(application, "mood")
    with live(application, limits) as address:
        lines = [connected(address) for _ in range(3)]
        lines[0].sendall(request() + BODY)  # at work, so not idle
        wait_for(lambda: slow.batches == [1])
        lines.append(connected(address))
        assert lines[1].recv(1) == b""
        lines.append(connected(address))
        assert lines[2].recv(1) == b""
        slow.may_go.set()
        lines[3].sendall(request() + BODY)
        for line in (lines[0], lines[3]):
            assert line.recv(12) == b"HTTP/1.1 200"
        for line in lines:
            line.close()


def test_a_connection_that_its_client_closed_makes_room_but_once(folders):
    limits = Limits(connections=2)
    with live(application_of({"mood": folders["mood"]}, limits=limits), limits) as address:
        connected(address).close()
        oldest = connected(address)
        oldest.sendall(request() + BODY)
        assert oldest.recv(12) == b"HTTP/1.1 200"  # by now the server has seen the other one go
        with connected(address), connected(address):
            while oldest.recv(4096):
                pass
        oldest.close()


def test_where_all_connections_are_busy_a_new_one_is_closed(folders):
    limits = Limits(connections=1)
    application = application_of({"mood": folders["mood"]}, limits=limits)
    slow = Slowly(application, "mood")
    with live(application, limits) as address, connected(address) as busy:
        busy.sendall(request() + BODY)
        wait_for(lambda: slow.batches == [1])
        with connected(address) as late:
            assert late.recv(1) == b""
        slow.may_go.set()
        assert busy.recv(12) == b"HTTP/1.1 200"


def test_there_are_never_more_connections_than_descriptors(mood, monkeypatch):
    monkeypatch.setattr(server, "open_file_limit", lambda: 100)
    for asked, allowed in ((4096, 36), (20, 20)):
        protocol = server.protocol_with(Limits(connections=asked), mood.early_rejection)
        assert protocol.max_connections == allowed


def test_the_number_of_descriptors_is_raised_as_far_as_it_goes():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        server.raise_open_file_limit(300)
        assert server.open_file_limit() == 300
        server.raise_open_file_limit(2**30)
        assert server.open_file_limit() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_the_event_loop_reports_again_and_again_is_logged_once_as_json(caplog):
    failures = LoopFailures()
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            failures(None, {"message": "secret", "exception": OSError(24, "secret")})
    (record,) = caplog.records
    line = json.loads(JsonLines().format(record))
    assert (line["event"], line["reason"], line["failure"]) == (
        "event loop",
        "Too many open files",
        "OSError",
    )
    assert "secret" not in json.dumps(line)
    failures._repeats._logged["OSError"] -= 11
    with caplog.at_level(logging.INFO):
        failures(None, {"exception": OSError(24, "secret")})
    assert caplog.records[-1].fields["left_out"] == 999


# ---- uvicorn


def test_uvicorn_still_has_what_the_protocol_builds_upon():
    """Read here which of uvicorn's undocumented names a new version has changed."""
    protocol_methods = ["connection_made", "connection_lost", "data_received", "on_message_begin"]
    protocol_methods += ["on_headers_complete", "on_body", "on_message_complete", "on_response_complete"]
    protocol_methods += ["_start_asgi_task", "send_400_response", "shutdown", "timeout_keep_alive_handler"]
    protocol_fields = [
        "app_state",
        "connections",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "server_state",
        "tasks",
    ]
    protocol_fields += ["scope", "timeout_keep_alive", "timeout_keep_alive_task", "transport", "url"]
    cycle_fields = ["disconnected", "keep_alive", "message_event", "response_complete", "response_started"]
    cycle_fields += ["scope"]
    missing = [name for name in protocol_methods if not callable(getattr(HttpToolsProtocol, name, None))]
    assigned = _assigned_fields(HttpToolsProtocol.__init__)
    assigned |= _assigned_fields(HttpToolsProtocol.on_message_begin)
    missing += [name for name in protocol_fields if name not in assigned]
    missing += [name for name in cycle_fields if name not in _assigned_fields(RequestResponseCycle.__init__)]
    missing += [name for name in ("write_paused",) if name not in _assigned_fields(FlowControl.__init__)]
    missing += [name for name in ("default_headers",) if not hasattr(ServerState(), name)]
    assert missing == [], f"uvicorn {uvicorn.__version__} has no {', '.join(missing)}"


def _assigned_fields(method):
    return set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(method)))
