"""What goes between the processes of a server comes out as it went in."""

import asyncio
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import Classification, NextSentence
from bertsmith.inference.text_reader import TokenizedText
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import BatchKey
from bertsmith.serve.channel import (
    Channel,
    Kind,
    RemotePrediction,
    decode_error,
    decode_prediction,
    decode_results,
    encode_error,
    encode_prediction,
    encode_results,
)
from bertsmith.serve.monitoring import RemoteFailure, failure_fields
from bertsmith.serve.remote_models import ModelChannel
from bertsmith.text.tokenizer import Encoded

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def tokenized_texts(draw):
    """A text or a pair with any tokens."""
    length = draw(st.integers(0, 6))

    def row(values):
        return draw(st.lists(values, min_size=length, max_size=length))

    large = st.integers(0, 2**31 - 1)
    encoded = Encoded(
        row(large),
        row(st.integers(0, 1)),
        row(st.tuples(large, large)),
        row(st.integers(-1, 1)),
        row(st.none() | large),
    )
    return TokenizedText(draw(TEXTS | st.tuples(TEXTS, TEXTS)), encoded)


@given(st.lists(tokenized_texts(), max_size=4), st.booleans(), st.none() | st.integers(0, 2**63 - 1), TEXTS)
def test_a_request_comes_out_as_it_went_in(texts, admitted, connection, word):
    key = BatchKey("look/senses", (word, 64, None, True))
    asked = RemotePrediction(3, connection, admitted, key, texts)
    assert decode_prediction(encode_prediction(asked)) == asked


def test_a_text_that_stands_in_many_pairs_goes_through_and_stays_in_memory_once():
    encoded = Encoded([1], [0], [(0, 1)], [0], [0])
    texts = [TokenizedText(("\u3000" * 50_000, str(number)), encoded) for number in range(256)]
    sent = encode_prediction(RemotePrediction(0, 1, False, BatchKey("choose"), texts))
    assert len(sent) < 2 * len(json.dumps(texts[0].text))
    found = decode_prediction(sent).texts
    assert list(found) == texts
    assert len({id(each.text[0]) for each in found}) == 1


def test_what_is_asked_of_all_texts_together_is_one_input():
    texts = [TokenizedText(each, Encoded([1, 2], [0, 0], [(0, 1)] * 2, [0, 0], [0, 1])) for each in "ab"]
    each, joint = (RemotePrediction(0, 1, False, BatchKey(name), texts) for name in ("embed", "choose"))
    assert (each.inputs(), each.tokens()) == (texts, [2, 2])
    assert (joint.inputs(), joint.tokens()) == ([texts], [4])


def test_results_come_out_with_their_types_and_tensors_as_arrays():
    classification = Classification("a", 0.5, {"a": 0.5, "": 0.5}, ("a",), is_several=True)
    given = [NextSentence(follows=True, probability=0.25), classification, 0.125, {"answers": []}]
    assert decode_results(encode_results(given)) == given
    row, tensor = decode_results(encode_results([np.arange(3, dtype=np.float32), torch.arange(6)[2:4]]))
    assert row.dtype == np.float32 and row.tolist() == [0, 1, 2]
    assert isinstance(tensor, np.ndarray) and tensor.tolist() == [2, 3]


def test_a_part_of_a_large_tensor_takes_no_more_than_its_own_bytes():
    assert len(encode_results(torch.zeros(1_000_000)[:4])) < 1000


def test_errors_come_out_as_they_went_in():
    api = decode_error(encode_error(ApiError(429, "later", headers={"Retry-After": "3"})))
    assert isinstance(api, ApiError)
    assert (api.status, api.message, api.error_type, api.headers) == (
        429,
        "later",
        "overloaded",
        {"Retry-After": "3"},
    )
    user = decode_error(encode_error(UserError("is empty", index=2, remedy="drop it")))
    assert isinstance(user, UserError)
    assert (user.line(), user.index) == ("text 2: is empty; drop it", 2)


def test_of_a_fault_only_its_kind_and_places_go_through():
    try:
        raise KeyError("a secret text")
    except KeyError as fault:
        sent = encode_error(fault)
    assert b"secret" not in sent
    found = decode_error(sent)
    assert isinstance(found, RemoteFailure)
    assert failure_fields(found) == json.loads(sent)["failure"]
    assert failure_fields(found)["failure"] == "KeyError"


class Taken(Channel):
    """Keeps what it gets."""

    def __init__(self):
        super().__init__()
        self.frames, self.is_lost = [], False

    def on_frame(self, kind, number, content):
        self.frames.append((kind, number, content))

    def on_lost(self):
        self.is_lost = True


class Written:
    """In place of a transport."""

    def __init__(self):
        self.sent = b""

    def write(self, data):
        self.sent += data


@pytest.mark.parametrize("step", [1, 3, 13, 14, 1000])
def test_frames_are_taken_whole_however_they_arrive(step):
    sender, taker, line = Taken(), Taken(), Written()
    sender.connection_made(line)
    frames = [(Kind.READY, 0, b"1"), (Kind.CANCEL, 2**40, b""), (Kind.RESULTS, 7, bytes(100))]
    for frame in frames:
        sender.send(*frame)
    for begin in range(0, len(line.sent), step):
        taker.data_received(line.sent[begin : begin + step])
    assert taker.frames == frames


def test_to_a_process_that_has_ended_nothing_is_sent():
    channel, line = Taken(), Written()
    channel.connection_made(line)
    channel.connection_lost(None)
    channel.send(Kind.DRAIN)
    assert channel.is_lost and not channel.is_open and line.sent == b""


def test_a_number_that_nobody_waits_for_any_more_is_passed_over():
    async def main():
        channel, line = ModelChannel(), Written()
        channel.connection_made(line)
        asked = asyncio.create_task(channel.ask(Kind.PREDICT, b"x"))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        assert line.sent.count(bytes([Kind.CANCEL])) >= 1
        channel.on_frame(Kind.RESULTS, 1, encode_results([1]))
        return asked.cancelled()

    assert asyncio.run(main())
