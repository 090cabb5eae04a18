"""While no model has room, requests are rejected before their bodies are read, and cost next to nothing."""

import asyncio
import json
import logging
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.client import parse_headers

import httpx
import pytest

from bertsmith.serve.server_config import Limits
from tests.unit.serve.serving import Slowly, application_of, connected, get, live, on_a_line, post, until

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
        for _ in range(2000):
            if (slow.batches, queue.requests) == ([1], waiting):
                break
            time.sleep(0.01)
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


def test_whoever_is_rejected_is_counted_and_logged(mood, monkeypatch, caplog):
    monkeypatch.setattr(type(mood.load_shedding), "is_overloaded", property(lambda _: True))
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        reply = post(mood, "/classify", "no object, and nobody looks", headers={"x-request-id": "abc"})
    assert reply.status_code == 429
    (line,) = [each for each in caplog.records if each.name == "bertsmith.serve"]
    assert (line.fields["request_id"], line.fields["route"], line.fields["status"]) == (
        "abc",
        "/classify",
        429,
    )
    assert 'bertsmith_requests_total{route="/classify",status="429"} 1.0' in get(mood, "/metrics").text


def test_a_server_that_drains_says_so_however_full_it_is(mood, monkeypatch):
    monkeypatch.setattr(type(mood.load_shedding), "is_overloaded", property(lambda _: True))
    assert post(mood, "/classify", TEXT).status_code == 429
    mood.status.is_draining = True
    assert post(mood, "/classify", TEXT).status_code == 503


# ---- lines


@pytest.fixture
def full(mood, monkeypatch):
    monkeypatch.setattr(type(mood.load_shedding), "is_overloaded", property(lambda _: True))
    return mood


def test_the_end_of_a_request_that_came_in_parts_is_not_taken_for_a_request(full):
    async def say(protocol, wire):
        protocol.data_received(b"POST /classify HTTP/1.1\r\nHost: here\r\nX: ")
        protocol.data_received(request())  # the rest of that field, by its place
        assert b" 429 " not in wire.written

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
