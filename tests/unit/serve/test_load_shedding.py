"""While no model has room, requests are rejected before their bodies are read, and cost next to nothing."""

import asyncio
import json
import logging
import re
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import parse_headers
from types import SimpleNamespace

import httpx
import pytest

from bertsmith.serve.server_config import Limits
from tests.unit.serve.serving import (
    Slowly,
    Wire,
    application_of,
    connected,
    get,
    live,
    on_a_line,
    post,
    until,
    wait_for,
)

TEXT = {"texts": ["a cat"]}
BODY = b'{"texts":["a cat"]}'
LIMITS = Limits(queue_requests=1)


def request(*fields, line=b"POST /classify HTTP/1.1", body=BODY):
    """A request as it comes from a line."""
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join([line, b"Host: here", length, *fields, b"", b""]) + body


@pytest.fixture
def mood(folders):
    return application_of({"mood": folders["mood"]}, limits=LIMITS)


@contextmanager
def crowd(application, address):
    """Two requests that fill the server: one is at work, one waits."""
    slow = Slowly(application, "mood")
    queue = application.models["mood"].queue
    asked = []
    for waiting in range(2):
        asked.append(
            threading.Thread(target=partial(httpx.post, f"{address}/classify", json=TEXT, timeout=60))
        )
        asked[-1].start()
        wait_for(lambda waiting=waiting: (slow.batches, queue.requests) == ([1], waiting))
    try:
        yield
    finally:
        slow.may_go.set()
        for thread in asked:
            thread.join(30)


# ---- the refusal


def ask(line, data):
    """Status, headers and body of the reply to a request that is sent in one go, as few libraries do."""
    line.sendall(data)
    with line.makefile("rb") as reply:
        status = int(reply.readline().split()[1])
        headers = {name.lower(): value for name, value in parse_headers(reply).items()}
        return status, headers, reply.read(int(headers["content-length"]))


def test_a_request_that_finds_no_room_is_reported_when_to_come_again(mood):
    with live(mood, LIMITS) as address, crowd(mood, address), connected(address) as line:
        code, headers, body = ask(line, request(b"X-Request-Id: abc"))
    assert (code, headers["retry-after"], headers["x-request-id"]) == (429, "1", "abc")
    error = json.loads(body)["error"]
    assert error["message"] == "too many requests are waiting; try again in 1 s"
    assert (error["type"], error["request_id"]) == ("overloaded", "abc")


def test_a_line_on_which_requests_were_sent_away_serves_on(mood):
    asking = request(b"Content-Type: application/json")
    health = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    with live(mood, LIMITS) as address, connected(address) as line:
        with crowd(mood, address):
            statuses = [ask(line, each)[0] for each in (asking, asking, health, asking)]
        statuses.append(ask(line, asking)[0])
    assert statuses == [429, 429, 200, 429, 200]


def test_a_body_that_comes_after_its_head_was_rejected_is_passed_over(mood):
    with live(mood, LIMITS) as address, httpx.Client(base_url=address) as client, crowd(mood, address):
        statuses = [
            client.post("/classify", json=TEXT).status_code for _ in range(3)
        ]  # head first, then body
        statuses.append(client.get("/health").status_code)
    assert statuses == [429, 429, 429, 200]


def test_too_many_open_requests_are_rejected_before_their_bodies_are_read(folders):
    limits = Limits(open_requests=2)
    application = application_of({"mood": folders["mood"]}, limits=limits)
    whole = request(b"Content-Type: application/json")
    head, body = whole[: -len(BODY)], BODY
    with live(application, limits) as address, ExitStack() as lines:
        waiting = [lines.enter_context(connected(address)) for _ in range(2)]
        for each in waiting:
            each.sendall(head)
        wait_for(lambda: application.status.open_requests == 2)
        with connected(address) as third:
            assert ask(third, head)[0] == 429
        assert [ask(each, body)[0] for each in waiting] == [200, 200]
    assert application.status.open_requests == 0


