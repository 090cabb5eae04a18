"""Models that see one side only: left to right against decoders of transformers, and what folders say."""

from dataclasses import replace

import pytest
import torch
import transformers

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.network import new_network
from bertsmith.packed import pack, unpack
from tests.tiny import TRANSFORMERS, tiny_encoder_config, tiny_network

TEXTS = [[5, 17, 8, 30, 41, 7], [9, 60, 11], [44]]
ONE_SIDED = [
    (direction, name)
    for name in TRANSFORMERS
    for direction in ARCHITECTURES[name].directions
    if direction != "both"
]
CAUSAL = {
    "bert": "BertLMHeadModel",
    "roberta": "RobertaForCausalLM",
    "ernie": "ErnieForCausalLM",
    "electra": "ElectraForCausalLM",
}


def one_sided(model_type: str, direction: str):
    """A network with lively weights."""
    config = replace(tiny_encoder_config(model_type), direction=direction, initial_std=0.2)
    return new_network(config, {"mlm": 0}, torch.Generator().manual_seed(3)).eval()


@pytest.mark.parametrize("model_type", CAUSAL)
def test_left_to_right_every_word_scores_as_in_transformers(model_type, tmp_path):
    write_model(tmp_path, Model(one_sided(model_type, "left-to-right")))
    theirs = getattr(transformers, CAUSAL[model_type]).from_pretrained(tmp_path).eval()
    network, batch = read_model(tmp_path).network, pack(TEXTS)
    assert theirs.config.is_decoder and theirs.config.architectures == [CAUSAL[model_type]]
    assert network.config.direction == "left-to-right"
    with torch.no_grad():
        ours = unpack(network.scores_of_words(network(batch)), batch.layout)
        for text, scores in zip(TEXTS, ours, strict=True):
            expected = theirs(input_ids=torch.tensor([text])).logits[0]
            assert (scores - expected).abs().max() <= 2e-5


def test_a_decoder_of_transformers_is_opened_as_one(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=99, is_decoder=True, initializer_range=0.2, **sizes)
    theirs = transformers.BertLMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    network, batch = read_model(tmp_path).network, pack(TEXTS[:1])
    with torch.no_grad():
        ours = network.scores_of_words(network(batch))
        assert (ours - theirs(input_ids=torch.tensor(TEXTS[:1])).logits[0]).abs().max() <= 2e-5


@pytest.mark.parametrize(("direction", "model_type"), ONE_SIDED)
def test_every_architecture_keeps_its_direction_in_a_folder(model_type, direction, tmp_path):
    network, batch = one_sided(model_type, direction), pack(TEXTS)
    write_model(tmp_path, Model(network))
    again = read_model(tmp_path).network
    assert again.config.direction == direction
    with torch.no_grad():
        assert torch.equal(again(batch), network(batch))
        changed = pack([[*TEXTS[0][:3], 77, *TEXTS[0][4:]], *TEXTS[1:]])
        same = (again(changed)[:6] == network(batch)[:6]).all(-1).tolist()
    expected = [True] * 3 + [False] * 3 if direction == "left-to-right" else [False] * 4 + [True] * 2
    assert same == expected


@pytest.mark.parametrize("direction", ["left-to-right", "right-to-left"])
def test_the_attention_that_is_shown_is_of_one_side(direction):
    config = replace(tiny_encoder_config(), direction=direction)
    network = new_network(config, {}, torch.Generator().manual_seed(3)).eval()
    batch = pack(TEXTS)
    for layer in network.encoder.heads.maps(batch):
        for each in layer:
            beyond = each.triu(1) if direction == "left-to-right" else each.tril(-1)
            assert (beyond == 0).all() and torch.allclose(each.sum(-1), torch.ones(()), atol=1e-6)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_model_of_both_sides_says_nothing_of_a_direction(model_type, tmp_path):
    config = ARCHITECTURES[model_type].write_config(tiny_network(model_type, heads={}).config)
    assert not {"is_decoder", "attention_direction"} & config.keys()


def test_what_stands_for_a_sentence_is_the_row_that_sees_all_of_it():
    batch = pack(TEXTS)
    for direction, row in (("both", 0), ("left-to-right", 5), ("right-to-left", 0)):
        config = replace(tiny_encoder_config(), direction=direction)
        network = new_network(config, {"pooler": 0}, torch.Generator().manual_seed(3)).eval()
        with torch.no_grad():
            hidden = network(batch)
            assert torch.equal(network.encoder.sentence_states(hidden, batch.layout)[0], hidden[row])


@pytest.mark.parametrize(("direction", "model_type"), ONE_SIDED)
def test_a_task_head_reads_the_whole_text(direction, model_type):
    config = replace(tiny_encoder_config(model_type), direction=direction, initial_std=0.2)
    heads = {"pooler": 0} if "pooler" in ARCHITECTURES[model_type].heads else {}
    network = new_network(config, heads | {"classify": 3}, torch.Generator().manual_seed(3)).eval()
    with torch.no_grad():
        scores = network.sentence_scores("classify", pack(TEXTS[:1]))
        for place in range(6):
            changed = [*TEXTS[0][:place], 77, *TEXTS[0][place + 1 :]]
            assert not torch.allclose(network.sentence_scores("classify", pack([changed])), scores), place
