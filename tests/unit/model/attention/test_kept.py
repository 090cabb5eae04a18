"""Keys and values that are kept: a text that is read token by token has the states of one read at once."""

from dataclasses import replace

import pytest
import torch

from bertsmith.model.encoder import Stream
from bertsmith.model.inference.inference_network import packed_network
from bertsmith.model.network import Network, new_network
from bertsmith.packed import pack
from tests.tiny import tiny_encoder_config

IDS = [5, 17, 8, 30, 41, 7, 22, 60, 61, 12, 50, 33]


def one_sided(model_type: str, **changes) -> Network:
    config = replace(tiny_encoder_config(model_type, **changes), direction="left-to-right", initial_std=0.3)
    return new_network(config, {}, torch.Generator().manual_seed(3)).eval().double()


def read_in_parts(stream: Stream, ends: list[int]) -> torch.Tensor:
    states, begin = [], 0
    for end in ends:
        batch = pack([IDS[begin:end]])
        states.append(stream(replace(batch, positions_T=batch.positions_T + begin)))
        begin = end
    return torch.cat(states)


@pytest.mark.parametrize("ends", [[4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 6, 12]], ids=["one by one", "in parts"])
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "roberta", "albert", "modernbert"])
def test_the_states_are_those_of_the_whole_text(model_type, ends):
    network = one_sided(model_type, **({"local_attention": 4} if model_type == "modernbert" else {}))
    stream = network.encoder.stream()
    assert stream is not None
    with torch.no_grad():
        torch.testing.assert_close(read_in_parts(stream, ends), network(pack([IDS])), rtol=0, atol=1e-10)


def test_packed_weights_keep_states_too():
    network = packed_network(one_sided("gpt2").float())
    with torch.no_grad():
        found = read_in_parts(network.encoder.stream(), [5, 6, 12])
        torch.testing.assert_close(found, network(pack([IDS])), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model_type", "direction"), [("bert", "both"), ("bert", "right-to-left")])
def test_where_later_tokens_change_earlier_states_nothing_is_kept(model_type, direction):
    config = replace(tiny_encoder_config(model_type), direction=direction)
    assert new_network(config, {}, torch.Generator()).encoder.stream() is None


def test_an_attention_that_takes_whole_texts_keeps_nothing():
    assert one_sided("deberta-v2").encoder.stream() is None
