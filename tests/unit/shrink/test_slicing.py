"""Heads and neurons cut out of a network: the masked original, every way that a network is computed."""

import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from bertsmith.core.errors import UserError
from bertsmith.interchange.onnx_network import onnx_model
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder_config import PassSize
from bertsmith.model.flops import flops_per_step
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.inference.inference_network import (
    calibrated,
    int8_network,
    packed_network,
    stored_weights,
)
from bertsmith.model.lora import LoraShape, adapters_of, add_fresh_adapters, merged_network
from bertsmith.model.network import Network, build_network
from bertsmith.packed import pack
from bertsmith.shrink.slicing import KeptUnits, all_units, pruned_network, zero_filled_network
from tests.lively_networks import lively_network
from tests.oracles import CLASSES

TEXTS = [[5, 17, 8, 30, 41, 7, 9, 60, 11, 44, 3, 12], [44, 9], [6, 6, 71]]
BATCH = pack(TEXTS)
KEPT = [
    KeptUnits((0, 2, 3), tuple(range(0, 64, 2))),
    KeptUnits((1,), tuple(range(40))),
    KeptUnits((0, 1, 2, 3), (7, 63)),
]
MEMBERS = ("bert", "roberta", "distilbert", "electra", "modernbert", "albert", "deberta-v2", "camembert")
every_member = pytest.mark.parametrize("model_type", MEMBERS)


def kept_in(network: Network) -> list[KeptUnits]:
    """As many as there are blocks: all layers of ALBERT run one."""
    return KEPT[: network.config.blocks]


def masked(network: Network, kept: list[KeptUnits]) -> Network:
    """The original whose other heads and neurons reach nothing."""
    masked = deepcopy(network)
    width = network.config.width // network.config.heads
    with torch.no_grad():
        for block, units in zip(masked.encoder.blocks, kept, strict=True):
            for head in set(range(network.config.heads)) - set(units.heads):
                block.attention.output.weight[:, head * width : (head + 1) * width] = 0
            for neuron in set(range(network.config.inner)) - set(units.neurons):
                block.feed_forward.contract.weight[:, neuron] = 0
    return masked


@every_member
def test_a_pruned_network_gives_what_the_masked_original_gives(model_type):
    network = lively_network(model_type, {})
    kept = kept_in(network)
    pruned = pruned_network(network, kept)
    with torch.no_grad():
        assert (pruned(BATCH) - masked(network, kept)(BATCH)).abs().max() <= 1e-5
        assert (pruned(BATCH) - network(BATCH)).abs().max() > 0.1
    assert sum(map(torch.numel, pruned.parameters())) < sum(map(torch.numel, network.parameters()))


@every_member
def test_a_pruned_network_comes_back_from_its_folder(model_type, tmp_path):
    network = lively_network(model_type, {"mlm": 0})
    pruned = pruned_network(network, kept_in(network))
    write_model(tmp_path, Model(pruned))
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["base_model_type"]) == ("bertsmith", model_type)
    read = read_model(tmp_path)
    assert read.network.config == pruned.config
    assert not read.notes and "heads_per_layer" not in read.extras and "base_model_type" not in read.extras
    with torch.no_grad():
        assert torch.equal(read.network(BATCH), pruned(BATCH))


@every_member
def test_transformers_stops_at_a_pruned_folder(model_type, tmp_path):
    network = lively_network(model_type, {})
    write_model(tmp_path, Model(pruned_network(network, kept_in(network))))
    with pytest.raises(ValueError, match="bertsmith"):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="(?i)size|shape|classifier_pooling"):
        getattr(transformers, f"{CLASSES[model_type]}Model").from_pretrained(tmp_path)


@every_member
def test_zero_filled_a_pruned_network_gives_the_same_in_transformers(model_type, tmp_path):
    network = lively_network(model_type, {})
    pruned = pruned_network(network, kept_in(network))
    write_model(tmp_path, Model(zero_filled_network(pruned)))
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == f"{CLASSES[model_type]}Model"
    with torch.no_grad():
        ours = pruned(pack(TEXTS[:1]))
        assert (ours - theirs(input_ids=torch.tensor(TEXTS[:1]))[0][0]).abs().max() <= 1e-5


def test_equal_widths_are_a_published_shape(tmp_path):
    network = lively_network("bert", {})
    every_head = all_units(network)[0].heads
    kept = [KeptUnits(every_head, tuple(range(first, first + 24))) for first in (0, 10, 40)]
    pruned = pruned_network(network, kept)
    write_model(tmp_path, Model(pruned))
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["intermediate_size"]) == ("bert", 24)
    assert "intermediate_sizes" not in written
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(TEXTS[:1]))[0][0]
        assert (pruned(pack(TEXTS[:1])) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "albert"])
