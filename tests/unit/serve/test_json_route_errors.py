"""What is wrong with a body is said by its place and by what is expected there, as the schema has it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bertsmith.serve.json_route import error_in, validator_message
from bertsmith.serve.look_schemas import IntrospectionRequest, SensesRequest, TokensRequest
from bertsmith.serve.openai_api import EmbeddingsRequest
from bertsmith.serve.schemas import (
    AnswerRequest,
    ClassifyRequest,
    CompareRequest,
    FillRequest,
    NextRequest,
    TagRequest,
)
from bertsmith.serve.tei_api import EmbedRequest, PredictRequest, RerankRequest

ASKS = (
    *(AnswerRequest, ClassifyRequest, CompareRequest, FillRequest, IntrospectionRequest, NextRequest),
    *(SensesRequest, TagRequest, TokensRequest),
    *(EmbedRequest, EmbeddingsRequest, PredictRequest, RerankRequest),
)
IDS = "whole numbers of at least 0"


@pytest.mark.parametrize(
    ("ask", "body", "line"),
    [
        (FillRequest, None, "the body: expected a JSON object with text, got null"),
        (AnswerRequest, [1], "the body: expected a JSON object with question and passage, got a list of 1"),
        (FillRequest, {"txt": "a"}, "txt: unknown field; the fields are model, text and top"),
        (FillRequest, {"x" * 500: 1}, f"{'x' * 60}: unknown field; the fields are model, text and top"),
        (FillRequest, {"top": 1}, "text: is missing; expected a string"),
        (FillRequest, {"text": "a", "top": 101}, "top: expected a whole number from 1 to 100"),
        (
            FillRequest,
            {"text": "a", "top": 5.0},
            "top: expected a whole number from 1 to 100, got a decimal number",
        ),
        (FillRequest, {"text": "a", "top": True}, "top: expected a whole number from 1 to 100, got true"),
        (FillRequest, {"text": "a", "model": 5}, "model: expected a string or null, got a whole number"),
        (TokensRequest, {"first": "a", "seed": 2**32}, "seed: expected a whole number from 0 to 4294967295"),
        (
            ClassifyRequest,
            {"texts": "a"},
            "texts: expected a list of strings or lists of 2 strings, got a string",
        ),
        (
            ClassifyRequest,
            {"texts": ["a", {}]},
            "texts[1]: expected a string or a list of 2 strings, got an object",
        ),
        (
            ClassifyRequest,
            {"texts": [["a"]]},
            "texts[0]: expected a string or a list of 2 strings, got a list of 1",
        ),
        (ClassifyRequest, {"texts": [["a", 1]]}, "texts[0][1]: expected a string, got a whole number"),
        (CompareRequest, {"texts": ["a"]}, "texts: expected a list of 2 or more strings, got a list of 1"),
        (EmbeddingsRequest, {"input": ["a", None]}, "input[1]: expected a string, got null"),
        (
            EmbeddingsRequest,
            {"input": [1, "a"]},
            "input[1]: expected a whole number of at least 0, got a string",
        ),
        (EmbeddingsRequest, {"input": [-1]}, "input[0]: expected a whole number of at least 0"),
        (EmbeddingsRequest, {"input": [[1, -1]]}, "input[0][1]: expected a whole number of at least 0"),
        (
            EmbeddingsRequest,
            {"input": 5},
            f"input: expected a string, a list of strings, a list of {IDS} or a list of lists of {IDS}",
        ),
        (
            EmbeddingsRequest,
            {"input": "a", "dimensions": 0},
            "dimensions: expected a whole number of at least 1 or null",
        ),
        (
            PredictRequest,
            {"inputs": [["a"], []]},
            "inputs[1]: expected a list of 1 or 2 strings, got an empty list",
        ),
    ],
)
def test_a_mistake_is_reported_by_its_place_and_by_what_is_expected(ask, body, line):
    told = error_in(ask.model_json_schema(), body)
    assert told == line or told.startswith(f"{line}, got ")


def test_a_word_that_is_none_of_a_few_is_reported_which_there_are():
    told = error_in(EmbeddingsRequest.model_json_schema(), {"input": "a", "encoding_format": "secret"})
    assert told == 'encoding_format: expected "float" or "base64", got another string'


def test_an_error_that_the_schema_does_not_show_is_told_by_its_place():
    with pytest.raises(ValidationError) as caught:
        EmbedRequest.model_validate({"inputs": "a", "prompt_name": ["secret"]})
    assert validator_message(caught.value) == "prompt_name: is not valid"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(["a", "right", "float"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=1),
    max_leaves=6,
)
NAMES = sorted({name for ask in ASKS for name in ask.model_fields}) + ["other"]


@st.composite
def bodies(draw, ask):
    """Something that resembles what is asked, or nothing of the kind."""
    names = draw(st.lists(st.sampled_from([*ask.model_fields] * 3 + NAMES), max_size=6))
    return draw(st.just({name: draw(values) for name in names}) | values)


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
@given(data=st.data())
def test_a_mistake_is_found_in_exactly_those_bodies_that_are_rejected(ask, data):
    body = data.draw(bodies(ask))
    try:
        ask.model_validate(body)
        is_taken = True
    except ValidationError:
        is_taken = False
    assert (error_in(ask.model_json_schema(), body) is None) == is_taken
    try:
        ask.model_validate_json(json.dumps(body))
        is_taken_as_json = True
    except ValidationError:
        is_taken_as_json = False
    assert is_taken_as_json == is_taken


def test_what_was_sent_is_never_quoted():
    for body in ({"texts": ["secret"] * 3, "model": ["secret"]}, {"texts": {"secret": "secret"}}, "secret"):
        assert "secret" not in error_in(ClassifyRequest.model_json_schema(), body)
