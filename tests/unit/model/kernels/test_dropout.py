"""Every dropout is where it was published, at the rate of its own key."""

import pytest
import torch
from torch import nn

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder_config import ConfigReader
from bertsmith.model.network import build_network
from bertsmith.packed import pack
from tests.tiny import TRANSFORMERS, tiny_config

# Distinct rates, so that no key can stand in for another.
BERT_RATES = {"hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12, "classifier_dropout": 0.13}
RATES = {
    "bert": BERT_RATES,
    "roberta": BERT_RATES,
    "xlm-roberta": BERT_RATES,
    "camembert": BERT_RATES,
    "deberta-v2": {
        "hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12, "cls_dropout": 0.13,
        "pooler_dropout": 0.14,
    },
    "ernie": BERT_RATES,
    "electra": BERT_RATES | {"summary_last_dropout": 0.14},
    "albert": {
        "hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12, "classifier_dropout_prob": 0.13,
    },
    "distilbert": {
        "dropout": 0.11, "attention_dropout": 0.12, "seq_classif_dropout": 0.13, "qa_dropout": 0.14,
    },
    "modernbert": {
        "embedding_dropout": 0.11, "attention_dropout": 0.12, "classifier_dropout": 0.13, "mlp_dropout": 0.14,
    },
    "gpt2": {"resid_pdrop": 0.11, "attn_pdrop": 0.12, "classifier_dropout": 0.13, "embd_pdrop": 0.14},
}  # fmt: skip
ROBERTA_HEADS = {"classify": (0.13, 0.13), "tag": (0, 0.13), "span": (0, 0), "choice": (0, 0.13)}
HEADS = {
    "xlm-roberta": ROBERTA_HEADS,
    "camembert": ROBERTA_HEADS,
    "deberta-v2": {"classify": (0.14, 0.13), "tag": (0, 0.11), "span": (0, 0), "choice": (0.14, 0.13)},
    "bert": {"classify": (0, 0.13), "tag": (0, 0.13), "span": (0, 0), "choice": (0, 0.13), "nsp": (0, 0)},
    "ernie": {"classify": (0, 0.13), "tag": (0, 0.13), "span": (0, 0), "choice": (0, 0.13), "nsp": (0, 0)},
    "roberta": ROBERTA_HEADS,
    "albert": {
        "classify": (0, 0.13), "tag": (0, 0.13), "span": (0, 0), "choice": (0, 0.13), "sop": (0, 0.13),
    },
    "electra": {
        "classify": (0.13, 0.13), "tag": (0, 0.13), "span": (0, 0), "choice": (0, 0.14), "replaced": (0, 0),
    },
    "distilbert": {"classify": (0, 0.13), "tag": (0, 0.11), "span": (0, 0.14), "choice": (0, 0.13)},
    "modernbert": {
        "classify": (0, 0.13), "tag": (0, 0.13), "span": (0, 0.13), "choice": (0, 0.13), "nsp": (0, 0),
    },
    "gpt2": {"classify": (0, 0), "tag": (0, 0.13), "span": (0, 0)},
}  # fmt: skip
every_member = pytest.mark.parametrize("model_type", TRANSFORMERS)


def network_of(model_type: str, heads: dict[str, int]):
    config = tiny_config(model_type) | RATES[model_type]
    encoder_config = ARCHITECTURES[model_type].read_config(ConfigReader(config, "config.json"))
    return build_network(encoder_config, heads)


@every_member
def test_the_rates_in_the_encoder_are_those_of_their_keys(model_type):
    encoder = network_of(model_type, {}).encoder
    block = encoder.blocks[0]
    assert encoder.embeddings.dropout.p == (0.14 if model_type == "gpt2" else 0.11)
    assert block.attention.training_rule.dropout == 0.12
    # ModernBERT drops what attention writes at the attention's rate, and the gated half at the mlp's.
    assert block.dropout.p == (0.12 if model_type == "modernbert" else 0.11)
    if model_type == "gpt2":
        assert block.feed_forward_dropout.p == 0.11
    if model_type == "deberta-v2":
        assert encoder.relative.dropout.p == 0.11
    if model_type == "modernbert":
        assert block.feed_forward.dropout.p == 0.14


@every_member
def test_the_rates_in_the_heads_are_those_of_their_keys(model_type):
    for head, (before, after) in HEADS[model_type].items():
        module = network_of(model_type, {head: 2}).heads[head]
        assert (module.dropout_before.p, module.dropout.p) == (before, after), head


@every_member
def test_rates_come_back_from_the_config_they_are_written_to(model_type):
    architecture = ARCHITECTURES[model_type]
    config = architecture.read_config(
        ConfigReader(tiny_config(model_type) | RATES[model_type], "config.json")
    )
    assert architecture.read_config(ConfigReader(architecture.write_config(config), "config.json")) == config


@every_member
def test_every_dropout_is_on_the_way_of_the_forward_pass(model_type):
    heads = {"classify": 2, "pooler": 0} if "pooler" in ARCHITECTURES[model_type].heads else {"classify": 2}
    network = network_of(model_type, heads).train()
    passed: dict[str, int] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Dropout):
            passed[name] = 0
            module.register_forward_hook(lambda *_, name=name: passed.update({name: passed[name] + 1}))
    batch = pack([[5, 6, 7]])
    network.scores("classify", network(batch), batch.layout)
    layers = len(network.encoder.order)
    assert all(passed.values())
    per_layer = 1 if model_type == "modernbert" else 2
    in_blocks = sum(
        count for name, count in passed.items() if name.endswith("dropout") and ".blocks." in name
    )
    gated = layers if model_type == "modernbert" else 0
    assert in_blocks == per_layer * layers + gated


@every_member
def test_dropout_changes_the_output_in_training_only(model_type):
    network = network_of(model_type, {}).train()
    batch = pack([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert not torch.equal(network(batch), network(batch))
        assert torch.equal(network.eval()(batch), network(batch))
