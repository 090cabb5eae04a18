"""An encoder that is asked for some rows says of them what it says of all."""

import pytest
import torch

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.network import set_pooling
from bertsmith.packed import pack
from tests.tiny import tiny_network

BATCH = pack([[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]])
ROWS = torch.tensor([8, 0, 3, 0, 11])

members = pytest.mark.parametrize("model_type", ARCHITECTURES)


@members
def test_wanted_rows_are_those_of_the_whole(model_type):
    encoder = tiny_network(model_type, heads={}).encoder.eval()
    torch.testing.assert_close(encoder(BATCH, rows=ROWS), encoder(BATCH)[ROWS])


@members
def test_their_gradients_are_too(model_type):
    encoder = tiny_network(model_type, heads={}).encoder.eval()
    gradients = []
    for states in (encoder(BATCH, rows=ROWS), encoder(BATCH)[ROWS]):
        encoder.zero_grad()
        states.square().sum().backward()
        gradients.append([each.grad.clone() for each in encoder.parameters() if each.grad is not None])
    torch.testing.assert_close(*gradients)


def test_recomputing_gives_the_same_rows():
    encoder = tiny_network(heads={}).encoder.train()
    torch.manual_seed(0)
    plain = encoder(BATCH, rows=ROWS)
    encoder.recompute = True
    torch.manual_seed(0)
    torch.testing.assert_close(encoder(BATCH, rows=ROWS), plain)


def test_recomputing_keeps_less_of_the_states_of_all_layers():
    encoder = tiny_network(heads={}).encoder.train()

    def kept() -> tuple[int, list[torch.Tensor]]:
        numbers = []
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda each: numbers.append(each.numel()), id):
            states = encoder.hidden_states(BATCH)
        return sum(numbers), states

    more, plain = kept()
    encoder.recompute = True
    less, states = kept()
    torch.testing.assert_close(states, plain)
    assert less < more / 2


@members
def test_a_sentence_head_says_the_same_of_the_rows_it_looks_at(model_type):
    network = tiny_network(model_type, heads={"classify": 3, **_supports(model_type)}).eval()
    whole = network.scores("classify", network(BATCH), BATCH.layout)
    torch.testing.assert_close(network.sentence_scores("classify", BATCH), whole)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_compiled_sentence_head_says_the_same(pooling):
    network = tiny_network("modernbert", heads={"classify": 3}).eval()
    set_pooling(network, pooling)
    torch.compiler.reset()
    compiled = torch.compile(network.sentence_scores, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled("classify", BATCH), network.sentence_scores("classify", BATCH))


def _supports(model_type: str) -> dict[str, int]:
    return dict.fromkeys(ARCHITECTURES[model_type].heads["classify"].needs, 0)
