"""The short way to a route says what the framework says, to the byte; and what a wrong body is told."""

import json
import time

import pytest

from bertsmith.serve.compatible_shapes import EmbeddingsAsk
from bertsmith.serve.desk import Errand
from bertsmith.serve.refusals import Refusal
from tests.unit.serve.serving import application_of, error_of, post, talk

ID = {"x-request-id": "same"}

ASKS = [
    ("/fill", {"text": "a [MASK] and a [MASK]", "top": 2}),
    ("/next", {"first": "the cat", "second": "it is cold", "model": "toy"}),
    ("/classify", {"texts": ["the cat", ["cat", "dog"]]}),
    ("/classify", {"texts": ["the cat", "caf\u00e9 \u4e2d \U0001f600"], "model": "topics"}),
    ("/classify", {"texts": [["cat", "dog"]], "model": "alike"}),
    ("/tag", {"texts": ["the cat sits on a mat"]}),
    ("/answer", {"question": "who?", "passage": "the cat sits on a mat", "best": 2}),
    ("/compare", {"texts": ["cat", "dog"]}),
    ("/look/tokens", {"first": "the cat", "second": "sits", "seed": 3}),
    ("/look/attention", {"first": "the cat"}),
    ("/look/senses", {"word": "cat", "sentences": ["a cat", "the cat sits"]}),
    ("/v1/embeddings", {"input": ["cat", "dog"], "model": "toy"}),
    ("/v1/embeddings", {"input": "cat", "model": "toy", "encoding_format": "base64"}),
    ("/embed", {"inputs": "cat"}),
    ("/predict", {"inputs": "cat"}),
    ("/predict", {"inputs": [["cat"], ["dog"]], "raw_scores": True}),
    ("/rerank", {"query": "cat", "texts": ["a cat", "a dog"]}),
    ("/rerank", {"query": "cat", "texts": ["a cat", "a dog"], "return_text": True}),
]
MISTAKES = [
    ("/fill", {"text": "no mask"}),
    ("/fill", {"text": "[MASK]", "model": "nobody"}),
    ("/classify", {"texts": ["cat"] * 300}),
    ("/classify", {"texts": ["a \ud800"]}),
    ("/nowhere", {}),
    ("/health", {}),
]


@pytest.fixture(scope="module")
def framework(folders):
    """A server whose gate leads straight to the framework."""
    application = application_of(folders)
    application.gate._app = application.gate._app._app
    return application


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_both_ways_give_the_same_reply(path, body, application, framework):
    short, long = (post(way, path, body, headers=ID) for way in (application, framework))
    assert (short.status_code, short.content) == (long.status_code, long.content)
    assert short.headers.multi_items() == long.headers.multi_items()


@pytest.mark.parametrize(("path", "body"), MISTAKES)
def test_both_ways_give_the_same_refusal(path, body, application, framework):
    short, long = (post(way, path, body, headers=ID) for way in (application, framework))
    assert short.status_code >= 400
    assert (short.status_code, short.content) == (long.status_code, long.content)
    assert short.headers.multi_items() == long.headers.multi_items()


def test_a_usual_request_never_meets_the_framework(folders):
    application = application_of({"mood": folders["mood"]})

    async def framework(scope, receive, send):
        raise AssertionError("it was asked")

    application.gate._app._app = framework
    assert post(application, "/classify", {"texts": ["cat"]}).status_code == 200
    assert post(application, "/classify", {"texts": 5}).status_code == 422


# ---- kinds of bodies

JSON_KINDS = [
    "application/json",
    "Application/JSON",
    "application/json; charset=utf-8",
    "application/ld+json",
]
FORM_KINDS = ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", ""]
OTHER_KINDS = [
    *FORM_KINDS,
    "application/jsonx",
    "text/json",
    "image/svg+json",
    "text/plain; a=application/json",
]


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_json_is_read_by_any_of_its_names(kind, application):
    assert (
        post(application, "/classify", {"texts": ["cat"]}, headers={"content-type": kind}).status_code == 200
    )


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_what_a_form_of_another_site_can_send_is_refused_with_the_remedy(kind, application):
    reply = post(application, "/classify", {"texts": ["cat"]}, headers={"content-type": kind})
    assert reply.status_code == 415
    assert 'add -H "Content-Type: application/json"' in error_of(reply)


def test_a_body_of_no_kind_is_refused_too(application):
    reply = talk(application, lambda client: client.post("/classify", content=b'{"texts": ["cat"]}'))
    assert reply.status_code == 415


# ---- bodies that are wrong


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b'{"texts": ["a",\n "b"', "the body is not JSON: it breaks at line 2, column 5"),
        (b'{"texts": ["\xff\xff"]}', "the body is not JSON: it is not UTF-8"),
        (b"[" * 100_000, "the body is not JSON: its brackets are nested too deeply"),
        (b"1" * 5000, "the body is not JSON: a number in it is too long"),
    ],
)
def test_a_body_that_is_no_json_is_told_where_it_breaks(body, message, application):
    head = {"content-type": "application/json"}
    reply = talk(application, lambda client: client.post("/classify", content=body, headers=head))
    assert (reply.status_code, error_of(reply)) == (422, message)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"texts": [1] * 300_000}, "texts[0]: expected a string or a list of 2 strings"),
        ("/v1/embeddings", {"input": [1] * 300_000 + ["x"]}, "input[300000]: expected a whole number"),
    ],
)
def test_a_body_with_many_mistakes_is_refused_as_quickly_as_any_other(path, body, message, application):
    begin = time.process_time()
    reply = post(application, path, body)
    assert reply.status_code == 422
    assert error_of(reply).startswith(message)
    assert time.process_time() - begin < 2  # to list all of them takes ten seconds


def test_a_long_body_that_is_wrong_never_meets_the_check_that_notes_every_mistake():
    class Trap(EmbeddingsAsk):
        @classmethod
        def model_validate(cls, *args, **options):
            raise AssertionError("it was checked")

    errand = Errand(None, Trap, EmbeddingsAsk.model_json_schema(), None, False)
    with pytest.raises(Refusal, match="input\\[40000\\]"):
        errand.question(json.dumps({"input": [1] * 40_000 + ["x"]}).encode(), most_texts=256)


def test_too_many_texts_are_refused_before_any_is_looked_at():
    errand = Errand(None, EmbeddingsAsk, {}, None, False)  # with an empty schema any look fails
    with pytest.raises(Refusal, match="40000 texts in one request; this server takes 256"):
        errand.question(json.dumps({"input": ["x"] * 40_000}).encode(), most_texts=256)
