"""Which words decided, number by number over transformers."""

import json
import math

import numpy as np
import pytest
import torch
import transformers

import bertsmith as package
from bertsmith.core.errors import UserError
from bertsmith.core.seeds import stream
from bertsmith.insight.deciding_words import FRACTIONS, METHODS, RANDOM_ORDERS, deciding_words
from tests.command_line import bertsmith, mistake
from tests.toy_folder import toy_vocabulary
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]

TEXT = "the warm zap dog sleeps."
"""zap is three pieces: z ##a ##p."""


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("run"), *SHORT).folder


@pytest.fixture(scope="module")
def theirs(run):
    return transformers.AutoModelForSequenceClassification.from_pretrained(run / "model").eval()


def probability(theirs, ids, target):
    with torch.no_grad():
        return float(theirs(torch.tensor([ids])).logits[0].double().softmax(-1)[target])


def test_each_number_is_that_of_a_plain_computation(run, theirs):
    bert = package.load(run, device="cpu")
    (found,) = deciding_words(bert, [TEXT], seed=3)
    ids = bert.tokenizer.encode(TEXT).ids
    words = [[1], [2], [3, 4, 5], [6], [7], [8]]  # the rows of each word
    assert [word.text for _, word in found.words] == ["the", "warm", "zap", "dog", "sleeps", "."]
    with torch.no_grad():
        target = int(theirs(torch.tensor([ids])).logits[0].argmax())
    whole = probability(theirs, ids, target)
    assert found.probability == pytest.approx(whole, abs=1e-5)

    def without(gone):
        rows = {row for word in gone for row in words[word]}
        return probability(theirs, [id for row, id in enumerate(ids) if row not in rows], target)

    expected = [whole - without({word}) for word in range(6)]
    assert found.scores[METHODS[0]] == pytest.approx(expected, abs=1e-5)
    vectors = theirs.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    theirs(inputs_embeds=vectors).logits[0, target].backward()
    by_token = (vectors.grad * vectors).sum(-1)[0].tolist()
    expected = [sum(by_token[row] for row in rows) for rows in words]
    assert found.scores[METHODS[1]] == pytest.approx(expected, abs=1e-5)

    def trust(order):
        falls = []
        for fraction in FRACTIONS:
            top = set(order[: math.ceil(fraction * 6)])
            falls.append((whole - without(top), whole - without(set(range(6)) - top)))
        return np.mean(falls, 0)

    for name in METHODS:
        order = sorted(range(6), key=lambda word: -found.scores[name][word])
        both = found.faithfulness[name]
        assert (both.comprehensiveness, both.sufficiency) == pytest.approx(tuple(trust(order)), abs=1e-5)
    orders = [stream(3, "random words", 0, draw).permutation(6).tolist() for draw in range(RANDOM_ORDERS)]
    expected = tuple(np.mean([trust(order) for order in orders], 0))
    both = found.faithfulness["random"]
    assert (both.comprehensiveness, both.sufficiency) == pytest.approx(expected, abs=1e-5)


def test_where_only_words_are_normalised_the_gradient_is_taken_behind_the_norm(tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(5)
    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    config = transformers.ModernBertConfig(
        vocab_size=len(toy_vocabulary()), initializer_range=0.3, **shape, **special
    )
    theirs = transformers.ModernBertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(toy_vocabulary()) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    bert = package.load(tmp_path, device="cpu")
    (found,) = deciding_words(bert, ["the warm dog"], seed=0)
    behind = []

    def keep(_module, _inputs, output):
        behind.append(output.detach().requires_grad_())
        return behind[-1]

    theirs.model.embeddings.norm.register_forward_hook(keep)
    logits = theirs(torch.tensor([bert.tokenizer.encode("the warm dog").ids])).logits[0]
    logits[logits.argmax()].backward()
    expected = (behind[0].grad * behind[0]).sum(-1).flatten().tolist()[1:-1]
    assert found.scores[METHODS[1]] == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 0.01


def test_words_of_both_texts_of_a_pair(model, tmp_path):
    bert = package.load(tune("rte", model, tmp_path, *SHORT).folder, device="cpu")
    (found,) = deciding_words(bert, [("a dog", "the cat")], seed=0)
    assert [(part, word.text) for part, word in found.words] == [
        (0, "a"),
        (0, "dog"),
        (1, "the"),
        (1, "cat"),
    ]


def test_the_command_writes_a_page_and_prints_the_words(capsys, run, tmp_path):
    told = bertsmith(capsys, "look", "words", "--model", run, TEXT, "--out", tmp_path / "why.html")
    assert told.code == 0 and "leave-one-out: comprehensiveness" in told.out and "warm" in told.out
    assert "\n1 text -> " in told.out
    assert "zap" in (tmp_path / "why.html").read_text()
    file = tmp_path / "texts.txt"
    file.write_text("a warm day\na cold day\n")
    many = ("look", "words", "--model", run, "--input", file, "--out", tmp_path / "all.html", "--json")
    assert len(json.loads(bertsmith(capsys, *many).out)["texts"]) == 2
    neither = ("look", "words", "--model", run, "--out", tmp_path / "x.html")
    assert "nothing to explain" in mistake(capsys, *neither)
    assert "is not the name of a page" in mistake(capsys, *neither[:-1], tmp_path / "x.png")


def test_the_words_are_printed_even_if_the_view_cannot_be_written(capsys, run, tmp_path):
    (tmp_path / "file").write_text("")
    words = ("look", "words", "--model", run, TEXT, "--out", tmp_path / "file" / "why.html")
    told = bertsmith(capsys, *words)
    assert told.code == 2 and "leave-one-out: comprehensiveness" in told.out and " -> " not in told.out
    assert "why.html: cannot be written" in told.err
    assert len(json.loads(bertsmith(capsys, *words, "--json").out)["texts"]) == 1


def test_without_a_model_the_embedded_one_for_sentiment_decides(capsys, tmp_path):
    told = bertsmith(capsys, "look", "words", "A stunning dancer.", "--out", tmp_path / "why.html")
    assert told.code == 0 and told.out.startswith("positive ") and "bertsmith-small-sentiment" in told.err
    assert "decided in bertsmith-small-sentiment" in (tmp_path / "why.html").read_text()


def test_frozen_features_are_not_explained(model, tmp_path):
    run = tune("sst2", model, tmp_path, *SHORT, "head.encoder=frozen-features").folder
    with pytest.raises(UserError, match="do not have gradients"):
        deciding_words(package.load(run, device="cpu"), ["a day"], seed=0)


def test_only_classes_are_explained():
    with pytest.raises(UserError, match="only such decisions can be explained"):
        deciding_words(package.load(device="cpu"), ["a day"], seed=0)
