"""While all is full, requests are sent away by their bytes, as they would be by the gate."""

import asyncio
import json
import logging
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.client import parse_headers

import h11
import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bertsmith.serve.doorway import Doorway
from bertsmith.serve.plain import plain_request
from bertsmith.serve.settings import Limits
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


# ---- which requests


LINES = [b"POST /fill HTTP/1.1", b"POST /fill?a=b HTTP/1.1", b"POST /f%69ll HTTP/1.1", b"POST * HTTP/1.1"]
LINES += [b"GET /fill HTTP/1.1", b"POST /fill HTTP/1.0", b"POST  /fill HTTP/1.1", b"POST /\xff HTTP/1.1"]
FIELDS = [b"Host: here", b"host:here", b"Content-Length: 4", b"content-length:  4\t", b"Content-Length: 5"]
FIELDS += [
    b"Content-Length: +4",
    b"Transfer-Encoding: chunked",
    b"Connection: close",
    b"Expect: 100-continue",
]
FIELDS += [
    b"Connection: Keep-Alive",
    b"X-Request-Id: abc",
    b"X-Request-Id: \xe9",
    b"A: \x00",
    b"A : b",
    b" b",
]
FIELDS += [b"A: b\nTransfer-Encoding: chunked", b"A: b\rC: d", b": b", b"A:", b"Origin: https://a.example"]


@given(
    line=st.sampled_from(LINES),
    fields=st.lists(st.sampled_from(FIELDS), max_size=5),
    ends=st.sampled_from([b"\r\n", b"\n"]),
    body=st.sampled_from([b"abcd", b"abc", b"abcdPOST / HTTP/1.1\r\n\r\n", b"", b"\r\n\r\n"]),
)
@example(line=LINES[0], fields=FIELDS[:1] + FIELDS[2:3] + FIELDS[10:11], ends=b"\r\n", body=b"abcd")
def test_what_is_taken_for_one_whole_request_is_one(line, fields, ends, body):
    data = ends.join([line, *fields, b"", b""]) + body
    found = plain_request(data)
    if found is None:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(data)
    head, content, end = (server.next_event() for _ in range(3))
    assert isinstance(head, h11.Request) and isinstance(end, h11.EndOfMessage)
    assert (bytes(content.data), server.trailing_data[0]) == (body, b"")
    assert (head.target.partition(b"?")[0].decode(), list(head.headers)) == (
        found.path,
        found.scope()["headers"],
    )
    assert dict(head.headers).get(b"x-request-id", b"").decode("latin-1") == found.given_id


@pytest.mark.parametrize(
    ("data", "is_plain"),
    [
        (request(), True),
        (request(b"Connection: keep-alive", b"User-Agent: a/1 (b; c)", b"X-Request-Id: abc"), True),
        (request(b"Connection: close"), False),
        (request(b"Transfer-Encoding: chunked"), False),
        (request(b"Expect: 100-continue"), False),
        (request(b"Origin: https://a.example"), False),
        (request(b"content-length: 2"), False),
        (request(line=b"GET /models HTTP/1.1"), False),
        (request()[:-1], False),
        (request() + b"P", False),
    ],
)
def test_only_the_plainest_requests_are_known_by_their_bytes(data, is_plain):
    assert (plain_request(data) is not None) == is_plain


# ---- the refusal


def ask(line, data):
    """Status, headers and body of the reply to a request that is sent in one go, as few libraries do."""
    line.sendall(data)
    with line.makefile("rb") as reply:
        status = int(reply.readline().split()[1])
        headers = {name.lower(): value for name, value in parse_headers(reply).items()}
        return status, headers, reply.read(int(headers["content-length"]))


def test_a_refusal_by_the_bytes_is_the_one_that_the_gate_gives(mood):
    with live(mood, LIMITS) as address, crowd(mood, address), connected(address) as line:
        named = b"X-Request-Id: abc"
        (code, short, body), long = [
            ask(line, request(named, *more)) for more in ((), (b"Origin: https://a.example",))
        ]
    assert (code, body) == (long[0], long[2])
    assert (
        code == 429
        and "too many requests are waiting; try again in 1 s" in json.loads(body)["error"]["message"]
    )
    assert {**short, "date": ""} == {**long[1], "date": ""}


