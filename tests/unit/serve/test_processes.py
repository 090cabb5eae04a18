"""Several HTTP processes before one model process answer as one process does, and share its limits."""

import asyncio
import json
import logging
import threading
import time

import httpx
import pytest

from bertsmith.serve import channel, model_process, process_server, remote_models
from bertsmith.serve.channel import Kind
from bertsmith.serve.process_server import default_http_processes
from bertsmith.serve.server import listen, listen_together
from bertsmith.serve.server_config import Limits, share_of
from tests.unit.serve.processes import http_sides
from tests.unit.serve.serving import Slowly, error_of, until

TEXT = {"texts": ["the cat"], "model": "mood"}
LONG = "the cat sits on the mat in the warm sun and a dog plays in the snow " * 80
PAIR = {"first": "the cat sits", "second": "on the mat", "model": "toy"}
ASKED = [
    ("/fill", {"text": "the [MASK] sits on the [MASK]", "top": 3}),
    ("/next", {"first": "we got some time", "second": "should we get tea?"}),
    ("/classify", {"texts": ["the sun", ["snow", "and rain"]]}),
    ("/classify", {"texts": ["the sun", "snow and rain"]}),
    ("/classify", {"texts": ["the sun"], "model": "topics"}),
    ("/classify", {"texts": [["the sun", "the warm sun"]], "model": "alike"}),
    ("/tag", {"texts": ["Mike lives here", LONG]}),
    ("/answer", {"question": "who sits?", "passage": "the cat sits on the mat"}),
    ("/answer", {"question": "who sits?", "passage": LONG, "best": 2}),
    ("/choose", {"context": "the cat", "options": ["sits", "plays", "sleeps"]}),
    ("/compare", {"texts": ["the cat", "a dog", "the sun"]}),
    ("/look/tokens", {**PAIR, "seed": 7}),
    ("/look/attention", PAIR),
    ("/look/embedding", {**PAIR, "token": 1}),
    ("/look/heads", PAIR),
    ("/look/head", {**PAIR, "layer": 1, "head": None}),
    ("/look/head-steps", {**PAIR, "layer": 1, "head": 0, "token": 2}),
    ("/look/senses", {"word": "cat", "sentences": ["the cat sits", "a cat plays", "my cat"]}),
    ("/look/similarity", {"texts": ["the cat", "a dog", "the sun"]}),
    ("/look/guesses", {"text": "the [MASK] sits", "top": 2}),
    ("/look/words", {"first": "the cat sits on my mat", "model": "mood"}),
    ("/look/words", {"first": "who sits?", "second": "the cat sits", "model": "reader"}),
    ("/v1/embeddings", {"input": ["the cat", "a dog"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [5, 6, 7], "dimensions": 4}),
    ("/v1/embeddings", {"input": [[7, 7, 9, 30, 6], [9, 12]]}),
    ("/embed", {"inputs": "the cat", "normalize": False}),
    ("/embed", {"inputs": [LONG] * 4, "truncate": True}),
    ("/predict", {"inputs": "the cat", "raw_scores": True}),
    ("/rerank", {"query": "the cat", "texts": ["a dog", "my cat"], "return_text": True}),
    ("/fill", {"text": "no mask here"}),
    ("/embed", {"inputs": LONG}),
    ("/embed", {"inputs": ["\u200b"]}),
    ("/look/tokens", {"first": " "}),
    ("/look/embedding", {**PAIR, "token": 400}),
    ("/classify", {"texts": ["x"], "model": "nobody"}),
    ("/tag", {"texts": 5}),
    ("/nowhere", {}),
]


@pytest.fixture
def mood(folders):
    return {"mood": folders["mood"]}


def in_processes(folders, say, **more):
    """What comes of talking to a server of two HTTP processes."""

    async def main():
        async with http_sides(folders, **more) as sides:
            return await say(sides)

    return asyncio.run(main())


async def ask(client, path, body, request_id="one"):
    headers = {"content-type": "application/json", "x-request-id": request_id}
    return await client.post(path, content=json.dumps(body).encode(), headers=headers)


def told(reply):
    return reply.status_code, sorted(reply.headers.items()), reply.content


def test_every_request_gets_the_same_bytes_as_from_one_process(application, folders):
    async def say(sides):
        here = httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://here")
        for number, (path, body) in enumerate(ASKED):
            expected = await ask(here, path, body)
            assert told(await ask(sides.clients[number % 2], path, body)) == told(expected), path
            statuses.append(expected.status_code)
        for path in ("/models", "/v1/models", "/health", "/ready", "/openapi.json", "/"):
            own = {"x-request-id": "one"}
            expected = await here.get(path, headers=own)
            assert told(await sides.clients[0].get(path, headers=own)) == told(expected), path

    statuses = []
    in_processes(folders, say)
    assert statuses.count(200) == 28  # and the rest are errors, of four kinds
    assert set(statuses) == {200, 404, 422}


@pytest.mark.parametrize(("words", "in_loop"), [(10, True), (12_000, False)])
def test_many_tokens_go_between_processes_without_holding_up_the_event_loop(
    folders, monkeypatch, words, in_loop
):
    threads = []

    def note(own):
        def noted(given):
            threads.append(threading.current_thread() is threading.main_thread())
            return own(given)

        return noted

    for name in ("encode_prediction", "decode_prediction"):
        monkeypatch.setattr(channel, name, note(getattr(channel, name)))
    names = {"names": folders["names"]}
    reply = in_processes(names, lambda sides: ask(sides.clients[0], "/tag", {"texts": ["! " * words]}))
    assert reply.status_code == 200
    assert threads == [in_loop, in_loop]


def test_what_reads_masks_is_made_before_the_first_request(folders):
    async def say(sides):
        assert made(sides.models["toy"].tokenizer)
        assert made((await sides.applications[0].models["toy"].reader()).tokenizer)

    def made(tokenizer):
        return frozenset([tokenizer.mask_token]) in tokenizer._readers

    in_processes({"toy": folders["toy"]}, say)


def test_a_fault_is_logged_under_the_id_of_its_request(mood, caplog):
    async def say(sides):
        sides.models["mood"].queue._predict = lambda key, inputs: 1 / 0
        return await ask(sides.clients[1], "/classify", TEXT, "its-id")

    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        reply = in_processes(mood, say)
    assert reply.status_code == 500
    assert "the server failed" in error_of(reply)
    failure, request = caplog.records
    assert failure.fields["failure"] == "ZeroDivisionError"
    assert failure.fields["places"]
    assert failure.fields["request_id"] == request.fields["request_id"] == "its-id"


# ---- one queue


def test_requests_of_different_http_processes_share_a_batch_and_are_fair_to_each_other(mood):
    async def say(sides):
        slow, queue = Slowly(sides, "mood"), sides.models["mood"].queue
        asked = [asyncio.create_task(ask(sides.clients[0], "/classify", TEXT))]
        await until(lambda: slow.batches == [1])
        asked += [asyncio.create_task(ask(client, "/classify", TEXT)) for client in sides.clients]
        await until(lambda: queue.requests == 2)
        assert len(queue._ends) == 2  # the same address, yet two connections
        slow.may_go.set()
        assert [(await each).status_code for each in asked] == [200] * 3
        return slow.batches

    assert in_processes(mood, say) == [1, 2]


def test_what_waits_through_one_http_process_leaves_no_room_for_another(mood):
    async def say(sides):
        slow, load = Slowly(sides, "mood"), sides.load
        asked = [asyncio.create_task(ask(sides.clients[0], "/classify", TEXT))]
        await until(lambda: slow.batches == [1])
        assert load.free(0) > 0
        asked += [asyncio.create_task(ask(sides.clients[0], "/classify", TEXT)) for _ in range(2)]
        await until(lambda: load.free(0) <= 0)
        assert sides.applications[1].load_shedding.is_overloaded
        refused = await ask(sides.clients[1], "/classify", TEXT)
        slow.may_go.set()
        assert [(await each).status_code for each in asked] == [200] * 3
        assert load.free(0) > 0
        return refused

    refused = in_processes(mood, say, limits=Limits(queue_requests=2))
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"


def test_what_is_on_its_way_takes_of_the_room(mood):
    async def say(sides):
        sides.load.publish(0, free=2.5, retry_seconds=3, is_loaded=True)
        for process in (0, 1):
            sides.load.count_sent(process)
        assert sides.load.free(0) == 0.5
        sides.load.count_sent(1)
        assert sides.applications[0].load_shedding.is_overloaded
        sides.load.count_taken(0)
        assert sides.load.free(0) == 0.5
        sides.load.forget(1)
        assert sides.load.free(0) == 2.5

    in_processes(mood, say)


def test_what_runs_out_of_time_is_taken_out_of_the_queue(mood):
    async def say(sides):
        slow, queue = Slowly(sides, "mood"), sides.models["mood"].queue
        first = asyncio.create_task(ask(sides.clients[0], "/classify", TEXT))
        await until(lambda: slow.batches == [1])
        second = asyncio.create_task(ask(sides.clients[1], "/classify", TEXT))
        await until(lambda: queue.requests == 1)
        assert [(await each).status_code for each in (first, second)] == [504, 504]
        await until(lambda: queue.requests == 0)
        slow.may_go.set()
        return slow.batches

    assert in_processes(mood, say, limits=Limits(request_seconds=1.0)) == [1]


def test_a_long_request_is_rejected_by_what_the_model_process_has_measured(mood):
    async def say(sides):
        queue = sides.models["mood"].queue
        queue._part_speed, queue._parts_measured, queue._part_measured = 10.0, 100, time.monotonic()
        return await ask(sides.clients[0], "/classify", {"texts": ["the cat " * 20] * 200})

    reply = in_processes(mood, say)
    assert reply.status_code == 413
    assert "this server computes" in error_of(reply)


def test_what_is_cancelled_before_it_began_leaves_nothing_behind(mood, recwarn):
    async def say(sides):
        channel = sides.channels[0]
        before = asyncio.all_tasks()
        channel.on_frame(Kind.PREDICT, 1, b"")
        channel.on_frame(Kind.CANCEL, 1, b"")
        await asyncio.wait(asyncio.all_tasks() - before)
        await asyncio.sleep(0)
        return channel._tasks

    assert in_processes(mood, say) == {}
    assert not [str(each.message) for each in recwarn if "never awaited" in str(each.message)]


# ---- metrics


def counted(text, name):
    """The value of a metric."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_every_http_process_tells_the_metrics_of_all(mood):
    async def say(sides):
        for client in (0, 1, 1, 1):
            await ask(sides.clients[client], "/classify", TEXT)
        texts = [(await client.get("/metrics")).text for client in sides.clients]
        sides.channels[1].close()
        await sides.channels[1].lost
        return [*texts, (await sides.clients[0].get("/metrics")).text]

    texts = in_processes(mood, say)
    classified = 'bertsmith_requests_total{route="/classify",status="200"}'
    assert [counted(text, classified) for text in texts] == [4, 4, 4]  # also of the one that has ended
    for text in texts[:2]:
        assert counted(text, 'bertsmith_request_seconds_bucket{le="+Inf",route="/classify"}') == 4
        assert counted(text, 'bertsmith_batch_requests_count{model="mood",question="classify"}') == 4
        assert counted(text, 'bertsmith_model_loaded{model="mood"}') == 1
    assert [counted(text, "bertsmith_open_requests ") for text in texts] == [1, 1, 1]


def test_a_silent_http_process_does_not_hold_up_the_metrics_of_the_others(mood, monkeypatch):
    monkeypatch.setattr(model_process, "SAMPLES_SECONDS", 0.05)

    async def say(sides):
        monkeypatch.setattr(sides.applications[1].remote.channel, "tell_samples", lambda: None)
        return (await sides.clients[0].get("/metrics")).text

    assert "bertsmith_open_requests 1.0" in in_processes(mood, say)


# ---- processes that end


def test_the_work_of_an_http_process_that_ends_is_dropped(mood):
    async def say(sides):
        slow, queue = Slowly(sides, "mood"), sides.models["mood"].queue
        first = asyncio.create_task(ask(sides.clients[0], "/classify", TEXT))
        await until(lambda: slow.batches == [1])
        second = asyncio.create_task(ask(sides.clients[1], "/classify", TEXT))
        await until(lambda: queue.requests == 1)
        sides.channels[1].close()
        await sides.channels[1].lost
        await until(lambda: queue.requests == 0)
        slow.may_go.set()
        return await first, await second, await ask(sides.clients[1], "/classify", TEXT)

    answered, waiting, late = in_processes(mood, say)
    assert answered.status_code == 200
    for reply in (waiting, late):
        assert reply.status_code == 503
        assert error_of(reply) == "the process that computes has ended"


def test_a_server_whose_model_process_does_not_answer_is_not_ready(mood, monkeypatch):
    monkeypatch.setattr(remote_models, "ALIVE_SECONDS", 0.05)

    async def say(sides):
        sides.channels[0].on_frame = lambda *_: None  # as if the model process were stopped
        return await sides.clients[0].get("/ready")

    reply = in_processes(mood, say)
    assert reply.status_code == 503
    assert error_of(reply) == "the process that computes does not answer"


# ---- the port and the number of processes


def test_a_port_is_shared_by_the_sockets_of_one_server_and_nobody_else():
    sockets = listen_together("127.0.0.1", 0, 3)
    port = sockets[0].getsockname()[1]
    try:
        assert [each.getsockname()[1] for each in sockets] == [port] * 3
        for count in (1, 2):
            with pytest.raises(Exception, match=f"127.0.0.1:{port}: cannot listen"):
                listen_together("127.0.0.1", port, count)
        with pytest.raises(Exception, match="cannot listen"):
            listen("127.0.0.1", port)
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize(
    ("device", "cores", "processes"),
    [("cpu", 64, 1), ("cuda", 16, 8), ("cuda:1", 64, 8), ("cuda", 6, 3), ("cuda", 1, 1), ("auto", 16, 8)],
)
def test_there_are_several_http_processes_before_a_gpu(device, cores, processes, monkeypatch):
    monkeypatch.setattr(process_server.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(process_server.torch.cuda, "is_available", lambda: True)
    assert default_http_processes(device) == processes


def test_the_limits_of_a_server_are_shared_by_its_http_processes():
    own = share_of(Limits(connections=100, open_requests=10, held_bytes=64, queue_requests=5), 4)
    assert (own.connections, own.open_requests, own.held_bytes, own.queue_requests) == (25, 3, 16, 5)
