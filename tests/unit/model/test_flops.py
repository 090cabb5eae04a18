"""The count of operations beside torch's own counter, weights of the network, and sums by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertsmith.model.encoder_config import PassSize
from bertsmith.model.flops import flops_per_step, forward_flops
from bertsmith.model.network import build_network
from bertsmith.packed import pack
from tests.tiny import tiny_encoder_config, tiny_network

SIZE = PassSize(tokens=40, sequences=5, predicted=6)


@pytest.mark.parametrize("model_type", ["bert", "albert", "electra", "modernbert", "gpt2"])
def test_products_are_counted_as_torch_counts_them(model_type, monkeypatch):
    # The counter looks into attention by products, not into an operator of ours.
    monkeypatch.setattr("bertsmith.model.attention.products.MAX_LENGTH", 0)
    network = tiny_network(model_type, {"mlm": 0}).train()
    batch = pack([[7] * 8] * SIZE.sequences)
    with FlopCounterMode(display=False) as counter:
        network.scores_of_words(network(batch)[: SIZE.predicted]).sum().backward()
    config = network.config
    seen = sum(config.seen_tokens(8, layer) for layer in range(config.layers))
    attention = 12 * config.width * seen * SIZE.tokens
    widening = 6 * config.embedding_width * config.width * SIZE.tokens  # a part of the embeddings
    beside = widening if config.embedding_width != config.width else 0
    assert flops_per_step([network], SIZE) - attention == counter.get_total_flops() - beside


@pytest.mark.parametrize("model_type", ["bert", "albert", "modernbert"])
def test_layers_take_two_operations_a_weight_and_four_a_pair_and_feature(model_type):
    config = tiny_encoder_config(model_type)
    network = build_network(config, {})
    blocks = [network.encoder.blocks[number] for number in network.encoder.order]
    weights = sum(
        each.numel()
        for block in blocks
        for name, each in block.named_parameters()
        if each.dim() == 2 and "norm" not in name
    )
    # Scores and mix: each token with each that it sees, in every layer.
    seen = sum(config.seen_tokens(10, layer) for layer in range(len(blocks)))
    assert config.operations(PassSize(10, 1)) == 10 * (2 * weights + 4 * config.width * seen)


def test_bert_base_takes_what_the_share_of_the_chip_is_told_by():
    """6 x 85M + 12 x layers x width x length + 6 x 15 % of the head, for each token."""
    layers, width, length = 12, 768, 128
    config = tiny_encoder_config(
        layers=layers, width=width, heads=12, inner=4 * width, vocabulary=30_522, positions=512
    )
    with torch.device("meta"):
        network = build_network(config, {"mlm": 0})
    weights = layers * 12 * width**2
    head = width * width + width * 30_522
    by_hand = 6 * weights + 12 * layers * width * length + 6 * 0.15 * head
    size = PassSize(tokens=100 * length, sequences=100, predicted=15 * length)
    assert weights == pytest.approx(85e6, rel=0.01)
    assert flops_per_step([network], size) == pytest.approx(100 * length * by_hand)


def test_a_discriminator_judges_every_token_and_scores_no_words():
    discriminator, generator = (tiny_network("electra", {head: 1}) for head in ("replaced", "mlm"))
    config = discriminator.config
    head = 2 * (config.width**2 + config.width) * SIZE.tokens
    assert forward_flops(discriminator, SIZE) == config.operations(SIZE) + head
    both = flops_per_step([discriminator, generator], SIZE)
    assert both == flops_per_step([discriminator], SIZE) + flops_per_step([generator], SIZE)


def test_a_teacher_runs_forward_only():
    student, teacher = tiny_network("bert"), tiny_network("electra", {"mlm": 0})
    asked = flops_per_step([student], SIZE, teacher=teacher) - flops_per_step([student], SIZE)
    assert 3 * asked == pytest.approx(flops_per_step([teacher], SIZE))