def test_packed_and_in_eight_bits_a_pruned_network_is_the_same(model_type, tmp_path):
    network = lively_network(model_type, {})
    pruned = pruned_network(network, kept_in(network))
    with torch.no_grad():
        plain = pruned(BATCH)
        assert torch.allclose(packed_network(pruned)(BATCH), plain, atol=1e-5)
        weights = calibrated(pruned, [BATCH])
        rounded = int8_network(pruned, weights, torch.float32)(BATCH)
        assert torch.cosine_similarity(rounded, plain).min() > 0.99
        pruned.encoder.put_linears(weights)
        write_model(tmp_path, Model(pruned))
        read = read_model(tmp_path).network
        assert (read.config, is_quantised(read)) == (pruned.config, True)
        assert torch.equal(int8_network(read, stored_weights(read), torch.float32)(BATCH), rounded)
    with pytest.raises(UserError, match="quantised"):
        pruned_network(read, all_units(read))


def test_adapters_stand_on_a_pruned_network():
    pruned = pruned_network(lively_network("bert", {}), KEPT)
    stream = torch.Generator().manual_seed(0)
    add_fresh_adapters(pruned, ("query", "output", "feed-forward"), LoraShape(2, 4.0), stream)
    with torch.no_grad():
        for _, adapter in adapters_of(pruned):
            adapter.lora_B.normal_(0, 0.2, generator=stream)
        assert torch.allclose(merged_network(pruned)(BATCH), pruned(BATCH), atol=1e-5)


def test_what_was_pruned_is_pruned_further():
    network = lively_network("bert", {})
    once = pruned_network(network, KEPT)
    again = pruned_network(once, [replace(each, heads=(0,)) for each in all_units(once)])
    expected = [replace(units, heads=units.heads[:1]) for units in KEPT]
    with torch.no_grad():
        assert (again(BATCH) - masked(network, expected)(BATCH)).abs().max() <= 1e-5


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "albert", "distilbert", "electra"])
def test_the_weights_of_a_pruned_config_are_counted_by_arithmetic(model_type):
    has_pooler = "pooler" in ARCHITECTURES[model_type].heads
    network = lively_network(model_type, {"pooler": 0} if has_pooler else {})
    pruned = pruned_network(network, kept_in(network))
    count = ARCHITECTURES[model_type].pretraining.count_parameters(pruned.config)
    assert count == sum(map(torch.numel, pruned.parameters()))


def test_the_operations_of_a_step_follow_the_shapes():
    network = lively_network("bert", {"mlm": 0})
    half = [KeptUnits((0, 1), tuple(range(32)))] * 3
    size = PassSize(tokens=256, sequences=16, predicted=40)
    whole, less = (flops_per_step([each], size) for each in (network, pruned_network(network, half)))
    words = 6 * (32 * 32 + 32 * 99) * 40  # what the head computes stays
    assert less - words == pytest.approx((whole - words) / 2)


def test_a_part_that_layers_share_is_not_pruned():
    config = replace(lively_network("albert", {}).config, sharing="attention")
    with pytest.raises(UserError, match="share"):
        pruned_network(build_network(config, {}), KEPT)


@pytest.mark.parametrize(
    ("key", "value"),
    [("heads_per_layer", [4, 0, 4]), ("heads_per_layer", [4, 4]), ("intermediate_sizes", "64")],
)
def test_wrong_sizes_in_a_config_are_named(key, value, tmp_path):
    write_model(tmp_path, Model(pruned_network(lively_network("bert", {}), KEPT)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=key):
        read_model(tmp_path)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "albert"])
def test_an_onnx_graph_has_the_smaller_shapes(model_type):
    network = lively_network(model_type, {"mlm": 0})
    pruned = pruned_network(network, kept_in(network))
    whole, smaller = (onnx_model(each, "fp32").SerializeToString() for each in (network, pruned))
    assert len(smaller) < len(whole)
    opened = onnxruntime.InferenceSession(smaller)
    ids = np.array(TEXTS[:1])
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    asked = {each.name: inputs[each.name] for each in opened.get_inputs()}
    found = torch.from_numpy(opened.run(["logits"], asked)[0][0])
    batch = pack(TEXTS[:1])
    with torch.no_grad():
        expected = pruned.word_scores(pruned(batch), torch.arange(len(TEXTS[0])))
    assert (found - expected).abs().max() <= 1e-4
