"""How the body of a request is read: which content types, and what a wrong body is told."""

import json
import time
from asyncio.events import Handle
from dataclasses import dataclass

import numpy as np
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import to_json

from bertsmith.serve import json_route
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.json_route import JsonRoutes, check_items, is_large, json_pieces, read_request
from bertsmith.serve.openai_api import EmbeddingsRequest
from bertsmith.serve.schemas import ClassifyRequest
from tests.unit.serve.serving import error_of, post, talk

strings = st.text(st.sampled_from('a",:[{}]\\\n\u00e9'))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)

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
def test_what_a_form_of_another_site_can_send_is_rejected_with_the_remedy(kind, application):
    reply = post(application, "/classify", {"texts": ["cat"]}, headers={"content-type": kind})
    assert reply.status_code == 415
    assert 'add -H "Content-Type: application/json"' in error_of(reply)


def test_a_body_of_no_kind_is_rejected_too(application):
    reply = talk(application, lambda client: client.post("/classify", content=b'{"texts": ["cat"]}'))
    assert reply.status_code == 415


# ---- bodies that are wrong


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b'{"texts": ["a",\n "b"', "the body is not JSON: EOF while parsing a list at line 2 column 4"),
        (b'{"texts": ["\xff\xff"]}', "the body is not JSON: invalid unicode code point at line 1 column 13"),
        (b"[" * 100_000, "the body is not JSON: recursion limit exceeded at line 1 column 202"),
        (b"1" * 5000, "the body is not JSON: number out of range at line 1 column 4302"),
    ],
)
def test_a_body_that_is_no_json_is_reported_where_it_breaks(body, message, application):
    head = {"content-type": "application/json"}
    reply = talk(application, lambda client: client.post("/classify", content=body, headers=head))
    assert (reply.status_code, error_of(reply)) == (422, message)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"texts": [1] * 140_000}, "texts[0]: expected a string or a list of 2 strings"),
        ("/v1/embeddings", {"input": [1] * 140_000 + ["x"]}, "input[140000]: expected a whole number"),
    ],
)
def test_a_body_with_many_mistakes_is_rejected_as_quickly_as_any_other(path, body, message, application):
    begin = time.process_time()
    reply = post(application, path, body)
    assert reply.status_code == 422
    assert error_of(reply).startswith(message)
    assert time.process_time() - begin < 2  # to list all of them takes ten seconds


@pytest.mark.parametrize("item", ["1", '"x"', "[1]", "{}", '"\\",\\""'])
def test_more_values_than_any_request_has_are_rejected_before_they_are_parsed(item, application):
    body = f'{{"input":[{",".join([item] * 151_000)}]}}'.encode()
    head = {"content-type": "application/json"}
    begin = time.process_time()
    reply = talk(application, lambda client: client.post("/v1/embeddings", content=body, headers=head))
    assert (reply.status_code, error_of(reply)) == (
        413,
        "the body contains more than 150000 values or 10000 fields; send fewer texts at a time",
    )
    assert time.process_time() - begin < 0.3


def test_more_fields_than_any_request_has_are_rejected_before_they_are_parsed(application):
    body = json.dumps({"text": "a", **dict.fromkeys(map(str, range(10_000)), 1)})
    head = {"content-type": "application/json"}
    reply = talk(application, lambda client: client.post("/fill", content=body, headers=head))
    assert reply.status_code == 413


def test_commas_brackets_and_colons_in_a_text_are_no_values():
    check_items(json.dumps({"inputs": [',[{:\\"' * 8000] * 20}).encode())


