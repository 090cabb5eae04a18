import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import ARCHITECTURES, architecture_of
from bertsmith.model.attention.rule import AttentionRule
from bertsmith.model.encoder_config import ConfigReader
from bertsmith.model.kernels.activations import activation_function
from bertsmith.model.network import add_fresh_head, build_network, new_network
from bertsmith.model.transformer.transformer import AttentionShape, SelfAttention, Transformer
from bertsmith.packed import pack
from tests.tiny import tiny_config, tiny_encoder_config, tiny_network

# ---- exact parameter counts: encoder plus pooler (FACTS of the published systems)


def bert_config(layers=12, width=768, heads=12, vocabulary=30522, **more):
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    defaults = {"intermediate_size": 4 * width, "vocab_size": vocabulary, "max_position_embeddings": 512}
    return {"model_type": "bert", **sizes, **defaults, **more}


def albert_config(layers, width, heads):
    return bert_config(layers, width, heads, 30000, model_type="albert", embedding_size=128)


ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
LARGE = {"layers": 24, "width": 1024, "heads": 16}
COUNTS = [
    ("BERT-Base uncased", bert_config(), ("pooler",), 109_482_240),
    ("BERT-Base cased", bert_config(vocabulary=28996), ("pooler",), 108_310_272),
    ("BERT-Large uncased", bert_config(**LARGE), ("pooler",), 335_141_888),
    ("BertForPreTraining Base", bert_config(), ("pooler", "mlm", "nsp"), 110_106_428),
    ("ALBERT base", albert_config(12, 768, 12), ("pooler",), 11_683_584),
    ("ALBERT large", albert_config(24, 1024, 16), ("pooler",), 17_683_968),
    ("ALBERT xlarge", albert_config(24, 2048, 16), ("pooler",), 58_724_864),
    ("ALBERT xxlarge", albert_config(12, 4096, 64), ("pooler",), 222_595_584),
    ("DistilBERT", {"model_type": "distilbert"}, (), 66_362_880),
    ("RoBERTa-Base", bert_config(vocabulary=50265, **ROBERTA), ("pooler",), 124_645_632),
    ("RoBERTa-Large", bert_config(vocabulary=50265, **LARGE, **ROBERTA), ("pooler",), 355_359_744),
]


def network_of_config(config, heads):
    encoder_config = architecture_of(config["model_type"]).read_config(ConfigReader(config, "config.json"))
    with torch.device("meta"):
        return build_network(encoder_config, dict.fromkeys(heads, 2))


@pytest.mark.parametrize(("name", "config", "heads", "count"), COUNTS, ids=[row[0] for row in COUNTS])
def test_the_published_sizes_have_exactly_the_published_number_of_parameters(name, config, heads, count):
    assert sum(each.numel() for each in network_of_config(config, heads).parameters()) == count


