"""Which units stay, worked out by hand, and layers taken out of networks."""

import re

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.model.attention.attend import attend
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.importance import UnitImportance
from bertsmith.packed import pack
from bertsmith.shrink.layer_dropping import without_layers
from bertsmith.shrink.selection import UnitCounts, best_of_all, chosen_units, counts_left
from bertsmith.shrink.slicing import KeptUnits, all_units, pruned_network
from tests.lively_networks import lively_network

BATCH = pack([[5, 17, 8, 30], [44, 9]])
UNITS = [KeptUnits((0, 1, 2, 3), tuple(range(10)))] * 2


def test_the_best_of_all_layers_stay_and_the_best_of_each():
    scores = [torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.1, 0.3, 0.2])]
    assert best_of_all(scores, 3) == [(0, 1), (1,)]
    assert best_of_all(scores, 5) == [(0, 1, 2), (1, 2)]
    assert best_of_all(scores, 1) == [(0,), (1,)]


def test_equal_scores_are_decided_by_the_number():
    assert best_of_all([torch.ones(4), torch.ones(4)], 4) == [(0, 1, 2), (0,)]


@pytest.mark.parametrize(("widths", "expected"), [("equal", [(2, 3), (0, 1)]), ("free", [(1, 2, 3), (0,)])])
def test_neurons_are_chosen_in_each_layer_or_among_all(widths, expected):
    heads = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))
    neurons = (torch.tensor([0.0, 5.0, 6.0, 6.0]), torch.tensor([9.0, 1.0, 0.5, 0.0]))
    found = chosen_units(UnitImportance(heads, neurons), UnitCounts(3, 4, widths))
    # Normalised, the first layer's heads are 0.45 and 0.89, the second's 0.95 and 0.32.
    assert [units.heads for units in found] == [(0, 1), (0,)]
    assert [units.neurons for units in found] == expected


@pytest.mark.parametrize(("count", "expected"), [(7, [5, 2]), (6, [4, 2]), (4, [2, 2]), (3, [1, 1])])
def test_layers_that_are_narrower_already_lose_last(count, expected):
    scores = UnitImportance((torch.ones(1), torch.ones(1)), (torch.arange(1.0, 6), torch.arange(1.0, 3)))
    found = chosen_units(scores, UnitCounts(2, count, "equal"))
    assert [len(units.neurons) for units in found] == expected


def test_a_part_of_the_fractions_is_done_in_each_round():
    left = [counts_left(UNITS, (0.5, 0.5), "equal", done=part) for part in (0, 0.5, 1)]
    assert [(each.heads, each.neurons) for each in left] == [(8, 20), (6, 15), (4, 10)]


@pytest.mark.parametrize(
    ("fractions", "told"),
    [
        ((0.9, 0.0), "^heads: 0.9 would leave 1 of 8 heads for 2 layers; .* choose at most 0.75"),
        ((1.0, 0.0), "^heads: 1 would leave 0 of 8 heads"),
        ((0.0, 1.0), "^ffn: 1 would leave 0 of 20 neurons for 2 layers; .* choose at most 0.9"),
    ],
)
def test_no_layer_loses_all_it_has(fractions, told):
    with pytest.raises(UserError) as refused:
        counts_left(UNITS, fractions, "equal")
    assert re.search(told, refused.value.line())


def test_a_network_is_not_cut_where_a_layer_would_lose_all():
    network = lively_network("bert", {})
    kept = all_units(network)
    with pytest.raises(UserError, match="layer 1 would lose all of its heads"):
        pruned_network(network, [kept[0], KeptUnits((), (1,)), kept[2]])
    with pytest.raises(UserError, match="layer 0 would lose all of its neurons"):
        pruned_network(network, [KeptUnits((1,), ()), *kept[1:]])


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "distilbert"])
def test_layers_are_taken_out_and_the_others_run_as_before(model_type, tmp_path):
    network = lively_network(model_type, {})
    smaller = without_layers(network, (1,))
    write_model(tmp_path, Model(smaller))
    read = read_model(tmp_path).network
    assert read.config == smaller.config and read.config.layers == 2
    with torch.no_grad():
        hidden = network.encoder.embeddings(BATCH)
        for layer in (0, 2):
            hidden = network.encoder.blocks[layer](hidden, BATCH, attend)
        expected = network.encoder.final_norm(hidden)
        assert torch.allclose(smaller(BATCH), expected, atol=1e-6)
        assert torch.equal(read(BATCH), smaller(BATCH))
    assert len(network.encoder.blocks) == 3


def test_layers_that_share_a_block_run_it_less_often():
    network = lively_network("albert", {})
    smaller = without_layers(network, (0, 2))
    assert smaller.config.layers == 1
    with torch.no_grad():
        assert torch.equal(smaller(BATCH), network.encoder.hidden_states(BATCH)[1])


def test_shapes_of_layers_go_with_them():
    network = lively_network("bert", {})
    kept = [KeptUnits((0,), (1, 2)), *all_units(network)[1:]]
    smaller = without_layers(pruned_network(network, kept), (1,))
    assert (smaller.config.layer_heads, smaller.config.layer_inner) == ((1, 4), (2, 64))


@pytest.mark.parametrize(
    ("model_type", "dropped", "told"),
    [
        ("bert", (3,), "layer 3 does not exist; name layers from 0 to 2"),
        ("bert", (0, 1, 2), "this would remove every layer"),
        ("modernbert", (0,), "keep layer 0"),
    ],
)
def test_layers_that_cannot_go(model_type, dropped, told):
    with pytest.raises(UserError) as refused:
        without_layers(lively_network(model_type, {}), dropped)
    assert told in refused.value.line()
