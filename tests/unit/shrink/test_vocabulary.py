"""A model whose vocabulary was trimmed, and exports for transformers, from the command line."""

import json

import pytest
import torch
import transformers

from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import load
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.network import new_network
from bertsmith.packed import pack
from bertsmith.shrink.slicing import KeptUnits, pruned_network
from bertsmith.shrink.vocabulary import trimmed_network
from bertsmith.text.tokenizer import Tokenizer
from tests.command_line import bertsmith, mistake
from tests.lively_networks import lively_network
from tests.tiny import tiny_encoder_config
from tests.tuning import toy_model

__all__ = ["toy_model"]
KEPT = (0, 1, 2, 7, 9, 50, 98)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "albert", "modernbert"])
def test_the_network_computes_the_same_for_the_words_that_are_left(model_type, tmp_path):
    network = lively_network(model_type, {"mlm": 0})
    smaller = trimmed_network(network, KEPT)
    write_model(tmp_path, Model(smaller))
    read = read_model(tmp_path).network
    before, after = pack([[7, 50, 98], [9, 2]]), pack([[3, 5, 6], [4, 2]])
    with torch.no_grad():
        rows = torch.arange(5)
        expected = network.word_scores(network(before), rows)
        for found in (smaller, read):
            assert torch.allclose(found(after), network(before), atol=1e-6)
            assert torch.allclose(found.word_scores(found(after), rows), expected[:, list(KEPT)], atol=1e-5)
    assert (read.config.vocabulary, read.config.pad_id) == (7, network.config.pad_id)


def test_an_own_decoder_loses_the_same_rows():
    network = lively_network("bert", {"mlm": 0})
    head = network.heads["mlm"]
    head.untie(network.encoder.embeddings.words.weight)
    with torch.no_grad():
        head.decoder.normal_(generator=torch.Generator().manual_seed(0))
    smaller = trimmed_network(network, KEPT)
    assert torch.equal(smaller.heads["mlm"].decoder, head.decoder[list(KEPT)])
    assert len(head.decoder) == 99


def test_positions_that_count_from_the_padding_id_are_not_moved():
    with pytest.raises(UserError, match="padding id"):
        trimmed_network(lively_network("roberta", {}), (1, 5, 6))


def test_the_command_writes_a_model_that_fills_as_before(model, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sits under a tree\nwarm tea\twith the dog\n")
    words = ("trim", "--model", model, "--input", texts, "--out", tmp_path / "small")
    facts = json.loads(bertsmith(capsys, *words, "--json").out)
    assert facts["pieces"][1] < facts["pieces"][0] and facts["parameters"][1] < facts["parameters"][0]
    whole, small = load(model, device="cpu"), load(tmp_path / "small", device="cpu")
    pieces = set(small.tokenizer.token(number) for number in range(small.tokenizer.vocabulary_size))
    assert "tree" in pieces and "university" not in pieces and "##q" in pieces
    for text in ("the cat sits under a tree", "warm tea"):
        both = [each.embed([text], pooling="mean") for each in (whole, small)]
        assert torch.allclose(*both, atol=1e-5)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert theirs("warm tea")["input_ids"] == Tokenizer.load(tmp_path / "small").encode("warm tea").ids
    assert transformers.AutoModel.from_pretrained(tmp_path / "small").config.vocab_size == facts["pieces"][1]
    assert "already exists" in mistake(capsys, *words)


def test_an_export_for_transformers_says_what_was_filled(model, tmp_path, capsys):
    bert = load(model, device="cpu")
    kept = [KeptUnits((0, 3), tuple(range(100))), KeptUnits((1, 2, 3), tuple(range(256)))]
    pruned = pruned_network(bert.model.network, kept)
    write_model(tmp_path / "pruned", Model(pruned))
    bert.tokenizer.save(tmp_path / "pruned")
    words = ("export", "--model", tmp_path / "pruned", "--transformers", tmp_path / "whole")
    told = bertsmith(capsys, *words)
    assert told.code == 0
    assert "3 heads and 156 feed-forward neurons that were pruned are zeros here" in told.out
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "whole").eval()
    ids = bert.tokenizer.encode("the cat sits").ids
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor([ids])).last_hidden_state[0]
        assert torch.allclose(found, pruned(pack([ids])), atol=1e-5)
    out = tmp_path / "other"
    plain = json.loads(bertsmith(capsys, "export", "--model", model, "--transformers", out, "--json").out)
    assert plain["notes"] == []
    assert "already exists" in mistake(capsys, *words)
    assert "give one of the two" in mistake(capsys, "export", "--model", model)
    both = ("--onnx", tmp_path / "o", "--transformers", tmp_path / "t")
    assert "give one of the two" in mistake(capsys, "export", "--model", model, *both)


def test_what_transformers_never_has_is_refused(model, tmp_path, capsys):
    tokenizer = Tokenizer.load(model)
    config = tiny_encoder_config("modernbert", vocabulary=tokenizer.vocabulary_size, qk_norm=True)
    network = new_network(config, {}, torch.Generator().manual_seed(0))
    write_model(tmp_path / "own", Model(pruned_network(network, [KeptUnits((0,), (1, 2))] * 3)))
    tokenizer.save(tmp_path / "own")
    words = ("export", "--model", tmp_path / "own", "--transformers", tmp_path / "out")
    assert "no published modernbert has model.qk_norm" in mistake(capsys, *words)
    assert not (tmp_path / "out").exists()
