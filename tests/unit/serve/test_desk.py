"""The short way to a route says what the long way says, to the byte."""

import pytest

from tests.unit.serve.serving import application_of, post

SHORT, LONG = "application/json", "application/json; charset=utf-8"
"""A body of the first kind goes the short way; the framework reads both."""
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
    ("/fill", {"text": 5}),
    ("/fill", {"text": "[MASK]", "tpo": 5}),
    ("/fill", None),
    ("/classify", {"texts": ["cat"] * 300}),
    ("/classify", {"texts": ["a \ud800"]}),
    ("/nowhere", {}),
    ("/health", {}),
]


def both_ways(application, path, body):
    return [post(application, path, body, headers={**ID, "content-type": kind}) for kind in (SHORT, LONG)]


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_both_ways_give_the_same_reply(path, body, application):
    short, long = both_ways(application, path, body)
    assert (short.status_code, short.content) == (long.status_code, long.content)
    assert short.headers.multi_items() == long.headers.multi_items()


@pytest.mark.parametrize(("path", "body"), MISTAKES)
def test_both_ways_give_the_same_refusal(path, body, application):
    short, long = both_ways(application, path, body)
    assert short.status_code >= 400
    assert (short.status_code, short.content) == (long.status_code, long.content)
    assert short.headers.multi_items() == long.headers.multi_items()


def test_a_usual_request_never_meets_the_framework(folders):
    application = application_of({"mood": folders["mood"]})

    async def framework(scope, receive, send):
        raise AssertionError("it was asked")

    application.gate._app._app = framework
    assert post(application, "/classify", {"texts": ["cat"]}).status_code == 200