@pytest.mark.parametrize("width", [128, 256, 512, 768])
@pytest.mark.parametrize("layers", [2, 4, 6, 8, 10, 12])
def test_googles_24_small_sizes_all_build(layers, width):
    network = network_of_config(bert_config(layers, width, width // 64), ("pooler",))
    table = (30522 + 512 + 2 + 2) * width
    block = 12 * width * width + 13 * width
    assert (
        sum(each.numel() for each in network.parameters()) == table + layers * block + width * width + width
    )


# ---- sentence heads read a row that depends on the text


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_sentence_heads_output_depends_on_the_text(model_type):
    heads = {"classify": 3} | ({"pooler": 0} if "pooler" in ARCHITECTURES[model_type].heads else {})
    network = tiny_network(model_type, heads=heads)
    assert_depends_on_text(network)


@pytest.mark.parametrize(("sentence", "depends"), [("last", True), ("first", False)])
def test_a_causal_encoder_must_be_read_at_its_last_token(sentence, depends):
    network = tiny_network(heads={"pooler": 0, "classify": 3})
    for block in network.encoder.blocks:
        block.attention.rule = AttentionRule(causal=True)
    network.encoder = Transformer(
        network.encoder.embeddings,
        list(network.encoder.blocks),
        order=network.encoder.order,
        sentence=sentence,
    )
    if depends:
        assert_depends_on_text(network)
    else:
        with pytest.raises(AssertionError):
            assert_depends_on_text(network)


def assert_depends_on_text(network):
    batch = pack([[1, 20, 30, 40, 2], [1, 50, 60, 70, 2]])
    with torch.no_grad():
        one, other = network.scores("classify", network(batch), batch.layout)
    assert (one - other).abs().max() > 1e-7


# ---- initial weights


def test_bert_starts_from_a_normal_distribution_cut_at_two_deviations():
    weights = tiny_network().encoder.blocks[0].feed_forward.expand.weight.detach()
    words = new_network(tiny_encoder_config(vocabulary=20_000), {}, torch.Generator().manual_seed(3)).encoder
    table = words.embeddings.words.weight.detach()
    assert table.abs().max() <= 0.04 and weights.abs().max() <= 0.04
    # A normal cut at two deviations keeps 0.8796 of its deviation.
    assert abs(table.std().item() / (0.02 * 0.8796) - 1) < 0.01


def test_the_deviation_is_the_one_in_the_config():
    network = new_network(
        tiny_encoder_config(vocabulary=20_000, initial_std=0.05), {}, torch.Generator().manual_seed(3)
    )
    assert abs(network.encoder.embeddings.words.weight.std().item() / (0.05 * 0.8796) - 1) < 0.01


def test_roberta_starts_from_the_whole_normal_distribution():
    network = new_network(
        tiny_encoder_config("roberta", vocabulary=20_000), {}, torch.Generator().manual_seed(3)
    )
    table = network.encoder.embeddings.words.weight.detach()
    assert table.abs().max() > 0.04
    assert abs(table.std().item() / 0.02 - 1) < 0.01


def test_modernbert_starts_residual_writers_smaller_and_task_outputs_larger():
    network = tiny_network("modernbert", heads={"classify": 500})
    attention = network.encoder.blocks[0].attention
    small = 0.02 / math.sqrt(2 * 3)
    assert abs(attention.output.weight.std().item() / (small * 0.8796) - 1) < 0.1
    assert abs(attention.project.weight.std().item() / (0.02 * 0.8796) - 1) < 0.1
    assert abs(network.heads["classify"].output.weight.std().item() / (32**-0.5 * 0.8796) - 1) < 0.1


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_biases_start_at_zero_and_norms_at_one(model_type):
    for name, parameter in tiny_network(model_type, heads={"mlm": 0}).named_parameters():
        if parameter.dim() == 1:
            if name.endswith("bias_ih_l0"):  # an LSTM's forget gates begin open
                assert parameter.unflatten(0, (4, -1))[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0], name
                continue
            expected = 0.0 if name.rpartition(".")[2].startswith("bias") else 1.0
            assert (parameter == expected).all(), name


def test_the_same_stream_draws_the_same_network():
    one, same, other = (tiny_network(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["encoder.embeddings.words.weight"], other["encoder.embeddings.words.weight"])


# ---- numerics


def test_the_two_forms_of_gelu_differ_as_much_as_they_should():
    grid = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    erf, tanh, same = map(activation_function, ("gelu", "gelu_new", "gelu_pytorch_tanh"))
    difference = (erf(grid) - tanh(grid)).abs()
    assert abs(difference.max().item() - 4.73e-4) < 1e-6
    assert abs(abs(grid[difference.argmax()].item()) - 2.70) < 0.01
    assert torch.equal(tanh(grid), same(grid))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_is_computed_in_single_precision_whatever_it_is_given(dtype):
    norm = torch.nn.LayerNorm(256, eps=1e-12).to(dtype)
    # 1e-12 is zero in fp16: a norm computed there would divide this row by zero.
    assert norm(torch.full((1, 256), 0.5, dtype=dtype)).isfinite().all()
    rows = torch.randn(400, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    rounded_once = torch.nn.functional.layer_norm(rows.float(), (256,), eps=1e-12).to(dtype)
    assert (norm(rows) != rounded_once).float().mean() < 1e-3  # only ties round otherwise


def test_attention_maps_are_those_the_forward_pass_used():
    network = tiny_network(heads={})
    batch = pack([[1, 5, 6, 2], [1, 9, 2]])
    with torch.no_grad():
        maps = network.encoder.heads.maps(batch)
    assert len(maps) == 3
    assert [each.shape for each in maps[0]] == [(4, 4, 4), (4, 3, 3)]
    assert all(torch.allclose(each.sum(-1), torch.ones(()), atol=1e-6) for layer in maps for each in layer)


def test_attention_dropout_is_on_in_training_and_off_in_evaluation():
    attention = SelfAttention(AttentionShape(8, 2, 4), rule=AttentionRule(dropout=0.5))
    assert (attention.training_rule.dropout, attention.rule.dropout) == (0.5, 0.0)
    network, batch = tiny_network(heads={}), pack([[1, 5, 6, 2]])
    assert torch.equal(network(batch), network(batch))
    network.train()
    assert not torch.equal(network(batch), network(batch))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_network_can_be_pickled_and_copied(model_type):
    network = tiny_network(model_type, heads={"mlm": 0})
    batch = pack([[5, 6, 7]])
    with torch.no_grad():
        for twin in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network)):
            assert torch.equal(twin(batch), network(batch))


def test_what_a_config_leaves_out_is_as_published():
    config = architecture_of("bert").read_config(ConfigReader(bert_config(), "config.json"))
    assert (config.norm_eps, config.activation, config.initial_std, config.segments) == (
        1e-12,
        "gelu",
        0.02,
        2,
    )
    assert (config.dropout, config.attention_dropout, config.head_dropout) == (0.1, 0.1, 0.1)
    albert = architecture_of("albert").read_config(ConfigReader(albert_config(12, 768, 12), "config.json"))
    assert (albert.activation, albert.dropout, albert.attention_dropout) == ("gelu_new", 0.0, 0.0)


# ---- heads that are not there


def test_a_fresh_classifier_brings_a_fresh_pooler_and_says_so():
    network = tiny_network(heads={}).bfloat16()
    added = add_fresh_head(network, "classify", 4, torch.Generator().manual_seed(0))
    assert added == ["classify", "pooler"]
    batch = pack([[1, 5, 2]])
    assert network.scores("classify", network(batch), batch.layout).shape == (1, 4)


def test_a_head_the_member_does_not_have_is_rejected():
    with pytest.raises(UserError, match="distilbert .* 'nsp' head; it has mlm"):
        build_network(tiny_encoder_config("distilbert"), {"nsp": 2})


def test_an_unknown_model_type_is_rejected_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"config.json: unknown model_type 'gpt9'; bertsmith supports bert, roberta"
    ):
        architecture_of("gpt9", where="config.json")


# ---- what recipes read without torch


def test_the_registry_does_not_load_torch():
    program = "import sys, bertsmith.model.architectures.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("direction", "unseen"), [("left-to-right", 3), ("right-to-left", 0)])
def test_a_deberta_may_see_one_side_only(direction, unseen):
    network = new_network(
        tiny_encoder_config("deberta-v2", direction=direction), {}, torch.Generator().manual_seed(0)
    ).eval()
    text = [5, 6, 7, 8]
    changed = [9 if row == unseen else token for row, token in enumerate(text)]
    with torch.no_grad():
        before, after = network(pack([text])), network(pack([changed]))
    rows = [row for row in range(4) if row != unseen]
    assert torch.equal(before[rows], after[rows])
    assert not torch.equal(before[unseen], after[unseen])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size is 3; only 0 is supported"),
        ({"pos_att_type": "c2p"}, "pos_att_type is 'c2p'; only c2p and p2c together"),
        ({"position_buckets": 1}, "position_buckets is 1; write 2 or more"),
        ({"position_biased_input": True}, "position_biased_input is True; only False"),
        ({"relative_attention": "DROP"}, "relative_attention is missing; only True is supported"),
    ],
    ids=str,
)
def test_a_deberta_that_is_not_version_3_is_rejected(changes, said):
    values = {key: value for key, value in (tiny_config("deberta-v2") | changes).items() if value != "DROP"}
    with pytest.raises(UserError, match=said):
        architecture_of("deberta-v2").read_config(ConfigReader(values, "config.json"))


def test_the_config_of_a_published_deberta_is_read():
    published = {
        "model_type": "deberta-v2", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
        "layer_norm_eps": 1e-7, "max_relative_positions": -1, "position_biased_input": False,
        "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0, "vocab_size": 128100,
    }  # fmt: skip
    config = architecture_of("deberta-v2").read_config(ConfigReader(published, "config.json"))
    assert (config.buckets, config.max_distance, config.segments, config.norm_eps) == (256, 512, 0, 1e-7)
    with torch.device("meta"):
        network = build_network(config, {})
    # 184 M as published: 128,100 words, 512 relative positions, 12 layers.
    assert sum(each.numel() for each in network.parameters()) == 183_831_552
