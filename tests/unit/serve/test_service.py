"""What is weighed before it waits: where tokens are counted, how many, and which model has room."""

import asyncio
import logging
import shutil
import threading
import time

import httpx
import pytest

from bertsmith.inference.task_model import TaskModel
from bertsmith.inference.text_reader import Reader
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.serve import batching, service
from bertsmith.serve.api_errors import overloaded
from bertsmith.serve.batching import BatchQueue
from bertsmith.serve.server_config import Limits
from bertsmith.tasks.task_config import TaskConfig, write_task_config
from tests.unit.serve.serving import Slowly, application_of, error_of, post, talk, until


@pytest.fixture
def counted(monkeypatch):
    """By which threads tokens are counted: the server's own, or others."""
    own, threads = service.tokenized, []

    def counts(bert, request, which):
        threads.append("own" if threading.current_thread() is threading.main_thread() else "other")
        return own(bert, request, which)

    monkeypatch.setattr(service, "tokenized", counts)
    return threads


@pytest.mark.parametrize(
    ("texts", "thread"),
    [
        (["x" * 999], "own"),
        (["x" * 1000], "other"),
        (["x" * 500, "x" * 499], "own"),
        (["x" * 500, ["x" * 250, "x" * 250]], "other"),
    ],
)
def test_the_tokens_of_long_texts_are_counted_where_nobody_has_to_wait_for_it(
    texts, thread, folders, counted
):
    post(application_of({"mood": folders["mood"]}), "/classify", {"texts": texts})
    assert counted == [thread]


@pytest.mark.parametrize(("words", "tokens"), [(10, 12), (62, 64), (63, 64), (500, 64)])
def test_a_text_that_loses_its_end_counts_for_what_is_left_of_it(words, tokens, folders, caplog):
    application = application_of({"toy": folders["toy"]})
    longest = application.models["toy"].info.max_tokens
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        reply = post(application, "/embed", {"inputs": "cat " * (words + longest - 64), "truncate": True})
    assert reply.status_code == 200
    assert caplog.records[-1].fields["tokens"] == tokens + longest - 64


# ---- much text


@pytest.fixture
def read(monkeypatch):
    """The texts that were tokenised."""
    own, texts = service.tokenized, []

    def reads(bert, request, which):
        texts.extend(which)
        return own(bert, request, which)

    monkeypatch.setattr(service, "tokenized", reads)
    return texts


def test_the_query_of_a_ranking_is_tokenised_once_for_all_texts(folders, read):
    application = application_of({"alike": folders["alike"]})
    body = {"query": "cat " * 1000, "texts": ["a dog", "tea", "the sun"], "truncate": True}
    assert post(application, "/rerank", body).status_code == 200
    assert sorted(read) == [0, 1, 2, 3]


def test_a_ranking_of_too_many_tokens_is_rejected_by_its_first_pairs(folders, monkeypatch):
    application = application_of({"alike": folders["alike"]}, limits=Limits(queue_tokens=2000))
    own, made = Reader.pairs, []

    def pairs(reader, first, others, **options):
        made.extend(others)
        return own(reader, first, others, **options)

    monkeypatch.setattr(Reader, "pairs", pairs)
    reply = post(application, "/rerank", {"query": "cat " * 1000, "texts": ["a dog"] * 200, "truncate": True})
    assert reply.status_code == 413
    assert error_of(reply).endswith("tokens; this server accepts 2000")
    assert 0 < len(made) < 10


def test_pairs_with_a_long_query_are_computed_as_the_parts_of_one_long_request(folders, monkeypatch):
    monkeypatch.setattr(batching, "MIN_PART_TOKENS", 100)  # the toy takes 64 tokens of a pair
    monkeypatch.setattr(batching, "PART_SECONDS", 0.0)
    application = application_of({"alike": folders["alike"]})
    body = {"query": "cat " * 12_000, "texts": ["a dog"] * 64, "truncate": True}
    assert post(application, "/rerank", body).status_code == 200
    assert application.models["alike"].queue._parts_measured > 0  # by which others like it are rejected


def test_the_rest_of_a_request_that_is_too_large_is_not_read(folders, read):
    application = application_of({"names": folders["names"]}, limits=Limits(queue_tokens=4000))
    reply = post(application, "/tag", {"texts": ["cat " * 1000] * 100})
    assert reply.status_code == 413
    assert 0 < len(read) < 10


