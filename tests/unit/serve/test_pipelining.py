"""Requests that come in one piece are answered as if they came in two, and in their order."""

import json
import time

import pytest

from bertsmith.serve.server import MAX_PIPELINED
from tests.unit.serve.serving import Slowly, application_of, connected, live, on_a_line, until, wait_for


def request(body, *fields, path="/classify"):
    lines = (f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json", *fields)
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def asking(*texts):
    return json.dumps({"texts": texts}).encode()


def read_reply(stream):
    """Status line, headers without the date, and body of the next reply."""
    status, headers = stream.readline(), []
    while (line := stream.readline()) != b"\r\n":
        headers.append(line)
    (length,) = [int(each.split(b":")[1]) for each in headers if each.startswith(b"content-length")]
    return status, [each for each in headers if not each.startswith(b"date:")], stream.read(length)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", asking("a cat")),
        ("/classify?a=b", asking("a cat")),
        ("/classify", b"{"),
        ("/nowhere", b"{}"),
        ("/classify", asking("x" * 300_000)),
        ("/health", b""),
    ],
)
def test_a_request_in_one_piece_gets_the_reply_that_it_gets_in_two(path, body, address):
    sent = request(body, "X-Request-Id: same", "Connection: keep-alive", path=path)
    with connected(address) as line, line.makefile("rb") as stream:
        line.sendall(sent)
        whole = read_reply(stream)
        line.sendall(sent[:20])
        time.sleep(0.05)
        line.sendall(sent[20:])
        assert read_reply(stream) == whole


def test_a_line_is_served_in_order_though_nobody_waits_for_replies(folders):
    application = application_of({"mood": folders["mood"]})
    slow = Slowly(application, "mood")
    with live(application) as address, connected(address) as line, line.makefile("rb") as stream:
        for number in range(5):
            line.sendall(request(asking("cat"), f"X-Request-Id: {number}"))
            time.sleep(0.03)
        line.sendall(
            b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" + request(asking("dog"), "X-Request-Id: 6")
        )
        wait_for(lambda: slow.batches)
        time.sleep(0.03)
        assert slow.batches == [1]  # the second is not begun before the first is answered
        slow.may_go.set()
        replies = [read_reply(stream) for _ in range(7)]
    assert {status for status, _, _ in replies} == {b"HTTP/1.1 200 OK\r\n"}
    ids = [next(each for each in headers if each.startswith(b"x-request-id")) for _, headers, _ in replies]
    assert [each[14:-2] for each in ids[:5] + ids[6:]] == [b"0", b"1", b"2", b"3", b"4", b"6"]


def test_a_line_is_closed_where_the_reply_says_so(folders):
    application = application_of({"mood": folders["mood"]})
    with live(application) as address, connected(address) as line, line.makefile("rb") as stream:
        application.status.is_draining = True
        line.sendall(request(asking("cat")))
        status, headers, _ = read_reply(stream)
        assert (status, stream.read()) == (b"HTTP/1.1 503 Service Unavailable\r\n", b"")
    assert b"connection: close\r\n" in headers


def test_no_more_requests_wait_behind_another_one_than_are_parsed_in_a_moment(application):
    async def say(protocol, wire):
        protocol.data_received(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" * 5000)
        assert len(protocol.pipeline) <= MAX_PIPELINED
        await until(lambda: wire.is_cut)

    on_a_line(application, say)


def test_what_comes_while_a_request_is_at_work_is_not_piled_up(application):
    async def say(protocol, wire):
        protocol.data_received(request(asking("cat")))
        assert not protocol.flow.read_paused
        protocol.data_received(request(asking("dog")))
        assert protocol.flow.read_paused
        await until(lambda: wire.written.count(b"HTTP/1.1 200 OK") == 2)
        assert not protocol.flow.read_paused

    on_a_line(application, say)