@given(values, st.integers(0, 8), st.integers(0, 4))
def test_values_are_counted_as_a_parser_counts_them(value, most_items, most_fields):
    def count(some):
        inner = list(some.values()) if isinstance(some, dict) else some if isinstance(some, list) else []
        items = max(1, len(inner)) if isinstance(some, dict | list) else 0
        return np.array([items, len(some) if isinstance(some, dict) else 0]) + sum(map(count, inner))

    items, names = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_route, "MAX_ITEMS", most_items)
        patch.setattr(json_route, "MAX_FIELDS", most_fields)
        body = json.dumps(value, separators=(",", ":")).encode()
        if items <= most_items and names <= most_fields:
            check_items(body)
        else:
            with pytest.raises(ApiError):
                check_items(body)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_body_is_read_in_each_encoding_that_json_ever_had(encoding):
    body = json.dumps({"texts": ["caf\u00e9 \u4e2d"]}, ensure_ascii=False).encode(encoding)
    assert read_request(ClassifyRequest, body).texts == ["caf\u00e9 \u4e2d"]


def test_the_check_stops_at_the_first_wrong_item_of_a_list():
    body = json.dumps({"input": [1] * 40_000 + ["x"] * 40_000}).encode()
    with pytest.raises(ApiError, match="input\\[40000\\]"):
        read_request(EmbeddingsRequest, body)
    with pytest.raises(ValueError) as caught:
        EmbeddingsRequest.model_validate_json(body)
    assert caught.value.error_count() <= 4  # one for each form that an input can have


# ---- routes


def test_a_route_with_another_parameter_than_its_body_is_reported_when_the_server_is_made():
    router = APIRouter()

    @router.post("/two")
    async def two(request: ClassifyRequest, text: str) -> str: ...

    with pytest.raises(AssertionError, match=r"/two: two\(\) must take .*'request', 'text'"):
        JsonRoutes(None, router.routes)


# ---- replies


class Told(BaseModel):
    """Its fields have names that a dict has for its own."""

    keys: object
    items: object


@dataclass
class Pair:
    first: object
    second: object


@given(values, values, st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_reply_in_pieces_is_the_reply_in_one(first, second, numbers):
    pair = Pair(first, np.array(numbers))
    reply = {"keys": [second, first, pair, numbers], "items": {"a": [pair] * 3, "b": second}}
    plain = {"first": first, "second": numbers}
    whole = {"keys": [second, first, plain, numbers], "items": {"a": [plain] * 3, "b": second}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_route, "PIECE_VALUES", 3)
        pieces = json_pieces(
            Told.model_construct(**reply), lambda value: to_json(value, fallback=np.ndarray.tolist)
        )
        assert b"".join(pieces) == to_json(whole)


def test_no_piece_of_a_large_reply_has_more_values_than_a_piece_has():
    words = [{"text": "a", "start": number, "end": number + 1} for number in range(20_000)]
    asked = []
    b"".join(json_pieces({"results": [{"words": words}]}, lambda value: asked.append(value) or b"[]"))
    assert len(asked) > 10
    assert not any(map(is_large, asked))


# ---- how long the event loop is held up


@pytest.fixture
def longest(monkeypatch):
    """The CPU time of the longest step of the event loop since it was last looked at."""
    own, times = Handle._run, [0.0]

    def measured(handle):
        begin = time.thread_time()
        own(handle)
        times.append(time.thread_time() - begin)

    monkeypatch.setattr(Handle, "_run", measured)

    def look():
        found = max(times)
        times[:] = [0.0]
        return found

    return look


MARKS = "!" * 4000
HOLDING_UP = {
    "words": ("/look/words", {"first": MARKS, "model": "mood"}),
    "a large reply": ("/tag", {"texts": ["!" * 40_000]}),
    "escapes": ("/fill", b'{"text":[' + b"," * 150_001 + b'"' + b'\\"' * 6000),
}


@pytest.mark.parametrize("what", HOLDING_UP)
def test_no_request_holds_up_the_event_loop(what, application, longest):
    path, body = HOLDING_UP[what]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"content-type": "application/json"}
    times = []
    for _ in range(4):
        longest()
        talk(application, lambda client: client.post(path, content=content, headers=head))
        times.append(longest())
        if times[-1] < 0.05:
            break
    assert min(times) < 0.05
