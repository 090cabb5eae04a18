"""Requests that meet at a server share batches, and each gets what it would get alone."""

import asyncio

import pytest

from bertsmith.serve.server_config import Limits
from tests.unit.serve.serving import Slowly, application_of, error_of, post, talk, until

WORDS = [
    "the",
    "cat",
    "sits",
    "on",
    "a",
    "mat",
    "and",
    "my",
    "dog",
    "runs",
    "in",
    "cold",
    "rain",
    "by",
    "tea",
]


def some_texts(count):
    return [" ".join(WORDS[number % 5 : number % 5 + 1 + number % 11]) for number in range(count)]


@pytest.mark.parametrize(
    ("model", "path", "body_of"),
    [
        ("mood", "/classify", lambda text: {"texts": [text]}),
        ("names", "/tag", lambda text: {"texts": [text]}),
        ("toy", "/fill", lambda text: {"text": f"{text} [MASK]"}),
        ("reader", "/answer", lambda text: {"question": "where is it?", "passage": text}),
        ("chooser", "/choose", lambda text: {"context": text, "options": ["it is cold", "the tree", "a"]}),
        ("toy", "/next", lambda text: {"first": text, "second": "it is cold"}),
        ("toy", "/embed", lambda text: {"inputs": text}),
    ],
)
def test_many_at_once_get_what_each_gets_alone(model, path, body_of, folders):
    served = {model: folders[model]}
    together, alone = application_of(served), application_of(served, limits=Limits(batch_tokens=1))
    bodies = [body_of(text) for text in some_texts(24)]

    async def say(client):
        return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    found, expected = talk(together, say), talk(alone, say)
    assert {reply.status_code for reply in [*found, *expected]} == {200}
    for ours, theirs in zip(found, expected, strict=True):
        assert _flat(ours.json()) == pytest.approx(_flat(theirs.json()), abs=2e-5)


def _flat(value):
    """All numbers and strings of a reply, in order."""
    if isinstance(value, dict):
        return [part for each in value.values() for part in _flat(each)]
    if isinstance(value, list):
        return [part for each in value for part in _flat(each)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def test_texts_and_pairs_that_meet_are_asked_apart(folders):
    application = application_of({"mood": folders["mood"]})
    slow = Slowly(application, "mood")
    forms = ["cat", ["cat", "dog"], "tea", ["tea", "sun"]]

    async def say(client):
        tasks = [
            asyncio.create_task(client.post("/classify", json={"texts": [form]})) for form in ["a", *forms]
        ]
        await until(lambda: application.models["mood"].queue.requests + sum(slow.batches) == 5)
        slow.may_go.set()
        return await asyncio.gather(*tasks)

    assert {reply.status_code for reply in talk(application, say)} == {200}
    assert len(slow.batches) <= 4  # nothing was refused and asked again


def test_requests_that_meet_share_a_batch(folders):
    application = application_of({"mood": folders["mood"]})
    slow = Slowly(application, "mood")

    async def say(client):
        first = asyncio.create_task(client.post("/classify", json={"texts": ["cat"]}))
        await until(lambda: slow.batches == [1])
        tasks = [asyncio.create_task(client.post("/classify", json={"texts": [text]})) for text in WORDS]
        await until(lambda: application.models["mood"].queue.requests == len(WORDS))
        slow.may_go.set()
        return await asyncio.gather(first, *tasks)

    assert {reply.status_code for reply in talk(application, say)} == {200}
    assert slow.batches == [1, len(WORDS)]


def test_the_crowd_before_a_slow_model_is_reported_to_come_again(folders):
    limits = Limits(queue_requests=3)
    application = application_of({"mood": folders["mood"]}, limits=limits)
    slow = Slowly(application, "mood")

    async def say(client):
        first = asyncio.create_task(client.post("/classify", json={"texts": ["cat"]}))
        await until(lambda: slow.batches == [1])
        tasks = [asyncio.create_task(client.post("/classify", json={"texts": ["cat"]})) for _ in range(8)]
        await until(lambda: sum(task.done() for task in tasks) == 5)
        slow.may_go.set()
        return await asyncio.gather(first, *tasks)

    replies = talk(application, say)
    refused = [reply for reply in replies if reply.status_code == 429]
    assert [reply.status_code for reply in replies].count(200) == 4
    assert len(refused) == 5
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert "too many requests are waiting" in error_of(refused[0])
    assert post(application, "/classify", {"texts": ["cat"]}).status_code == 200