def test_the_rest_of_a_request_that_could_not_be_computed_in_time_is_not_read(folders, read):
    application = application_of({"names": folders["names"]}, limits=Limits(request_seconds=10))
    queue = application.models["names"].queue
    queue._part_speed, queue._part_measured, queue._parts_measured = 1000.0, time.monotonic(), 8
    reply = post(
        application, "/tag", {"texts": ["cat " * 400] * 100}
    )  # the first chunk alone would be in time
    assert reply.status_code == 413
    assert "more tokens; this server computes" in error_of(reply)
    assert len(read) <= 10


def test_a_client_that_hangs_up_is_read_no_further(folders, monkeypatch):
    application = application_of({"names": folders["names"]})
    own, chunks = service.tokenized, []

    def reads(bert, request, which):
        chunks.append(which)
        time.sleep(0.05)
        return own(bert, request, which)

    monkeypatch.setattr(service, "tokenized", reads)

    async def say(client):
        asked = asyncio.create_task(client.post("/tag", json={"texts": ["cat " * 1000] * 200}))
        await until(lambda: len(chunks) >= 2)
        asked.cancel()
        begun = len(chunks)
        await asyncio.sleep(0.3)
        return begun

    begun = talk(application, say)
    assert len(chunks) <= begun + 1 < 50  # which it would have been


def test_a_long_request_that_was_admitted_is_not_sent_away_between_its_chunks(folders, monkeypatch):
    own, admitted = BatchQueue._admit, []

    def admits_once(queue, tokens):
        if admitted:
            raise overloaded(1)
        admitted.append(tokens)
        own(queue, tokens)

    monkeypatch.setattr(BatchQueue, "_admit", admits_once)
    application = application_of({"names": folders["names"]})
    reply = post(application, "/tag", {"texts": ["cat " * 200] * 40})
    assert reply.status_code == 200
    assert len(reply.json()["results"]) == 40
    assert admitted[0] < 40 * 200  # it went in chunks


def test_what_a_model_cannot_read_in_a_later_chunk_is_called_by_its_place_in_the_request(folders):
    application = application_of({"names": folders["names"]})
    reply = post(application, "/tag", {"texts": [*["cat " * 200] * 30, "tea", "\u200b"]})
    assert reply.status_code == 422
    assert error_of(reply).startswith("texts[31]: does not have a token that the model can read")


@pytest.fixture(scope="module")
def windowed(folders, tmp_path_factory):
    """Models that read long texts in windows."""
    text, place = TextSection(longest=64, step=32, long_texts="windows"), tmp_path_factory.mktemp("windowed")
    labels = TaskConfig(task="sst2", kind="classify", metrics=(), labels=("cold", "warm"), text=text)
    number = TaskConfig(task="stsb", kind="regress", metrics=(), text=text)
    for name, like, config in (("windows", "mood", labels), ("numbers", "alike", number)):
        shutil.copytree(folders[like], place / name)
        write_task_config(place / name / "task.json", config)
    return folders | {name: place / name for name in ("windows", "numbers")}


@pytest.mark.parametrize(
    ("path", "model", "long", "short"),
    [
        (
            "/answer",
            "reader",
            {"question": "who?", "passage": "the cat sits. " * 1200},
            {"question": "who?", "passage": "cat"},
        ),
        ("/tag", "names", {"texts": ["the cat sits. " * 1200]}, {"texts": ["a cat"]}),
        ("/classify", "windows", {"texts": ["the cat sits. " * 1200]}, {"texts": ["a cat"]}),
        ("/predict", "numbers", {"inputs": "the cat sits. " * 1200}, {"inputs": "a cat"}),
    ],
)
def test_one_long_text_lets_others_have_their_turn(windowed, monkeypatch, path, model, long, short):
    own, batches = TaskModel._scored, []

    def slow(task_model, encoded):
        for scored in own(task_model, encoded):
            time.sleep(0.1)
            batches.append(encoded.items)
            yield scored

    monkeypatch.setattr(TaskModel, "_scored", slow)
    application = application_of({model: windowed[model]})

    async def say(client):
        asked = asyncio.create_task(client.post(path, json=long))
        await until(lambda: batches)
        transport = httpx.ASGITransport(application, client=("127.0.0.1", 2))  # another connection
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as other:
            replies = [await other.post(path, json=short), await asked]
        return [reply.status_code for reply in replies]

    assert talk(application, say) == [200, 200]
    assert len(batches) > 4 and 0 < batches.index(1) < len(batches) - 1  # amid those of the long text


# ---- several models


