"""Folders of quantised weights: every member is read as it was written, and broken ones say so."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.inference.inference_network import (
    calibrated,
    computes_in_4_bits,
    int8_network,
    packed_network,
    real_network,
    stored_weights,
)
from bertsmith.model.inference.quantised_weights import (
    QuantisedEmbedding,
    QuantisedLinear,
    bits_of,
    quantised_for_memory,
    quantised_table,
    rounded,
)
from bertsmith.model.kernels.torch_internals import has_4bit_products
from bertsmith.model.network import Network, new_network
from bertsmith.packed import pack
from tests.folders import change_config, complaint, drop
from tests.tiny import TRANSFORMERS, tiny_encoder_config, tiny_network

CONVERTIBLE = tuple(name for name in TRANSFORMERS if name != "deberta-v2")
BATCH = pack([[5, 17, 3, 80, 9], [44, 2, 61], [7] * 40])


def lively(model_type: str):
    """A tiny network whose layers do something: published initial weights are small."""
    network = tiny_network(model_type, heads={"mlm": 0})
    with torch.no_grad():
        for each in network.encoder.linears():
            each.linear.weight.mul_(5)
    return network


def calibrated_network(model_type: str = "bert"):
    network = lively(model_type)
    network.encoder.put_linears(calibrated(network, [BATCH]))
    network.encoder.put_words(quantised_table(network.encoder.words))
    return network


def for_memory(model_type: str, bits: int):
    return rounded_for_memory(lively(model_type), bits)


def rounded_for_memory(network: Network, bits: int) -> Network:
    encoder = network.encoder
    encoder.put_linears(quantised_for_memory(each.linear, bits) for each in encoder.linears())
    encoder.put_words(quantised_table(encoder.words))
    return network


def likeness(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found, exact).min())


def test_what_has_no_eight_bit_products_here_is_multiplied_as_real_numbers(tmp_path):
    network = calibrated_network("deberta-v2")
    write_model(tmp_path / "int8", Model(network))
    found = read_model(tmp_path / "int8").network
    assert len(stored_weights(found)) == 4 * len(found.encoder.blocks)
    with torch.no_grad():
        real = real_network(found)
        assert not is_quantised(real) and torch.equal(real(BATCH), network(BATCH))
        assert likeness(real(BATCH), lively("deberta-v2")(BATCH)) > 0.99


@pytest.mark.parametrize("model_type", CONVERTIBLE)
def test_eight_bit_products_are_to_the_bit_those_that_were_written(model_type, tmp_path):
    network = calibrated_network(model_type)
    write_model(tmp_path / "int8", Model(network))
    found = read_model(tmp_path / "int8").network
    assert is_quantised(found) and isinstance(found.encoder.embeddings.words, QuantisedEmbedding)
    with torch.no_grad():
        plain = lively(model_type)(BATCH)
        ours, theirs = (int8_network(each, stored_weights(each), torch.float32) for each in (network, found))
        assert torch.equal(ours(BATCH), theirs(BATCH))
        assert likeness(theirs(BATCH), plain) > 0.99
        # Where a machine has no such products, the same weights are multiplied as real numbers.
        assert torch.equal(network(BATCH), found(BATCH))
        assert torch.allclose(packed_network(found)(BATCH), found(BATCH), atol=1e-5)
        real = real_network(found)
        assert not is_quantised(real) and is_quantised(found)
        assert torch.equal(real(BATCH), found(BATCH))
        rows = torch.tensor([0, 3])
        assert torch.equal(network.word_scores(network(BATCH), rows), found.word_scores(found(BATCH), rows))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_weights_of_few_bits_stay_small_and_are_read_as_they_were_written(
    model_type, bits, tmp_path, monkeypatch
):
    network = for_memory(model_type, bits)
    write_model(tmp_path / "small", Model(network))
    found = read_model(tmp_path / "small").network
    monkeypatch.setattr("bertsmith.model.kernels.torch_internals.has_4bit_products", lambda: False)
    assert packed_network(found) is found and not stored_weights(found)
    held = [module for module in found.modules() if isinstance(module, QuantisedLinear)]
    assert len(held) == 4 * len(found.encoder.blocks)
    assert {module.whole.nbytes * 8 // bits for module in held} <= {
        each.linear.weight.numel() for each in lively(model_type).encoder.linears()
    }
    with torch.no_grad():
        assert torch.equal(network(BATCH), found(BATCH))
        assert likeness(found(BATCH), lively(model_type)(BATCH)) > (0.99 if bits == 8 else 0.8)


@pytest.mark.skipif(not has_4bit_products(), reason="KleidiAI is in torch's builds for ARM")
@pytest.mark.parametrize("model_type", CONVERTIBLE)
def test_four_bits_are_multiplied_as_they_are_where_the_machine_can(model_type):
    network = for_memory(model_type, 4)
    fast = packed_network(network)
    assert fast is not network and isinstance(fast.encoder.embeddings.words, QuantisedEmbedding)
    with torch.no_grad():
        assert likeness(fast(BATCH), network(BATCH)) > 0.999
    assert computes_in_4_bits(network) and not computes_in_4_bits(for_memory(model_type, 8))


def test_rounding_errs_by_half_a_step_and_four_bits_pack_two_numbers_in_a_byte():
    linear = nn.Linear(64, 8).requires_grad_(False)
    for bits, most in ((8, 0.5 / 127), (4, 0.5 / 7)):
        made = quantised_for_memory(linear, bits)
        assert made.whole.numel() == 64 * 8 * bits // 8
        error = (made.weight - linear.weight).abs() / linear.weight.abs().amax()
        # Four bits may cut off the ends of a group where that costs less than wider steps.
        assert float(error.max()) <= most * (1.01 if bits == 8 else 5)
        assert float(error.square().mean()) < most**2
    ungrouped = quantised_for_memory(nn.Linear(6, 2), 4)
    assert (ungrouped.whole.shape, ungrouped.scales_OG.shape) == ((2, 3), (2, 1))
    whole, scales = rounded(torch.tensor([[7.0, -7.0, 3.0, 0.0]]), 4)
    assert whole.tolist() == [[15 | 1 << 4, 11 | 8 << 4]] and scales.tolist() == [[1.0]]


def test_an_odd_number_of_inputs_takes_eight_bits_where_four_were_asked_for(tmp_path):
    pruned = new_network(tiny_encoder_config(layer_inner=(63, 64, 1)), {}, torch.Generator().manual_seed(0))
    network = rounded_for_memory(pruned.eval(), 4)
    write_model(tmp_path / "small", Model(network))
    found = read_model(tmp_path / "small").network
    contracting = [each.linear for each in found.encoder.linears()[3::4]]
    assert [(each.in_features, bits_of(each.whole)) for each in contracting] == [(63, 8), (64, 4), (1, 8)]
    with torch.no_grad():
        assert torch.equal(network(BATCH), found(BATCH))
        assert likeness(packed_network(found)(BATCH), found(BATCH)) > 0.999


def test_a_layer_in_half_precision_keeps_its_whole_numbers(tmp_path):
    write_model(tmp_path / "int8", Model(calibrated_network()))
    exact, half = (
        read_model(tmp_path / "int8", dtype=each).network for each in (torch.float32, torch.bfloat16)
    )
    ours, theirs = (each.encoder.blocks[0].attention.project for each in (exact, half))
    assert torch.equal(ours.whole, theirs.whole) and theirs.weight.dtype == torch.bfloat16
    assert torch.equal(ours.weight.bfloat16(), theirs.weight)  # scales of 16 bits would move it once more
    table, halved = (each.encoder.embeddings.words for each in (exact, half))
    assert torch.equal(table.weight.bfloat16(), halved.weight)
    assert torch.equal(table.weight.bfloat16()[:3], halved(torch.arange(3)))
    half.to("cpu")  # as a task's scorer goes to its device: no type is named, and none may change
    assert theirs.weight.dtype == halved.weight.dtype == torch.bfloat16
    assert torch.equal(ours.weight.bfloat16(), theirs.weight) and theirs.scales_OG.dtype == torch.float32


def test_other_tools_stop_at_the_type_and_recipes_say_why(tmp_path):
    from transformers import AutoConfig

    write_model(tmp_path / "int8", Model(calibrated_network()))
    with pytest.raises(ValueError, match="bertsmith-quantised"):
        AutoConfig.from_pretrained(tmp_path / "int8")
    told = json.loads((tmp_path / "int8" / "config.json").read_text())["quantised"]
    assert told == {"model_type": "bert", "bits": 8, "weights_only": False}


def spoil(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    "name, change",
    [
        (QUERY, lambda whole: whole.float()),
        (QUERY, lambda whole: whole[:, :7].contiguous()),
        (f"{QUERY}_scales", lambda scales: scales * float("nan")),
        (f"{QUERY}_scales", lambda scales: -scales),
        (f"{QUERY}_scales", lambda scales: scales[:3].clone()),
        (f"{QUERY}_per_input", lambda factors: factors[:3].clone()),
        (f"{QUERY}_input_steps", lambda steps: steps * 0),
        (f"{QUERY}_input_steps", lambda steps: steps + 1000),
    ],
)
def test_numbers_that_do_not_belong_together_are_refused(name, change, tmp_path):
    write_model(tmp_path / "int8", Model(calibrated_network()))
    spoil(tmp_path / "int8", name, change)
    assert re.search("quantise again|different models", complaint(tmp_path / "int8"))


def test_a_folder_that_lacks_a_part_is_refused(tmp_path):
    write_model(tmp_path / "int8", Model(calibrated_network()))
    drop(tmp_path / "int8", QUERY)
    assert QUERY in complaint(tmp_path / "int8")
    change_config(tmp_path / "int8", quantised="DROP")
    assert "does not name the original model" in complaint(tmp_path / "int8")
    with pytest.raises(UserError, match="quantised, so it cannot learn"):
        architecture_of("bertsmith-quantised")
