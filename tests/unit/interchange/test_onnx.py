"""ONNX graphs in onnxruntime: what the packed network gives, for every member, head and precision."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch

from bertsmith.interchange.onnx_graph import OPSET
from bertsmith.interchange.onnx_network import OUTPUT_NAMES, onnx_model
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.inference.inference_network import calibrated, int8_network
from bertsmith.model.inference.quantised_weights import quantised_table
from bertsmith.model.kernels.activations import ACTIVATIONS
from bertsmith.model.network import Network, new_network, set_direction, set_pooling
from bertsmith.packed import pack
from tests.lively_networks import lively_network
from tests.tiny import TRANSFORMERS, tiny_encoder_config

TEXTS = [[5, 17, 3, 80, 9], [44, 2, 61], [7, 8] * 20]
SEGMENTS = [[0, 0, 1, 1, 1], [0, 1, 1], [0] * 30 + [1] * 10]
OUTPUTS = {"classify": 3, "tag": 5, "span": 2, "nsp": 2, "sop": 2, "replaced": 1, "choice": 1}
WITH_HEADS = [(name, head) for name in TRANSFORMERS for head in ARCHITECTURES[name].heads]


def of_head(model_type: str, head: str) -> dict[str, int]:
    return {head: OUTPUTS.get(head, 0), **dict.fromkeys(ARCHITECTURES[model_type].heads[head].needs, 0)}


def has_segments(network: Network) -> bool:
    return network.config.segments > 1


def packed(network: Network):
    return pack(TEXTS, segments=SEGMENTS if has_segments(network) else ())


def padded(lists: list[list[int]]) -> np.ndarray:
    longest = max(map(len, lists))
    return np.array([[*each, *[0] * (longest - len(each))] for each in lists], np.int64)


def session(network: Network, precision: str = "fp32") -> onnxruntime.InferenceSession:
    made = onnx_model(network, precision)
    read = {name for node in made.graph.node for name in node.input} | {
        each.name for each in made.graph.output
    }
    assert all(read & set(node.output) for node in made.graph.node), "a node that nobody reads"
    return onnxruntime.InferenceSession(made.SerializeToString())


def found(opened: onnxruntime.InferenceSession, *, choices: int = 0) -> dict[str, np.ndarray]:
    """The outputs for padded texts; a text stands for itself `choices` times where there are choices."""
    fed = {
        "input_ids": padded(TEXTS),
        "attention_mask": padded([[1] * len(text) for text in TEXTS]),
        "token_type_ids": padded(SEGMENTS),
    }
    if choices:
        fed = {name: np.stack([each] * choices, 1) for name, each in fed.items()}
    inputs = {each.name: fed[each.name] for each in opened.get_inputs()}
    return dict(zip((each.name for each in opened.get_outputs()), opened.run(None, inputs), strict=True))


def real_rows(values: np.ndarray) -> np.ndarray:
    return np.concatenate([rows[: len(text)] for rows, text in zip(values, TEXTS, strict=True)])


def expected(network: Network, head: str) -> np.ndarray:
    batch = packed(network)
    with torch.no_grad():
        hidden_TD = network(batch)
        scores = (
            network.scores_of_words(hidden_TD)
            if head == "mlm"
            else network.scores(head, hidden_TD, batch.layout)
        )
    return scores.numpy()


@pytest.mark.parametrize("model_type, head", WITH_HEADS)
def test_every_member_and_head_gives_what_the_packed_network_gives(model_type, head):
    network = lively_network(model_type, of_head(model_type, head))
    scores, opened = expected(network, head), session(network)
    given = found(opened, choices=2 if head == "choice" else 0)
    own = [given[name] for name in OUTPUT_NAMES[head]]
    if head == "span":
        ours = real_rows(np.stack(own, -1))
    elif head == "choice":
        assert own[0].shape == (3, 2)
        ours, scores = own[0], np.repeat(scores, 2, axis=1)
    elif head == "replaced":
        ours = real_rows(own[0])[:, None]
    else:
        ours = own[0] if len(scores) == len(TEXTS) else real_rows(own[0])
    np.testing.assert_allclose(ours, scores, atol=1e-4)
    inputs = {each.name for each in opened.get_inputs()}
    assert ("token_type_ids" in inputs) == has_segments(network)
    assert ("last_hidden_state" in given) == (head == "pooler")


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_half_precision_is_near_and_speaks_single(model_type):
    network = lively_network(model_type, {})
    given = found(session(network, "fp16"))["last_hidden_state"]
    with torch.no_grad():
        states = network(packed(network)).numpy()
    assert given.dtype == np.float32 and np.abs(real_rows(given) - states).max() < 0.05


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_eight_bits_are_those_of_the_quantised_network(model_type):
    network = lively_network(model_type, {"mlm": 0})
    weights = calibrated(network, [packed(network)])
    network.encoder.put_linears(weights)
    network.encoder.put_words(quantised_table(network.encoder.words))
    graph = onnx_model(network, "fp32").graph
    # Four products a layer, and in each layer that runs the same block again the same weights.
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 4 * len(network.encoder.order)
    assert sum(weight.data_type == 3 for weight in graph.initializer) == 4 * len(network.encoder.blocks) + 1
    ours = real_rows(found(session(network))["logits"])
    # Here DeBERTa's products are those of real numbers, with the rounded weights.
    rounded = network if model_type == "deberta-v2" else int8_network(network, weights, torch.float32)
    with torch.no_grad():
        exact = network.scores_of_words(network(packed(network))).numpy()
        theirs = rounded.scores_of_words(rounded(packed(network))).numpy()
    # The two round alike, but for what falls on a border between steps.
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > (0.99 if rounded is network else 0.999)
    assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation(activation):
    network = new_network(
        replace(tiny_encoder_config(), activation=activation), {"mlm": 0}, torch.Generator().manual_seed(0)
    ).eval()
    np.testing.assert_allclose(
        real_rows(found(session(network))["logits"]), expected(network, "mlm"), atol=1e-5
    )


@pytest.mark.parametrize("direction", ["left-to-right", "right-to-left"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "deberta-v2"])
def test_one_sided_models_see_one_side(model_type, direction):
    network = lively_network(model_type, of_head(model_type, "classify"))
    set_direction(network, direction)
    np.testing.assert_allclose(found(session(network))["logits"], expected(network, "classify"), atol=1e-4)


def test_the_mean_of_a_text_leaves_its_padding_out():
    network = lively_network("modernbert", {"classify": 3})
    set_pooling(network, "mean")
    np.testing.assert_allclose(found(session(network))["logits"], expected(network, "classify"), atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"norm": "rmsnorm", "qk_norm": True}, {"sandwich_norm": True, "gated": False}, {"tied": False}],
)
def test_parts_of_our_own(changes):
    config = tiny_encoder_config("modernbert", **changes)
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0)).eval()
    ours = real_rows(found(session(network))["logits"])
    np.testing.assert_allclose(ours, expected(network, "mlm"), atol=1e-5)


def test_layers_that_were_pruned():
    config = tiny_encoder_config("bert", layer_heads=(1, 4, 2), layer_inner=(64, 10, 3))
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0)).eval()
    ours = real_rows(found(session(network))["logits"])
    np.testing.assert_allclose(ours, expected(network, "mlm"), atol=1e-5)


def test_the_opset_is_stated_and_the_axes_are_free():
    made = onnx_model(lively_network("bert", {"mlm": 0}), "fp32")
    assert [each.version for each in made.opset_import] == [OPSET]
    axes = [axis.dim_param for axis in made.graph.input[0].type.tensor_type.shape.dim]
    assert axes == ["batch_size", "sequence_length"]
