"""ELMo's encoder: packed LSTMs against plain loops, and what its two directions see and predict."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bertsmith.core.errors import UserError
from bertsmith.data.collate import PretrainingBatch
from bertsmith.model.architectures.elmo import RecurrentConfig, count_parameters
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder import Stack
from bertsmith.model.encoder_config import ConfigReader, PassSize
from bertsmith.model.flops import forward_flops
from bertsmith.model.network import build_network, new_network, set_direction
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.packed import Layout, pack, unpack
from tests.tiny import tiny_encoder_config, tiny_network

TEXTS = [[2, 5, 6, 7, 8, 3], [2, 3], [2, 9, 10, 11, 12, 13, 14, 15, 3], [2, 16, 3], [7]]


def exact_network(**heads):
    """A tiny ELMo in float64."""
    return tiny_network("elmo", heads=heads).double()


def states_of(network, batch):
    with torch.no_grad():
        return network(batch)


def plain_states(encoder, text):
    """What the published equations give for one text: each direction by itself, step by step."""
    vectors = encoder.table.weight[torch.tensor(text)]
    halves = [vectors, vectors.flip(0)]
    for layer in encoder.stack:
        read = [lstm(half)[0] for lstm, half in zip((layer.forwards, layer.backwards), halves, strict=True)]
        halves = [new + old if layer.residual else new for new, old in zip(read, halves, strict=True)]
    return torch.cat((halves[0], halves[1].flip(0)), -1)


# ---- packed rows


def test_packed_states_are_those_of_a_loop_over_texts_and_directions():
    network = exact_network()
    found = states_of(network, pack(TEXTS))
    expected = torch.cat([plain_states(network.encoder, text) for text in TEXTS])
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("cell", [16, 40], ids=["plain", "projected"])
def test_gradients_are_those_of_a_loop_over_texts_and_directions(cell):
    config = tiny_encoder_config("elmo", cell=cell)
    network = new_network(config, {}, torch.Generator().manual_seed(0)).double().eval()
    gradients = []
    for states in (network(pack(TEXTS)), torch.cat([plain_states(network.encoder, each) for each in TEXTS])):
        (states * torch.arange(21.0).unsqueeze(1)).sin().sum().backward()
        gradients.append([each.grad.clone() for each in network.parameters()])
        network.zero_grad()
    assert all((one - other).abs().max() < 1e-10 for one, other in zip(*gradients, strict=True))


def test_autocast_computes_the_layers_in_single_precision():
    network, batch = tiny_network("elmo", heads={}), pack(TEXTS)
    with torch.autocast("cpu", torch.bfloat16):
        states = network(batch)
        states.sum().backward()
    assert torch.equal(states, network(batch))
    assert all(each.grad.isfinite().all() for each in network.parameters())


def test_a_text_does_not_depend_on_its_companions_nor_on_filler_and_empty_sequences():
    network, whole = exact_network(), pack(TEXTS)
    padded = pack([*TEXTS, [0] * 11])
    starts = torch.cat((padded.layout.starts_S1, padded.layout.starts_S1[-1:].repeat(2)))
    padded = replace(padded, layout=Layout(starts, 11))
    together, beside_filler = states_of(network, whole), states_of(network, padded)
    alone = torch.cat([states_of(network, pack([text])) for text in TEXTS])
    assert (together - alone).abs().max() < 1e-12
    assert (beside_filler[: len(alone)] - alone).abs().max() < 1e-12


def test_each_half_of_a_state_knows_its_own_side_alone():
    network, text = exact_network(), TEXTS[2]
    before = states_of(network, pack([text]))
    after = states_of(network, pack([[*text[:4], 77, *text[5:]]]))
    changed = (before != after).unflatten(-1, (2, -1)).any(-1)
    assert changed[:, 0].tolist() == [False] * 4 + [True] * 5
    assert changed[:, 1].tolist() == [True] * 5 + [False] * 4


def test_only_requested_rows_are_returned_and_all_layers_are_as_wide_as_the_doubled_word_vectors():
    network, batch = exact_network(), pack(TEXTS)
    with torch.no_grad():
        states = network.encoder.hidden_states(batch)
        rows = torch.tensor([3, 0, 11])
        assert torch.equal(network.encoder(batch, rows=rows), states[-1][rows])
        vectors = network.encoder.words(batch.tokens_T)
    assert [each.shape for each in states] == [(21, 32)] * 4
    assert torch.equal(states[0], torch.cat((vectors, vectors), -1))


def test_a_sentence_is_read_where_each_direction_has_read_all_of_it():
    network, batch = exact_network(), pack(TEXTS)
    states = states_of(network, batch)
    with torch.no_grad():
        found = network.encoder.sentences(batch)
    expected = [torch.cat((part[-1, :16], part[0, 16:])) for part in unpack(states, batch.layout)]
    assert torch.equal(found, torch.stack(expected))


def test_recomputed_layers_have_the_same_gradients():
    network, batch = exact_network(mlm=0).train(), pack(TEXTS)
    gradients = []
    for recompute in (False, True):
        network.encoder.recompute = recompute
        torch.manual_seed(1)
        network(batch).square().sum().backward()
        gradients.append([each.grad.clone() for each in network.encoder.parameters()])
        network.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# ---- predicted words


def batch_of(texts, filler=8):
    """A batch that predicts all words of texts from both sides, with filler rows that point at row 0."""
    inputs = pack([*texts, [0] * filler])
    starts = inputs.layout.starts_S1.tolist()[:-1]
    rows = [row for first, end in zip(starts, starts[1:], strict=False) for row in range(first + 1, end - 1)]
    zeros = torch.zeros(4, dtype=torch.long)
    rows_P = torch.cat((torch.tensor(rows, dtype=torch.long), zeros))
    pairs_S = torch.zeros(len(texts) + 1)
    return PretrainingBatch(
        inputs,
        end_1=torch.tensor([starts[-1]]),
        fields={
            "masked_rows_P": rows_P,
            "masked_ids_P": torch.cat((inputs.tokens_T[rows_P[:-4]], zeros)),
            "masked_weights_P": (torch.arange(len(rows_P)) < len(rows)).float(),
            "pair_labels_S": pairs_S.long(),
            "pair_weights_S": pairs_S,
        },
    )


def plain_losses(network, text):
    """The mean of both directions' losses of each word of a text, one word at a time."""
    states = plain_states(network.encoder, text)
    decoder, bias = network.encoder.words.weight, network.heads["mlm"].bias
    return [
        sum(
            nn.functional.cross_entropy(half @ decoder.T + bias, torch.tensor(text[row]))
            for half in (states[row - 1, :16], states[row + 1, 16:])
        )
        / 2
        for row in range(1, len(text) - 1)
    ]


