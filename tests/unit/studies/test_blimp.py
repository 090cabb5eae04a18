"""BLiMP: accuracy by set and phenomenon, ties, what is kept, and what is wrong with a folder."""

import json
from dataclasses import replace

import pytest
import torch

import bertsmith as package
from bertsmith.core.cache import cached_files
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.network import new_network
from bertsmith.studies.blimp import blimp, blimp_report, read_pair_sets
from tests.command_line import bertsmith, mistake
from tests.toy_folder import write_toy_folder

LIKELY, UNLIKELY = "cat", "dog"
SETS = {
    "order": ("binding", [("the cat sits", "the dog sits"), ("a cat", "a dog"), ("cat sits", "sits cat")]),
    "words": ("s-selection", [("the cat runs", "the dog runs")] * 2),
    "wrong": ("binding", [("a dog sleeps", "a cat sleeps"), ("tea", "tea")]),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def frequencies(tmp_path_factory):
    """A model that knows only how frequent words are: cats more than dogs."""
    folder = tmp_path_factory.mktemp("frequencies")
    write_toy_folder(folder)
    bert = package.load(folder)
    head = bert.model.network.heads["mlm"]
    with torch.no_grad():
        head.transform.norm.weight.zero_()
        head.transform.norm.bias.zero_()
        head.bias[bert.tokenizer.id(LIKELY)] = 3.0
    bert.save(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "blimp"
    folder.mkdir()
    for name, (term, pairs) in SETS.items():
        rows = [
            {"sentence_good": good, "sentence_bad": bad, "field": "f", "linguistics_term": term, "UID": name}
            for good, bad in pairs
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def found_values(bert, data, limit=None):
    return blimp_report(blimp(bert, read_pair_sets(data, limit)), model="toy").values


def test_accuracy_is_a_mean_over_sets_in_which_ties_count_half(frequencies, data):
    values = found_values(package.load(frequencies), data)
    sets = {name: each["accuracy"] for name, each in values["by_set"].items()}
    assert sets == pytest.approx({"order": 250 / 3, "words": 100, "wrong": 25})
    phenomena = {
        name: (each["sets"], each["pairs"], each["accuracy"]) for name, each in values["phenomena"].items()
    }
    assert phenomena["argument_structure"] == (1, 2, 100)  # of the paper's twelve
    assert phenomena["binding"] == (2, 5, pytest.approx((250 / 3 + 25) / 2))
    assert values["accuracy"] == pytest.approx((250 / 3 + 125) / 3)  # and not that of all pairs
    assert values["computed_sentences"] == 14 and values["sentences_per_second"] > 0
    assert found_values(package.load(frequencies), data, limit=2)["by_set"]["order"]["accuracy"] == 100


@pytest.mark.parametrize("direction", ["both", "left-to-right"])
def test_the_more_likely_sentence_is_that_of_likelihood(tmp_path, data, direction):
    write_toy_folder(tmp_path)
    config = replace(read_model(tmp_path).network.config, direction=direction, initial_std=0.3)
    write_model(tmp_path, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(1))))
    bert = package.load(tmp_path)
    values = found_values(bert, data)
    for name, (_, pairs) in SETS.items():
        both = [bert.likelihood(pair) for pair in pairs]
        right = [
            0.5 if len({*pair}) == 1 else float(good.log_likelihood > bad.log_likelihood)
            for pair, (good, bad) in zip(pairs, both, strict=True)
        ]
        assert values["by_set"][name]["accuracy"] == pytest.approx(100 * sum(right) / len(right))
    assert values["protocol"] == ("pseudo-" if direction == "both" else "") + "log-likelihood"


def test_a_call_that_was_stopped_goes_on_at_its_set(frequencies, data):
    bert, sets = package.load(frequencies), read_pair_sets(data)
    first = blimp(bert, sets[:2])
    assert first.sentences == 10
    again = blimp(package.load(frequencies), sets)
    assert again.sentences == 4  # of the third set
    whole = blimp_report(again, model="toy").values
    last = blimp(bert, sets)
    assert last.sentences == 0 and blimp_report(last, model="toy").values["phenomena"] == whole["phenomena"]
    damaged = next(
        each.path for each in cached_files() if each.kind == "blimp" and "wrong-" in each.path.name
    )
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert blimp(bert, sets).sentences == 4


def test_another_model_or_sample_is_computed_anew(frequencies, data, tmp_path):
    bert = package.load(frequencies)
    found_values(bert, data)
    assert found_values(bert, data, limit=2)["computed_sentences"] == 4  # only of `order` there are fewer
    with torch.no_grad():
        bert.model.network.heads["mlm"].bias[bert.tokenizer.id(UNLIKELY)] = 6.0
    bert.save(tmp_path / "other")
    other = found_values(package.load(tmp_path / "other"), data)
    assert other["computed_sentences"] == 14 and other["by_set"]["wrong"]["accuracy"] == 75


def test_the_command_prints_and_writes_the_table_with_published_rows(frequencies, data, tmp_path, capsys):
    words = ("blimp", "--model", frequencies, "--data", data)
    told = bertsmith(capsys, *words, "--out", tmp_path / "out")
    assert "mean of the sets" in told.out and "69.4" in told.out and "sentences/s" in told.out
    rows = {line.split("  ")[0]: line for line in told.out.splitlines()}
    assert "84.2" in rows["BERT-Base"] and "86.5" in rows["RoBERTa-large"] and "88.6" in rows["human"]
    assert rows["binding"].split()[-1] == "87.3"  # humans
    written = {each.name for each in (tmp_path / "out").iterdir()}
    assert written >= {"blimp.txt", "blimp.json"}
    values = json.loads(bertsmith(capsys, *words, "--json").out)
    assert values["accuracy"] == json.loads((tmp_path / "out" / "blimp.json").read_text())["accuracy"]
    assert values["sentences_per_second"] is None and values["pairs"] == 7


def test_a_folder_that_is_none_of_blimp_is_one_line(frequencies, data, tmp_path, capsys):
    for folder in (tmp_path / "none", frequencies):
        assert "does not contain .jsonl files" in mistake(
            capsys, "blimp", "--model", frequencies, "--data", folder
        )
    (data / "order.jsonl").write_text(
        '{"sentence_good": "a", "sentence_bad": " ", "linguistics_term": "b", "UID": "c"}\n'
    )
    assert "order.jsonl:1: " in mistake(capsys, "blimp", "--model", frequencies, "--data", data)
    (data / "order.jsonl").write_text("")
    assert "order.jsonl: does not contain a pair" in mistake(
        capsys, "blimp", "--model", frequencies, "--data", data
    )
    (data / "order.jsonl").unlink()
    long = {"sentence_good": "a", "sentence_bad": "tea " * 200, "linguistics_term": "b", "UID": "c"}
    (data / "words.jsonl").write_text(json.dumps(long))
    assert "words.jsonl:1: has 202 tokens" in mistake(capsys, "blimp", "--model", frequencies, "--data", data)
