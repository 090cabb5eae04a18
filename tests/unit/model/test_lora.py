"""Adapters are those of the published layers, whatever layers ours are; merged they give the same."""

import math
from typing import get_args

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.model.inference.inference_linear import AdaptedLinear
from bertsmith.model.inference.inference_network import packed_network
from bertsmith.model.lora import (
    LoraLinear,
    LoraShape,
    adapters_of,
    add_fresh_adapters,
    merged_network,
    with_shared_weights,
)
from bertsmith.packed import pack
from bertsmith.recipe.finetuning_schema import Target
from tests.tiny import TRANSFORMERS, tiny_network

BATCH = pack([[2, 15, 33, 7, 3], [2, 60, 9, 3]])
SHAPE = LoraShape(rank=4, alpha=8.0)


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def adapted(network, *targets, shape=SHAPE):
    """The network with adapters that do something."""
    add_fresh_adapters(network, targets or get_args(Target), shape, stream())
    with torch.no_grad():
        for _, adapter in adapters_of(network):
            adapter.lora_B.normal_(0, 0.2, generator=stream(1))
    return network


def states(network):
    with torch.no_grad():
        return network(BATCH)


def test_fresh_adapters_change_nothing_and_begin_as_published():
    network = tiny_network(heads={})
    before = states(network)
    add_fresh_adapters(network, ("query", "feed-forward"), SHAPE, stream())
    assert torch.equal(states(network), before)
    for _, adapter in adapters_of(network):
        assert not adapter.lora_B.any()
        # Kaiming's uniform rule with a = sqrt(5): up to 1 / sqrt(inputs), and that wide.
        bound = 1 / math.sqrt(adapter.lora_A.shape[1])
        assert 0.8 * bound < adapter.lora_A.abs().max() <= bound


def test_an_adapter_of_query_and_value_is_that_of_separate_layers():
    network = adapted(tiny_network(heads={}), "query", "value").double()
    project = network.encoder.blocks[0].attention.project
    values = torch.randn(7, 32, generator=stream(2), dtype=torch.float64)
    query, key, value = project(values).chunk(3, -1)
    wanted = torch.nn.functional.linear(values, project.weight, project.bias).chunk(3, -1)
    for found, plain, number in ((query, wanted[0], "0"), (value, wanted[2], "2")):
        adapter = project.adapters[number]
        low_rank = 8 / 4 * (values @ adapter.lora_A.T @ adapter.lora_B.T)
        assert torch.allclose(found, plain + low_rank, rtol=0, atol=1e-12)
    assert torch.equal(key, wanted[1])


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_merged_and_unmerged_give_the_same(model_type):
    network = adapted(tiny_network(model_type, {}).double())
    plain, merged = states(tiny_network(model_type, {}).double()), merged_network(network)
    assert not any(adapters_of(merged)) and any(adapters_of(network))
    assert (states(network) - plain).abs().max() > 1e-3
    assert torch.allclose(states(merged), states(network), rtol=0, atol=1e-10)


def test_layers_that_share_their_weights_share_the_adapter():
    assert len(list(adapters_of(adapted(tiny_network("albert", {}), "query")))) == 1


def test_query_key_and_value_that_are_one_layer_have_one_adapter():
    names = [name for name, _ in adapters_of(adapted(tiny_network("modernbert", {}), "query", "value"))]
    assert names == [f"model.layers.{layer}.attn.Wqkv" for layer in range(3)]


def test_a_rank_above_the_width_is_rejected():
    with pytest.raises(UserError, match=r"lora\.rank: is 33, but .*query has 32 inputs and 32 outputs"):
        add_fresh_adapters(tiny_network(heads={}), ("query",), LoraShape(33, 16.0), stream())


def test_the_scaling_of_rank_stabilized_adapters_is_by_the_root():
    assert LoraShape(16, 8.0).scaling == 0.5
    assert LoraShape(16, 8.0, rank_stabilized=True).scaling == 2.0


def test_a_copy_with_shared_weights_takes_adapters_that_the_original_does_not_see():
    network = tiny_network()
    copy = adapted(with_shared_weights(network))
    assert not any(adapters_of(network))
    theirs = dict(network.named_parameters())
    shared = {name: each for name, each in copy.named_parameters() if ".adapters." not in name}
    assert shared.keys() == theirs.keys()
    assert all(each is theirs[name] for name, each in shared.items())
    merged_network(copy)
    assert torch.equal(states(network), states(tiny_network()))


def test_adapters_stand_beside_packed_weights_that_are_held_once():
    base = tiny_network()
    packed = packed_network(base)
    networks = [
        adapted(with_shared_weights(base), *targets) for targets in (("query", "value"), get_args(Target))
    ]
    for network in networks:
        beside = packed_network(network, packed)
        assert torch.allclose(states(beside), states(network), rtol=0, atol=1e-5)
        for mine, theirs in zip(beside.encoder.blocks, packed.encoder.blocks, strict=True):
            for one, other in zip(mine.linears.in_order(), theirs.linears.in_order(), strict=True):
                assert (one.frozen if isinstance(one, AdaptedLinear) else one) is other
    assert isinstance(networks[0].encoder.blocks[0].attention.project, LoraLinear)
