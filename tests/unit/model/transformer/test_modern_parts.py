"""The parts of a ModernBERT and the options over it, each against arithmetic written out plainly."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.model.architectures.modernbert import MODERNBERT, ModernBertConfig
from bertsmith.model.attention.rotary import NormalisedRotary, Rotary
from bertsmith.model.attention.watched import shown
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.inference.inference_network import (
    InferenceBlock,
    calibrated,
    int8_network,
    packed_network,
)
from bertsmith.model.kernels.activations import activation_function
from bertsmith.model.network import Network, build_network, new_network
from bertsmith.packed import ALL, pack
from tests.tiny import tiny_encoder_config

PUBLISHED = {
    "published": {},
    "relu2": {"activation": "relu2"},
    "one-global-layer": {"global_layers": (1,), "local_attention": 4, "global_theta": 50.0},
}
OWN = {
    "ungated": {"gated": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "qk-norm": {"qk_norm": True},
    "sandwich": {"sandwich_norm": True},
    "one-sided": {"direction": "left-to-right"},
    "all": {
        "gated": False,
        "norm": "rmsnorm",
        "qk_norm": True,
        "sandwich_norm": True,
        "activation": "relu2",
    },
}
each_variant = pytest.mark.parametrize("changes", (PUBLISHED | OWN).values(), ids=(PUBLISHED | OWN).keys())
TEXTS = [[5, 17, 3, 80, 9, 31, 8, 60, 2, 44], [44, 2, 61], [7]]


def lively(changes: dict, heads: dict[str, int] | None = None) -> Network:
    """A network whose weights are far from initial ones: nothing hides behind gains of 1."""
    config = tiny_encoder_config("modernbert", local_attention=6)
    network = build_network(replace(config, **changes), heads or {})
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.3, generator=stream)
    return network.eval()


# ---- the reference: one text, a matrix for everything


def plain_states(network: Network, text: list[int]) -> Tensor:
    """The last states of one text, from the weights by their published names."""
    config = network.config
    assert isinstance(config, ModernBertConfig)
    weights = network.encoder.state_dict()

    def norm(states: Tensor, name: str) -> Tensor:
        if config.norm == "rmsnorm":
            return states / (states.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        centred = states - states.mean(-1, keepdim=True)
        return (
            centred
            / (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
            * weights[f"{name}.weight"]
        )

    states = norm(weights["embeddings.words.weight"][text], "embeddings.norm")
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        normed = norm(states, f"{block}.attention_norm") if layer else states
        added = plain_attention(config, weights, normed, layer)
        states = states + (norm(added, f"{block}.attention_output_norm") if config.sandwich_norm else added)
        normed = norm(states, f"{block}.feed_forward_norm")
        inner = normed @ weights[f"{block}.feed_forward.expand.weight"].T
        activate = activation_function(config.activation)
        if config.gated:
            inner = activate(inner[:, : config.inner]) * inner[:, config.inner :]
        else:
            inner = activate(inner)
        added = inner @ weights[f"{block}.feed_forward.contract.weight"].T
        states = states + (
            norm(added, f"{block}.feed_forward_output_norm") if config.sandwich_norm else added
        )
    return norm(states, "final_norm")


def plain_attention(
    config: ModernBertConfig, weights: dict[str, Tensor], states: Tensor, layer: int
) -> Tensor:
    """What attention adds, head by head and pair by pair."""
    length, width = len(states), config.width // config.heads
    three = states @ weights[f"blocks.{layer}.attention.project.weight"].T
    query, key, value = three.view(length, 3, config.heads, width).unbind(1)
    is_global = layer in config.global_layers
    theta = config.global_theta if is_global else config.local_theta
    mixed = torch.zeros_like(value)
    for head in range(config.heads):
        queries, keys = (
            [turned(each[row, head], row, theta, config) for row in range(length)] for each in (query, key)
        )
        for row in range(length):
            visible = [
                other
                for other in range(length)
                if (is_global or abs(row - other) <= config.local_attention // 2)
                and (config.direction == "both" or other <= row)
            ]
            scores = torch.stack([queries[row] @ keys[other] / width**0.5 for other in visible])
            mixed[row, head] = scores.softmax(0) @ value[visible, head]
    return mixed.flatten(1) @ weights[f"blocks.{layer}.attention.output.weight"].T


def turned(features: Tensor, position: int, theta: float, config: ModernBertConfig) -> Tensor:
    if config.qk_norm:
        features = features / (features.square().mean() + config.norm_eps).sqrt()
    half = len(features) // 2
    angles = position * theta ** (-torch.arange(half, dtype=features.dtype) / half)
    pairs = torch.complex(features[:half], features[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag))


@each_variant
def test_every_option_computes_what_it_says(changes):
    network = lively(changes).double()
    with torch.no_grad():
        expected = torch.cat([plain_states(network, text) for text in TEXTS])
        found = network(pack(TEXTS))
    assert torch.allclose(found, expected, atol=1e-9)


@each_variant
def test_every_option_changes_the_states(changes):
    if not changes:
        return
    published, network = lively({}), lively(changes)
    with torch.no_grad():
        assert not torch.allclose(network(pack(TEXTS)), published(pack(TEXTS)), atol=1e-2)


def test_the_squared_relu_and_its_slope():
    values = torch.tensor([-2.0, 0.0, 0.5, 3.0], requires_grad=True)
    activated = activation_function("relu2")(values)
    activated.sum().backward()
    assert activated.tolist() == [0.0, 0.0, 0.25, 9.0]
    assert values.grad.tolist() == [0.0, 0.0, 1.0, 6.0]


def test_normalised_queries_leave_half_precision_to_the_kernels():
    network = lively({"qk_norm": True})
    seen = []

    def see(_layer, vectors, _rule):
        seen.append(tuple(each.dtype for each in vectors))

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        network.encoder.heads.last_states(pack(TEXTS), shown(see), ALL)
    assert set(seen) == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize(
    ("products", "sums"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),  # they may outgrow it
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_residual_sums_have_the_type_of_the_products_where_it_can_hold_them(products, sums):
    network, batch, types = lively({}), pack(TEXTS), []
    for block in network.encoder.blocks:
        block.feed_forward_norm.register_forward_pre_hook(lambda _, inputs: types.append(inputs[0].dtype))
        block.register_forward_hook(lambda *call: types.append(call[-1].dtype))
    exact = network.encoder(batch)
    types.clear()
    with torch.autocast("cpu", dtype=products, enabled=products != torch.float32):
        states = network.encoder(batch)
    assert types == [sums] * 2 * len(network.encoder.blocks)
    states.float().pow(2).mean().backward()
    assert all(each.grad.dtype == torch.float32 for each in network.encoder.parameters())
    assert torch.nn.functional.cosine_similarity(states.float(), exact).min() > 0.99


# ---- what predicts on a CPU


@each_variant
def test_packed_weights_give_the_same_states_and_eight_bits_nearly(changes):
    network = lively(changes)
    packed, rounded = (
        packed_network(network),
        int8_network(network, calibrated(network, [pack(TEXTS)]), torch.float32),
    )
    assert all(isinstance(block, InferenceBlock) for block in packed.encoder.blocks)
    with torch.no_grad():
        plain = network(pack(TEXTS))
        assert torch.allclose(packed(pack(TEXTS)), plain, atol=2e-5)
        assert torch.allclose(
            packed.encoder(pack(TEXTS), rows=torch.tensor([4, 0])), plain[[4, 0]], atol=2e-5
        )
        # The mean: with such weights a softmax may hang on one digit.
        assert torch.cosine_similarity(rounded(pack(TEXTS)), plain).mean() > 0.99


# ---- folders


@each_variant
def test_a_folder_holds_every_option(changes, tmp_path):
    network = lively(changes, {"mlm": 0, "nsp": 2})
    write_model(tmp_path, Model(network))
    model = read_model(tmp_path)
    assert (model.network.config, model.notes) == (network.config, ())
    assert set(model.network.heads) == {"mlm", "nsp"}
    with torch.no_grad():
        for head in (lambda each: each(pack(TEXTS)), lambda each: each.sentence_scores("nsp", pack(TEXTS))):
            assert torch.equal(head(model.network), head(network))


def test_config_json_names_a_type_of_our_own_where_and_only_where_an_option_is():
    for changes in (PUBLISHED | OWN).values():
        config = replace(tiny_encoder_config("modernbert"), **changes)
        written = MODERNBERT.write_config(config)
        is_own = changes in OWN.values()
        assert written["model_type"] == ("bertsmith" if is_own else "modernbert")
        assert ("qk_norm" in written) == is_own


def test_a_word_that_no_norm_has_is_a_clear_error(tmp_path):
    write_model(tmp_path, Model(lively({"norm": "rmsnorm"})))
    written = read_json(tmp_path / "config.json", remedy="")
    write_json(tmp_path / "config.json", written | {"norm": "batchnorm"})
    with pytest.raises(UserError, match="norm is 'batchnorm'; supported: layernorm, rmsnorm"):
        read_model(tmp_path)


# ---- initial weights


def test_initial_weights_are_those_that_were_published():
    config = tiny_encoder_config("modernbert", width=64, layers=8, inner=256, initial_std=0.05)
    network = new_network(config, {"mlm": 0, "nsp": 2}, torch.Generator().manual_seed(0))
    smaller = 0.05 / (2 * 8) ** 0.5
    block = network.encoder.blocks[1]
    # A normal distribution that is cut off at two standard deviations has 0.88 of the whole one's.
    for module, std in (
        (network.encoder.embeddings.words, 0.05),
        (block.attention.project, 0.05),
        (block.attention.output, smaller),
        (block.feed_forward.expand, 0.05),
        (block.feed_forward.contract, smaller),
        (network.heads["mlm"].transform.dense, smaller),
    ):
        assert float(module.weight.detach().std()) == pytest.approx(0.88 * std, rel=0.05)
        assert float(module.weight.detach().abs().max()) <= 2 * std
    norms = [each for each in network.modules() if isinstance(each, nn.LayerNorm)]
    assert len(norms) == 2 + 15 + 2 and all(bool((norm.weight == 1).all()) for norm in norms)
    assert [name for name, _ in network.named_parameters() if name.endswith("bias")] == [
        "heads.mlm.bias",
        "heads.nsp.output.bias",
    ]


# ---- compiled


def test_a_compiled_layer_turns_as_a_plain_one_in_one_graph():
    torch.compiler.reset()
    layers = [Rotary(10.0), NormalisedRotary(50.0, eps=1e-5)]
    states, positions = torch.randn(7, 2, 8, generator=torch.Generator().manual_seed(0)), torch.arange(7)

    def turned(states):
        for layer in layers:
            states, _ = layer(states, states, positions)
        return states

    compiled = torch.compile(turned, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(states), turned(states), atol=1e-6)
