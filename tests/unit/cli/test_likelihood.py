"""`bertsmith likelihood`: of a text, of files and tables, and of each word."""

import csv
import json

import pytest

import bertsmith as package
from tests.command_line import bertsmith, mistake
from tests.toy_folder import write_toy_folder
from tests.untrained_heads import numbered_labels, untrained

TEXTS = ["the cat sits", "my dog runs.", "tea"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_toy_folder(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    return package.load(model).likelihood(TEXTS)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def test_a_text_gets_three_figures_and_its_words(capsys, model, expected):
    told = bertsmith(capsys, "likelihood", TEXTS[0], "--words", "--model", model)
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["the", "cat", "sits"]
    assert f"{expected[0].words[1].log_probability:.2f}" in lines[1]
    assert f"pseudo-log-likelihood {expected[0].log_likelihood:.2f} nats, 3 tokens" in told.out
    assert f"pseudo-perplexity {expected[0].perplexity:.4g}" in told.out
    plain = bertsmith(capsys, "likelihood", TEXTS[0], "--model", model)
    assert plain.out.splitlines() == lines[3:]


def test_json_has_what_python_has(capsys, model, expected):
    told = json.loads(bertsmith(capsys, "likelihood", TEXTS[0], "--words", "--json", "--model", model).out)
    assert told["log_likelihood"] == pytest.approx(expected[0].log_likelihood, rel=1e-5)
    assert told["perplexity"] == pytest.approx(expected[0].perplexity, rel=1e-5)
    assert told["bits_per_character"] == pytest.approx(expected[0].bits_per_character, rel=1e-5)
    assert (told["tokens"], told["pseudo"]) == (3, True)
    assert [(each["text"], each["start"], each["end"]) for each in told["words"]] == [
        ("the", 0, 3),
        ("cat", 4, 7),
        ("sits", 8, 12),
    ]


def test_a_file_gets_a_line_for_each_text_or_word(capsys, model, expected, file):
    lines = bertsmith(capsys, "likelihood", "--input", file, "--model", model).out.splitlines()
    cells = [line.split("\t") for line in lines]
    assert [(int(number), int(tokens), text) for number, _, tokens, _, _, text in cells] == [
        (number, each.tokens, text)
        for number, (each, text) in enumerate(zip(expected, TEXTS, strict=True), 1)
    ]
    numbers = [(float(first), float(second)) for _, first, _, second, _, _ in cells]
    wanted = [(each.log_likelihood, each.perplexity) for each in expected]
    assert numbers == [pytest.approx(each, rel=1e-4) for each in wanted]
    words = bertsmith(capsys, "likelihood", "--input", file, "--words", "--model", model).out.splitlines()
    assert [line.split("\t")[:4] for line in words[2:5]] == [
        ["1", "sits", "8", "12"],
        ["2", "my", "0", "2"],
        ["2", "dog", "3", "6"],
    ]
    rows = bertsmith(capsys, "likelihood", "--input", file, "--json", "--model", model).out.splitlines()
    assert [json.loads(row)["line"] for row in rows] == [1, 2, 3]


def test_a_table_is_read_and_written(capsys, model, expected, tmp_path):
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    table.write_text("id,said\n" + "".join(f"1,{text}\n" for text in (*TEXTS, " ")))
    words = ("likelihood", "--input", table, "--text", "said", "--model", model)
    assert "lacks a text in said" in mistake(capsys, *words, "--out", out)
    assert not out.exists()
    told = bertsmith(capsys, *words, "--skip-bad", "--out", out)
    assert told.out == f"3 rows -> {out}\n" and "1 bad lines were skipped" in told.err
    rows = list(csv.DictReader(out.open()))
    assert [(each["number"], each["text"]) for each in rows] == [*zip("123", TEXTS, strict=True)]
    written = [float(each["log_likelihood"]) for each in rows]
    assert written == pytest.approx([each.log_likelihood for each in expected], rel=1e-5)
    told = bertsmith(capsys, *words, "--skip-bad", "--words", "--json", "--out", tmp_path / "words.jsonl")
    assert json.loads(told.out)["rows"] == 8
    of_words = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert [(each["number"], each["text"]) for each in of_words[2:5]] == [(1, "sits"), (2, "my"), (2, "dog")]


def test_what_cannot_be_scored_is_one_line(capsys, model, file, tmp_path):
    given = ("--input", file, "--model", model)
    assert "nothing to score" in mistake(capsys, "likelihood", "--model", model)
    assert "is not a table format" in mistake(capsys, "likelihood", *given, "--out", tmp_path / "a.npy")
    assert "which may have an --out" in mistake(capsys, "likelihood", "tea", "--out", tmp_path / "a.csv")
    same = file.rename(tmp_path / "texts.tsv")
    answer = mistake(capsys, "likelihood", "--input", same, "--text", TEXTS[0], "--out", same)
    assert "is the input itself" in answer
    long = mistake(capsys, "likelihood", "snow " * 200, "--model", model)
    assert "the text: has 202 tokens" in long and "--truncate" in long
    untrained(tmp_path / "classes", {"classify": 2}, **numbered_labels("bad", "good"))
    lacking = mistake(capsys, "likelihood", "tea", "--model", tmp_path / "classes")
    assert "this model cannot predict words" in lacking and "remove --model" in lacking