def test_a_line_on_which_requests_were_sent_away_serves_on(mood):
    asking = request(b"Content-Type: application/json")
    health = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    with live(mood, LIMITS) as address, connected(address) as line:
        with crowd(mood, address):
            statuses = [ask(line, each)[0] for each in (asking, asking, health, asking)]
        statuses.append(ask(line, asking)[0])
    assert statuses == [429, 429, 200, 429, 200]


def test_a_body_that_comes_after_its_head_was_refused_is_passed_over(mood):
    with live(mood, LIMITS) as address, httpx.Client(base_url=address) as client, crowd(mood, address):
        statuses = [
            client.post("/classify", json=TEXT).status_code for _ in range(3)
        ]  # head first, then body
        statuses.append(client.get("/health").status_code)
    assert statuses == [429, 429, 429, 200]


def test_whoever_is_sent_away_is_counted_and_logged(mood, monkeypatch, caplog):
    monkeypatch.setattr(type(mood.gate), "is_crowded", property(lambda gate: True))
    sent = request(b"X-Request-Id: abc", body=b"no JSON, and nobody looks")
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        reply = Doorway(mood.gate).turn_away(plain_request(sent), [(b"date", b"now")])
    assert reply.startswith(b"HTTP/1.1 429 Too Many Requests\r\ndate: now\r\n")
    (line,) = caplog.records
    assert (line.facts["request_id"], line.facts["route"], line.facts["status"]) == ("abc", "/classify", 429)
    assert 'bertsmith_requests_total{route="/classify",status="429"} 1.0' in get(mood, "/metrics").text


def test_an_id_of_one_letter_stands_where_it_belongs(mood, monkeypatch):
    monkeypatch.setattr(type(mood.gate), "is_crowded", property(lambda gate: True))
    reply = Doorway(mood.gate).turn_away(plain_request(request(b"X-Request-Id: i")), [])
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: i\r\n" in head
    assert json.loads(body)["error"]["request_id"] == "i"
    assert b"content-length: %d" % len(body) in head


def test_nobody_is_sent_away_by_the_bytes_while_there_is_room_or_the_server_drains(mood, monkeypatch):
    door = Doorway(mood.gate)
    assert door.turn_away(plain_request(request()), []) is None
    monkeypatch.setattr(type(mood.gate), "is_crowded", property(lambda gate: True))
    assert door.turn_away(plain_request(request()), []) is not None
    mood.drain()
    assert door.turn_away(plain_request(request()), []) is None
    assert post(mood, "/classify", TEXT).status_code == 503


# ---- lines


@pytest.fixture
def full(mood, monkeypatch):
    monkeypatch.setattr(type(mood.gate), "is_crowded", property(lambda gate: True))
    return mood


def test_a_refusal_wakes_no_task(full):
    async def say(protocol, wire):
        protocol.data_received(request())
        assert wire.written.startswith(b"HTTP/1.1 429 ")
        assert not protocol.tasks

    on_a_line(full, say)


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


def test_the_rest_of_a_refused_request_leaves_its_line_open_for_the_next(full):
    async def say(protocol, wire):
        protocol.timeout_keep_alive = 0.4
        whole = request()
        protocol.data_received(whole[: -len(BODY)])
        await until(lambda: b" 429 " in wire.written)
        protocol.data_received(BODY)
        await asyncio.sleep(0.2)  # longer than a head may take
        assert not wire.is_cut
        await asyncio.sleep(0.4)
        assert wire.is_cut

    on_a_line(full, say)


def test_a_line_that_is_idle_after_a_refusal_is_closed_in_the_end_and_not_before(full):
    async def say(protocol, wire):
        protocol.timeout_keep_alive = 0.4
        protocol.data_received(request())
        await asyncio.sleep(0.2)  # longer than a head may take
        assert not wire.is_cut
        await asyncio.sleep(0.4)
        assert wire.is_cut

    on_a_line(full, say)
