"""Importance of heads and neurons: explicit loops over transformers' eager model, and finite differences."""

import pytest
import torch
from torch.nn import functional

from bertsmith.model.folder.model_folder import read_model
from bertsmith.model.importance import UnitImportance, importance_gates
from bertsmith.packed import pack
from tests.lively_networks import lively_network
from tests.oracles import saved_oracle

TEXTS = [[5, 17, 8, 30, 41, 7, 9], [44, 9], [6, 6, 71]]
LABELS = torch.tensor([1, 0, 1])


def importance_of(network) -> UnitImportance:
    """By gates, the texts in two batches."""
    with importance_gates(network) as gates:
        for first, last in ((0, 2), (2, 3)):
            scores = network.sentence_scores("classify", pack(TEXTS[first:last]))
            gates.collect(functional.cross_entropy(scores, LABELS[first:last], reduction="sum"))
    return gates.importance()


def gated_layer(layer, model_type: str, head_gate: torch.Tensor, neuron_gate: torch.Tensor):
    """Explicit gates, put on a layer of transformers by hand."""
    output, contract = {
        "bert": lambda: (layer.attention.output.dense, layer.output.dense),
        "distilbert": lambda: (layer.attention.out_lin, layer.ffn.lin2),
        "modernbert": lambda: (layer.attn.Wo, layer.mlp.Wo),
    }[model_type]()
    spread = head_gate.repeat_interleave(output.in_features // len(head_gate))
    return [
        output.register_forward_pre_hook(lambda _, args: (args[0] * spread,)),
        contract.register_forward_pre_hook(lambda _, args: (args[0] * neuron_gate,)),
    ]


def layers_of(model, model_type: str):
    return {
        "bert": lambda: model.bert.encoder.layer,
        "distilbert": lambda: model.distilbert.transformer.layer,
        "modernbert": lambda: model.model.layers,
    }[model_type]()


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert"])
def test_importance_is_the_mean_absolute_gradient_of_explicit_gates(model_type, tmp_path):
    theirs = saved_oracle(tmp_path, model_type, "ForSequenceClassification", num_labels=2)
    layers = layers_of(theirs, model_type)
    expected_heads, expected_neurons = torch.zeros(3, 4).double(), torch.zeros(3, 64).double()
    for text, label in zip(TEXTS, LABELS, strict=True):
        gates = [(torch.ones(4, requires_grad=True), torch.ones(64, requires_grad=True)) for _ in layers]
        hooks = [
            hook
            for layer, pair in zip(layers, gates, strict=True)
            for hook in gated_layer(layer, model_type, *pair)
        ]
        logits = theirs(input_ids=torch.tensor([text])).logits
        functional.cross_entropy(logits, label[None]).backward()
        for number, (heads, neurons) in enumerate(gates):
            expected_heads[number] += heads.grad.abs().double() / len(TEXTS)
            expected_neurons[number] += neurons.grad.abs().double() / len(TEXTS)
        for hook in hooks:
            hook.remove()
    found = importance_of(read_model(tmp_path).network)
    assert torch.allclose(torch.stack(found.heads), expected_heads, atol=1e-5)
    assert torch.allclose(torch.stack(found.neurons), expected_neurons, atol=1e-5)


@pytest.mark.parametrize("model_type", ["albert", "deberta-v2", "roberta"])
def test_importance_is_what_a_small_change_of_a_gate_does(model_type):
    heads = {"classify": 2} if model_type != "albert" else {"pooler": 0, "classify": 2}
    network = lively_network(model_type, heads).double()
    found = importance_of(network)
    width = network.config.width // network.config.heads

    def losses() -> torch.Tensor:
        with torch.no_grad():
            scores = network.sentence_scores("classify", pack(TEXTS))
            return functional.cross_entropy(scores, LABELS, reduction="none")

    def differences(weight: torch.Tensor, columns: slice) -> float:
        """Of each text's loss, as the columns that read an output are scaled a little up and down."""
        before, step = weight.data[:, columns].clone(), 1e-5
        weight.data[:, columns] = before * (1 + step)
        above = losses()
        weight.data[:, columns] = before * (1 - step)
        below = losses()
        weight.data[:, columns] = before
        return float(((above - below) / (2 * step)).abs().mean())

    for number, block in enumerate(network.encoder.blocks):
        for head in range(4):
            columns = slice(head * width, (head + 1) * width)
            change = differences(block.attention.output.weight, columns)
            assert float(found.heads[number][head]) == pytest.approx(change, rel=1e-4, abs=1e-8)
        for neuron in (0, 17):
            change = differences(block.feed_forward.contract.weight, slice(neuron, neuron + 1))
            assert float(found.neurons[number][neuron]) == pytest.approx(change, rel=1e-4, abs=1e-8)


def test_normalised_each_layer_has_length_one_and_one_that_nothing_needs_stays_zero():
    raw = UnitImportance((torch.tensor([3.0, 4.0]), torch.zeros(2)), (torch.tensor([2.0]), torch.ones(4)))
    normalised = raw.normalised()
    assert normalised.heads[0].tolist() == pytest.approx([0.6, 0.8])
    assert normalised.heads[1].tolist() == [0, 0]
    assert normalised.neurons[1].tolist() == [0.5] * 4


def test_without_the_gates_the_network_is_as_it_was():
    network = lively_network("bert", {"pooler": 0, "classify": 2})
    before = network(pack(TEXTS))
    importance_of(network)
    assert torch.equal(network(pack(TEXTS)), before)
    assert all(parameter.grad is None for parameter in network.parameters())