@pytest.fixture
def two(folders):
    limits = Limits(queue_requests=1)
    return application_of({"mood": folders["mood"], "toy": folders["toy"]}, limits=limits)


def test_a_model_without_room_keeps_nobody_from_another(two):
    slow = Slowly(two, "mood")

    async def say(client):
        asks = [asyncio.create_task(client.post("/classify", json={"texts": ["cat"]}))]
        await until(lambda: slow.batches == [1])
        asks.append(asyncio.create_task(client.post("/classify", json={"texts": ["cat"]})))
        await until(lambda: two.models["mood"].queue.is_full)
        assert not two.models.are_full
        others = [
            await client.post("/fill", json={"text": "a [MASK]"}),
            await client.post("/classify", json={"texts": ["cat"]}),
        ]
        slow.may_go.set()
        return [*others, *await asyncio.gather(*asks)]

    assert [reply.status_code for reply in talk(two, say)] == [200, 429, 200, 200]


def test_models_are_full_once_each_of_them_is(two):
    slows = [Slowly(two, "mood"), Slowly(two, "toy")]
    bodies = [("/classify", {"texts": ["cat"]}), ("/fill", {"text": "a [MASK]"})]

    async def say(client):
        asks = []
        for slow, (path, body) in zip(slows, bodies, strict=True):
            asks.append(asyncio.create_task(client.post(path, json=body)))
            await until(lambda slow=slow: slow.batches == [1])
            asks.append(asyncio.create_task(client.post(path, json=body)))
        await until(lambda: all(model.queue.is_full for model in two.models))
        assert two.models.are_full
        for slow in slows:
            slow.may_go.set()
        await asyncio.gather(*asks)
        assert not two.models.are_full

    talk(two, say)


def test_whoever_is_sent_away_may_come_when_the_first_model_has_room(two):
    for name, seconds in (("mood", 20), ("toy", 7)):
        queue = two.models[name].queue
        queue._measure_speed(10.0)
        queue._tokens = 10 * seconds
    assert two.models.retry_seconds() == two.models.retry_seconds() == 7


# ---- tokens


@pytest.fixture(scope="module")
def everything(folders):
    """A server of a model for each route; what a test changes it changes back."""
    return application_of({name: folders[name] for name in folders if name != "topics"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fill", {"text": "the [MASK] sits", "model": "toy"}),
        ("/next", {"first": "the cat", "second": "it is cold", "model": "toy"}),
        ("/embed", {"inputs": ["cat", "the dog"], "model": "toy"}),
        ("/classify", {"texts": ["cat", "the dog"], "model": "mood"}),
        ("/classify", {"texts": [["cat", "dog"]], "model": "alike"}),
        ("/answer", {"question": "who sits?", "passage": "the cat sits", "model": "reader"}),
        ("/choose", {"context": "the cat", "options": ["sits", "runs"], "model": "chooser"}),
        ("/look/tokens", {"first": "the cat", "second": "it is cold", "model": "toy"}),
        ("/look/attention", {"first": "the cat", "model": "toy"}),
        ("/look/senses", {"word": "cat", "sentences": ["the cat", "a cat"], "model": "toy"}),
    ],
)
def test_texts_are_tokenised_once(path, body, everything, monkeypatch):
    assert len(tokenisings(everything, path, body, monkeypatch)) == 1


def test_the_words_of_a_tagger_are_tokenised_once_beside_their_text(everything, monkeypatch):
    body = {"texts": ["the cat sits in paris.", "tea"], "model": "names"}
    assert len(tokenisings(everything, "/tag", body, monkeypatch)) == 2  # as it was trained: word by word


def tokenisings(application, path, body, monkeypatch):
    """How often the library gets texts for a request."""
    first = post(application, path, body)  # also loads the model, which tokenises texts of its own
    calls = []
    for tokenizer in [model.load().tokenizer for model in application.models]:
        readers = {key: Counting(each, calls) for key, each in tokenizer._readers.items()}
        monkeypatch.setattr(tokenizer, "_readers", readers)
        monkeypatch.setattr(tokenizer, "closed", readers[frozenset()])
    assert post(application, path, body).content == first.content
    return calls


class Counting:
    """A tokenizer of the library that notes when it gets texts of a request, which always come as a batch."""

    def __init__(self, library, calls):
        self._library, self._calls = library, calls

    def __getattr__(self, name):
        if name.startswith("encode_batch"):
            self._calls.append(name)
        return getattr(self._library, name)