def test_a_fault_here_is_logged_and_the_request_goes_on(mood, monkeypatch, caplog):
    monkeypatch.setattr(mood.early_rejection, "of", lambda _: 1 / 0)
    with live(mood, LIMITS) as address:
        assert httpx.post(f"{address}/classify", json=TEXT, timeout=20).status_code == 200
    (failure,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert failure.fields["failure"] == "ZeroDivisionError"


# ---- lines


@pytest.fixture
def full(mood, monkeypatch):
    monkeypatch.setattr(type(mood.load_shedding), "is_overloaded", property(lambda _: True))
    return mood


def answers(application, *requests):
    """What is written to a line at once, while these come on it."""
    written = []

    async def say(protocol, wire):
        for each in requests:
            before = len(wire.written)
            protocol.data_received(each)
            written.append(bytes(wire.written[before:]))

    on_a_line(application, say)
    return written


def test_whoever_is_rejected_is_counted_and_logged(full, caplog):
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        answers(full, request(b"X-Request-Id: abc", body=b"no object, and nobody looks"))
    (line,) = [each for each in caplog.records if each.name == "bertsmith.serve"]
    assert (line.fields["request_id"], line.fields["route"], line.fields["status"]) == (
        "abc",
        "/classify",
        429,
    )
    assert 'bertsmith_requests_total{route="/classify",status="429"} 1.0' in get(full, "/metrics").text


def test_of_many_that_are_rejected_one_in_a_second_is_logged_and_all_are_counted(full, caplog, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("bertsmith.serve.monitoring.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        for seconds in (0.0, 0.9, 0.2, 5.0):
            clock[0] += seconds
            answers(full, *[request()] * 5)
    lines = [each.fields["left_out"] for each in caplog.records if each.name == "bertsmith.serve"]
    assert lines == [0, 9, 4]
    assert 'bertsmith_requests_total{route="/classify",status="429"} 20.0' in get(full, "/metrics").text


def test_requests_that_come_in_one_piece_are_rejected_at_once_and_each(full):
    written = answers(full, 3 * request(), request())
    assert [each.count(b"HTTP/1.1 429 ") for each in written] == [3, 1]
    ids = re.findall(rb"x-request-id: (\w{32})\r\n", b"".join(written))
    assert len(set(ids)) == 4 and all(b"".join(written).count(each) == 2 for each in ids)  # head and body


def second_line(protocol):
    """Another connection of the same server."""
    other = type(protocol)(config=protocol.config, server_state=protocol.server_state, app_state={})
    other.connection_made(Wire())
    return other


def test_a_burst_that_is_read_before_any_of_it_is_counted_passes_no_limit(folders):
    application = application_of({"mood": folders["mood"]}, limits=Limits(open_requests=1))

    async def say(protocol, wire):
        lines = [protocol, *(second_line(protocol) for _ in range(4))]
        for each in lines:
            each.data_received(request()[: -len(BODY)])
        rejected = [each for each in lines if each is not protocol]
        await until(lambda: all(b"HTTP/1.1 429 " in each.transport.written for each in rejected))
        assert application.status.open_requests == 1 and not wire.written
        for each in lines[1:]:
            each.connection_lost(None)

    on_a_line(application, say)


def test_of_requests_behind_one_at_work_each_is_rejected_in_its_turn(mood, monkeypatch):
    monkeypatch.setattr(type(mood.load_shedding), "is_overloaded", property(lambda _: True))

    async def say(protocol, wire):
        protocol.data_received(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" + 3 * request())
        await until(lambda: wire.written.count(b"HTTP/1.1 ") == 4)
        assert re.findall(rb"HTTP/1.1 (\d+) ", wire.written) == [b"200", b"429", b"429", b"429"]

    on_a_line(mood, say)


def test_a_line_that_was_rejected_just_now_is_not_the_one_idle_for_longest(full):
    async def say(protocol, wire):
        type(protocol).max_connections = 2  # a class of this server alone
        idle = second_line(protocol)
        protocol.data_received(request())
        new = second_line(protocol)
        assert idle.transport.is_aborted and not wire.is_aborted
        for each in (idle, new):
            each.connection_lost(None)

    on_a_line(full, say)


def test_a_line_on_which_requests_never_end_where_data_does_is_not_late(full):
    async def say(protocol, wire):
        whole = 12 * request()
        step = len(request())
        protocol.data_received(whole[:30])
        for first in range(30, len(whole) - step, step):
            protocol.data_received(whole[first : first + step])
            await asyncio.sleep(0.06)  # 0.6 s in all, and a head may take 0.5
        assert not wire.is_aborted and wire.written.count(b"HTTP/1.1 429 ") >= 10

    on_a_line(full, say, head_seconds=0.5)


def test_whoever_goes_on_with_nonsense_behind_a_refusal_gets_no_second_reply(full):
    async def say(protocol, wire):
        head = b"POST /classify HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        protocol.data_received(head + b"no number\r\n")
        assert wire.written.count(b"HTTP/1.1 ") == 1 and wire.is_cut

    on_a_line(full, say)


def test_a_line_that_is_to_be_closed_is_closed_behind_a_refusal(full):
    async def say(protocol, wire):
        protocol.data_received(request(b"Connection: close"))
        assert b"HTTP/1.1 429 " in wire.written and b"\r\nconnection: close\r\n" in wire.written
        assert wire.is_cut

    on_a_line(full, say)


def test_a_page_of_another_site_can_read_that_it_was_rejected(folders, monkeypatch):
    friend = "https://friend.example"
    application = application_of({"mood": folders["mood"]}, limits=LIMITS, allow_origins=(friend,))
    monkeypatch.setattr(type(application.load_shedding), "is_overloaded", property(lambda _: True))
    origins = (b"Origin: https://friend.example", b"Origin: https://other.example", b"X: y")
    written = answers(application, *(request(each) for each in origins))
    allowed = b"access-control-allow-origin: https://friend.example"
    assert [allowed in each for each in written] == [True, False, False]
    assert [b"access-control-expose-headers" in each for each in written] == [True, True, False]


def test_a_server_that_drains_says_so_however_full_it_is(full):
    (refusal,) = answers(full, request())
    assert b" 429 " in refusal
    full.status.is_draining = True
    assert answers(full, request()) == [b""]
    assert post(full, "/classify", TEXT).status_code == 503


def test_the_end_of_a_request_that_came_in_parts_is_not_taken_for_a_request(full):
    async def say(protocol, wire):
        protocol.data_received(b"POST /classify HTTP/1.1\r\nHost: here\r\nX: ")
        protocol.data_received(request())  # the rest of that field, by its place
        assert wire.written.count(b"HTTP/1.1 ") == 1

    on_a_line(full, say)


def test_whoever_does_not_read_refusals_makes_the_server_keep_none(full):
    async def say(protocol, wire):
        protocol.pause_writing()
        for _ in range(3):
            protocol.data_received(request())
        await asyncio.sleep(0.05)
        assert wire.written.count(b"HTTP/1.1 429 ") <= 1

    on_a_line(full, say)


def test_the_rest_of_a_rejected_request_leaves_its_line_open_for_the_next(full):
    async def say(protocol, wire):
        protocol.timeout_keep_alive = 1.5
        whole = request()
        protocol.data_received(whole[: -len(BODY)])
        await until(lambda: b" 429 " in wire.written)
        protocol.data_received(BODY)
        await asyncio.sleep(0.2)  # longer than a head may take
        assert not wire.is_cut
        await until(lambda: wire.is_cut)

    on_a_line(full, say)


def test_a_line_that_is_idle_after_a_refusal_is_closed_in_the_end_and_not_before(full):
    async def say(protocol, wire):
        protocol.timeout_keep_alive = 1.5
        protocol.data_received(request())
        await asyncio.sleep(0.2)  # longer than a head may take
        assert not wire.is_cut
        await until(lambda: wire.is_cut)

    on_a_line(full, say)
