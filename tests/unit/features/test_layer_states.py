"""Which layers are features: the six strategies of the paper against transformers' hidden states."""

import pytest
import torch

from bertsmith.features.bilstm import BiLstmScorer, Reading
from bertsmith.features.layer_states import encoder_hash, layer_name, layer_numbers
from bertsmith.model.folder.model_folder import read_model
from bertsmith.packed import pack
from bertsmith.recipe.finetuning_schema import FeaturesSection
from tests.oracles import saved_oracle
from tests.tiny import tiny_network

TEXTS = [[2, 5, 6, 7, 3], [2, 9, 3]]


@pytest.mark.parametrize(
    ("choice", "numbers"),
    [
        ("embeddings", (0,)),
        ("second-to-last", (11,)),
        ("last", (12,)),
        ("last4", (9, 10, 11, 12)),
        ("all", tuple(range(1, 13))),
        ("all-and-embeddings", tuple(range(13))),
    ],
)
def test_the_layers_of_a_base_model(choice, numbers):
    assert layer_numbers(choice, 12) == numbers


def test_a_small_model_gives_the_layers_that_it_has():
    assert layer_numbers("last4", 2) == (1, 2)
    assert [layer_name(number) for number in layer_numbers("all-and-embeddings", 1)] == [
        "embeddings",
        "layer 1",
    ]


@pytest.mark.parametrize(
    ("layers", "combine", "wanted"),
    [
        ("embeddings", "weighted-sum", lambda states: states[0]),
        ("second-to-last", "concat", lambda states: states[-2]),
        ("last", "concat", lambda states: states[-1]),
        ("last4", "weighted-sum", lambda states: sum(states[-4:]) / 4),
        ("last4", "concat", lambda states: torch.cat(states[-4:], -1)),
        ("all", "weighted-sum", lambda states: sum(states[1:]) / (len(states) - 1)),
    ],
)
def test_the_six_strategies_are_those_of_a_plain_computation(tmp_path, layers, combine, wanted):
    model = saved_oracle(tmp_path, "bert", "Model", num_hidden_layers=5)
    network = read_model(tmp_path, dtype=torch.float32).network
    features = FeaturesSection(layers=layers, combine=combine, width=6)
    stream = torch.Generator().manual_seed(0)
    scorer = BiLstmScorer(network, 3, features, reading=Reading("tokens"), stream=stream).eval()
    given = []
    scorer.reader.register_forward_hook(lambda _, inputs, __: given.append(inputs[0]))
    scores = scorer(pack(TEXTS))
    with torch.no_grad():
        states = [model(torch.tensor([text]), output_hidden_states=True).hidden_states for text in TEXTS]
    expected = torch.cat([wanted([each[0] for each in of_text]) for of_text in states])
    assert (given[0] - expected).abs().max() < 1e-5
    assert scores.shape == (8, 3) and scorer.reader.bilstm.lstm.hidden_size == 6


def test_normalised_layers_are_those_of_a_plain_computation(tmp_path):
    model = saved_oracle(tmp_path, "modernbert", "Model", num_hidden_layers=5)
    network = read_model(tmp_path, dtype=torch.float32).network
    features = FeaturesSection(layers="last4", combine="concat", width=6, layer_norm=True)
    stream = torch.Generator().manual_seed(0)
    scorer = BiLstmScorer(network, 3, features, reading=Reading("tokens"), stream=stream).eval()
    given = []
    scorer.reader.register_forward_hook(lambda _, inputs, __: given.append(inputs[0]))
    scorer(pack(TEXTS))
    with torch.no_grad():
        states = [model(torch.tensor([text]), output_hidden_states=True).hidden_states for text in TEXTS]
    last4 = [torch.cat([of_text[layer][0] for of_text in states]).double() for layer in (-4, -3, -2, -1)]
    spread = [(each - each.mean(-1, keepdim=True)) for each in last4]
    expected = torch.cat([each / (each.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() for each in spread], -1)
    assert (given[0] - expected).abs().max() < 1e-5


def test_learned_weights_are_told_by_the_names_of_the_layers():
    network = tiny_network(heads={})
    stream = torch.Generator().manual_seed(0)
    features = FeaturesSection(layers="all")
    scorer = BiLstmScorer(network, 2, features, reading=Reading("tokens"), stream=stream)
    with torch.no_grad():
        scorer.mix.weights_L.zero_()[0] = 100.0
    weights = scorer.layer_weights()
    assert weights.pop("scale") == 1.0
    assert list(weights) == [f"layer {number}" for number in range(1, len(network.encoder.order) + 1)]
    assert list(weights.values()) == pytest.approx([1.0] + [0.0] * (len(weights) - 1))
    single = FeaturesSection(layers="last", combine="weighted-sum")
    alone = BiLstmScorer(network, 2, single, reading=Reading("tokens"), stream=stream)
    assert alone.layer_weights() == {}


def test_a_hash_tells_encoders_apart():
    first, other = tiny_network(heads={}), tiny_network(heads={})
    other.load_state_dict(first.state_dict())
    assert encoder_hash(first) == encoder_hash(other)
    with torch.no_grad():
        next(other.encoder.parameters())[0, 0] += 1e-3
    assert encoder_hash(first) != encoder_hash(other)
