"""How the body of a request is read: which content types, and what a wrong body is told."""

import json
import time

import pytest

from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.json_route import check_items, validated
from bertsmith.serve.openai_api import EmbeddingsRequest
from bertsmith.serve.schemas import ClassifyRequest
from tests.unit.serve.serving import error_of, post, talk

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
        (b'{"texts": ["a",\n "b"', "the body is not JSON: it breaks at line 2, column 5"),
        (b'{"texts": ["\xff\xff"]}', "the body is not JSON: it is not UTF-8"),
        (b"[" * 100_000, "the body is not JSON: its brackets are nested too deeply"),
        (b"1" * 5000, "the body is not JSON: a number in it is too long"),
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
        "the body holds more than 150000 values; send fewer texts at a time",
    )
    assert time.process_time() - begin < 0.3


def test_commas_and_brackets_in_a_text_are_no_values():
    check_items(json.dumps({"inputs": [',[{\\"' * 8000] * 20}).encode())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_body_is_read_in_each_encoding_that_json_ever_had(encoding):
    body = json.dumps({"texts": ["caf\u00e9 \u4e2d"]}, ensure_ascii=False).encode(encoding)
    assert validated(ClassifyRequest, body).texts == ["caf\u00e9 \u4e2d"]


def test_the_check_stops_at_the_first_wrong_item_of_a_list():
    body = json.dumps({"input": [1] * 40_000 + ["x"] * 40_000}).encode()
    with pytest.raises(ApiError, match="input\\[40000\\]"):
        validated(EmbeddingsRequest, body)
    with pytest.raises(ValueError) as caught:
        EmbeddingsRequest.model_validate_json(body)
    assert caught.value.error_count() <= 4  # one for each form that an input can have