@pytest.mark.parametrize("texts", [TEXTS[:4], [[2, 3]]], ids=["texts", "filler alone"])
def test_the_loss_is_the_mean_of_both_directions_over_every_word(texts):
    network = exact_network(mlm=0)
    objective = MaskedLanguageModelling(network, "none")
    sums = objective.summed(batch_of(texts))
    expected = sum((loss for text in texts for loss in plain_losses(network, text)), torch.zeros(()))
    assert sums["token_loss"].item() == pytest.approx(expected.item(), abs=1e-5)
    sums["token_loss"].backward()
    assert all(each.grad.isfinite().all() for each in network.parameters())


def test_filler_predicts_from_rows_that_exist():
    rows = exact_network().encoder.predicting_rows(torch.zeros(4, dtype=torch.long))
    assert rows.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_word_is_scored_by_the_product_of_what_both_directions_expect():
    network, batch = exact_network(mlm=0), pack([TEXTS[2]])
    with torch.no_grad():
        hidden = network(batch)
        found = network.word_scores(hidden, torch.tensor([4])).softmax(-1)
        left, right = (network.scores_of_words(each) for each in (hidden[3:4, :16], hidden[5:6, 16:]))
    product = left.softmax(-1) * right.softmax(-1)
    assert torch.allclose(found, (product / product.sum()).float())


def test_it_stays_with_its_two_directions():
    with pytest.raises(UserError, match="never left-to-right|cannot be made to read left-to-right"):
        set_direction(exact_network(), "left-to-right")
    with pytest.raises(UserError, match="never two-directions|cannot be made to read two-directions"):
        set_direction(tiny_network(), "two-directions")


# ---- its parts


def test_lstms_start_from_glorots_deviations_with_open_forget_gates():
    config = tiny_encoder_config("elmo", width=128, embedding_width=64, cell=256, vocabulary=5000)
    network = new_network(config, {}, torch.Generator().manual_seed(0))
    lstm = network.encoder.stack[0].backwards
    biases = lstm.bias_ih_l0 + lstm.bias_hh_l0
    assert [part.unique().tolist() for part in biases.chunk(4)] == [[0.0], [1.0], [0.0], [0.0]]
    deviations = {
        lstm.weight_ih_l0: math.sqrt(2 / (64 + 64 + 4 * 256)),
        lstm.weight_hr_l0: math.sqrt(2 / (256 + 64)),
        network.encoder.words.weight: 1 / 8,
    }
    assert all(abs(each.std().item() / std - 1) < 0.02 for each, std in deviations.items())


def test_every_weight_is_in_one_depth_and_gates_are_four_matrices_in_one():
    encoder = tiny_network("elmo", heads={}).encoder
    layers = encoder.depths()
    parts = [parameter for depth in layers for parameter in depth.layer.parameters()]
    assert len(parts) == len(set(parts)) == len(list(encoder.parameters()))
    assert layers[0].layer is encoder.stack[-1] and layers[-1].layer is encoder.words
    stacked = {tuple(each.shape): stack for each, stack in encoder.matrices().items()}
    assert stacked == {(160, 16): Stack(4, 1), (16, 40): Stack()}


def test_cells_as_wide_as_a_direction_are_not_projected():
    config = tiny_encoder_config("elmo", cell=16)
    network = build_network(config, {})
    assert network.encoder.stack[0].forwards.proj_size == 0
    assert sum(each.numel() for each in network.encoder.parameters()) == count_parameters(config)


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"hidden_size": 33}, "width of 33 cannot be halved"),
        ({"cell_size": 9}, "cells of 9 are narrower than half of the width, 16"),
    ],
)
def test_sizes_that_fit_no_two_directions_are_refused(sizes, wrong):
    with pytest.raises(UserError, match=wrong):
        ARCHITECTURES["elmo"].read_config(ConfigReader({"vocab_size": 99, "hidden_size": 32, **sizes}, "x"))


def test_the_published_lstms_have_the_published_size():
    """93.6 million weights, of which 18 are of the characters, which word pieces have not (allennlp.org)."""
    config = RecurrentConfig(
        model_type="elmo", vocabulary=1, width=1024, embedding_width=512, layers=2, cell=4096, positions=512
    )
    published = 2 * 2 * (4 * 4096 * (512 + 512 + 1) + 4096 * 512)
    second_biases = 2 * 2 * 4 * 4096
    assert count_parameters(config) == published + second_biases + 512
    assert published == pytest.approx(93.6e6 - 18e6, rel=0.01)


def test_products_are_counted_as_torch_counts_them():
    network = tiny_network("elmo", heads={"mlm": 0})
    with FlopCounterMode(display=False) as counter:
        states = torch.cat([plain_states(network.encoder, [7] * 8) for _ in range(5)])
        network.word_scores(states, torch.arange(1, 7))
    assert forward_flops(network, PassSize(tokens=40, sequences=5, predicted=6)) == counter.get_total_flops()
