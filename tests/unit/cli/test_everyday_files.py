"""Files as people have them, through `finetune`, `evaluate`, `predict` and `inspect`."""

import csv
import json
import random

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import bertsmith as package
from bertsmith.cli.app import app
from tests.command_line import bertsmith, mistake
from tests.toy_tasks import warm_or_cold
from tests.tuning import QUICK, quickly, toy_model

__all__ = ["quickly", "toy_model"]

SETTINGS = [part for line in [*QUICK, "run.epochs=0.2"] for part in ("--set", line)]
OWN = ("--text", "review", "--label", "class")


def reviews(count):
    chance = random.Random(0)
    found = (warm_or_cold(chance) for _ in range(count))
    return [(text, "hot" if warm else "icy") for text, warm in found]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run that was fine-tuned from a .csv with semicolons, and what was printed."""
    place = tmp_path_factory.mktemp("run")
    lines = ["review;class", *(f'"{text}";{label}' for text, label in reviews(120))]
    (place / "my.csv").write_text("\n".join(lines))
    words = ("finetune", "custom", "--data", place / "my.csv", *OWN, "--model", model, "--out", place / "run")
    told = CliRunner().invoke(app, [str(word) for word in (*words, *SETTINGS)])
    assert told.exit_code == 0, told.output
    return place


@pytest.fixture
def new(tmp_path):
    (tmp_path / "new.csv").write_text('review\n"the sun, and ""tea"""\nsnow\n')
    return tmp_path / "new.csv"


def test_a_table_is_classified_by_the_columns_that_the_run_recorded(capsys, run, new, tmp_path):
    told = bertsmith(capsys, "classify", "--input", new, "--model", run / "run", "--json")
    named = bertsmith(
        capsys, "classify", "--input", new, "--text", "review", "--model", run / "run", "--json"
    )
    assert told.code == 0 and told.out == named.out and told.out.count("\n") == 2
    out = tmp_path / "out.jsonl"
    bertsmith(capsys, "predict", "--model", run / "run", "--input", new, "--out", out)
    labels = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    assert labels == [json.loads(line)["label"] for line in told.out.splitlines()]


def test_semicolons_are_seen_in_the_header_and_reported(capsys, run, tmp_path, caplog):
    (tmp_path / "other.csv").write_text((run / "my.csv").read_text())
    told = bertsmith(capsys, "evaluate", "--model", run / "run", "--data", tmp_path / "other.csv", "--json")
    assert json.loads(told.out)["examples"] == 120
    assert f"{tmp_path / 'other.csv'}: its first line has semicolons between its cells" in caplog.text


@pytest.mark.parametrize(
    ("content", "encoding", "words"),
    [
        ("review#class\nthe sun#hot\ncaf\xe9#icy\n", "utf-8", ("--delimiter", "#")),
        ("review,class\nthe sun,hot\ncaf\xe9,icy\n", "cp1252", ("--encoding", "cp1252")),
        ("the sun,hot\ncaf\xe9,icy\n", "utf-8", ("--columns", "review,class")),
        ("caf\xe9|1|icy\nthe sun|2|hot\n", "utf-16", ("--columns", "review,n,class", "--encoding", "utf-16")),
    ],
    ids=["delimiter", "encoding", "columns", "all"],
)
def test_what_a_file_does_not_say_is_said_by_options(capsys, run, tmp_path, content, encoding, words):
    file = tmp_path / "my.csv"
    file.write_bytes(content.encode(encoding))
    told = bertsmith(capsys, "evaluate", "--model", run / "run", "--data", file, *words, "--json")
    assert json.loads(told.out)["examples"] == 2
    out = tmp_path / "out.jsonl"
    told = bertsmith(
        capsys, "predict", "--model", run / "run", "--input", file, *words, "--with-text", "--out", out
    )
    assert told.code == 0, told
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert sorted(texts) == ["caf\xe9", "the sun"]
    told = bertsmith(capsys, "inspect", file, *OWN, *words, "--dev-share", "0", "--json")
    assert json.loads(told.out)["splits"][0]["examples"] == 2


def test_a_json_array_is_a_table(capsys, run, tmp_path):
    rows = [{"review": text, "class": label} for text, label in reviews(3)]
    (tmp_path / "my.json").write_text(json.dumps(rows, indent=2))
    told = bertsmith(capsys, "evaluate", "--model", run / "run", "--data", tmp_path / "my.json", "--json")
    assert json.loads(told.out)["examples"] == 3


def test_a_file_of_one_delimiter_is_trained_on_by_option(capsys, model, tmp_path):
    lines = [f"{number}#{text}#{label}" for number, (text, label) in enumerate(reviews(40))]
    (tmp_path / "my.txt").write_text("\n".join(lines), encoding="utf-16")
    form = ("--delimiter", "#", "--encoding", "utf-16", "--columns", "number,review,class")
    words = ("--data", tmp_path / "my.txt", *OWN, *form, "--model", model, "--out", tmp_path / "run")
    told = bertsmith(capsys, "finetune", "custom", *words, *SETTINGS)
    assert told.code == 0 and "model: " in told.out, told


@pytest.mark.parametrize("option", [("--delimiter", ";"), ("--encoding", "cp1252"), ("--columns", "a,b")])
def test_files_of_a_known_format_take_no_such_option(capsys, tmp_path, option):
    words = ("finetune", "sst2", "--data", tmp_path, "--out", tmp_path / "run", *option)
    assert f"{option[0]}: sst2 defines its own columns and parts" in mistake(capsys, *words)


def test_inspect_tells_why_all_lines_are_bad(capsys, tmp_path):
    (tmp_path / "my.csv").write_text('review,stars\na,"1,234"\nb,many\n')
    words = ("--text", "review", "--label", "stars", "--kind", "regress", "--dev-share", "0")
    line = mistake(capsys, "inspect", tmp_path / "my.csv", *words)
    assert "my.csv: contains no examples: 2 lines were skipped, first: " in line
    assert "my.csv:2 has '1,234': its comma may separate thousands or decimals" in line


# ---- what is written


def read_back(path):
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return json.loads(path.read_text())
    form = {} if path.suffix == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, **form))
    return [{**row, "hot": float(row["hot"]), "icy": float(row["icy"])} for row in rows]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def test_predictions_are_written_as_the_name_says(capsys, run, new, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    assert bertsmith(capsys, "predict", "--model", run / "run", "--input", new, "--out", out).code == 0
    rows = read_back(out)
    assert [list(row) for row in rows] == [["id", "prediction", "hot", "icy"]] * 2
    assert [row["id"] for row in rows] == ["0", "1"]
    for row in rows:
        assert row["hot"] + row["icy"] == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(("hot", "icy"), key=lambda label: row[label])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_texts_are_written_back_on_request(capsys, run, new, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    words = ("predict", "--model", run / "run", "--input", new, "--out", out, "--with-text")
    assert bertsmith(capsys, *words).code == 0
    rows = read_back(out)
    assert list(rows[0]) == ["id", "text", "prediction", "hot", "icy"]
    assert [row["text"] for row in rows] == ['the sun, and "tea"', "snow"]


# ---- embed and classify


@pytest.fixture
def spoiled(tmp_path):
    """Five lines, of which the second is empty, the third too long and the fourth not UTF-8."""
    (tmp_path / "texts.txt").write_bytes(b"the sun\n \n" + b"snow " * 300 + b"\ncaf\xe9\nthe tea\n")
    return tmp_path / "texts.txt"


@pytest.mark.parametrize("suffix", [".npy", ".csv", ".parquet"])
def test_embed_skips_bad_lines_and_says_which_are_left(capsys, model, spoiled, tmp_path, suffix):
    out = tmp_path / f"v{suffix}"
    words = ("embed", "--input", spoiled, "--model", model, "--out", out)
    assert "texts.txt:" in mistake(capsys, *words)
    assert not out.exists()
    told = bertsmith(capsys, *words, "--skip-bad", "--json")
    assert json.loads(told.out)["skipped"] == 3 and json.loads(told.out)["texts"] == 2
    assert told.err.startswith("3 bad lines were skipped, first: ")
    expected = package.load(model).embed(["the sun", "the tea"]).numpy()
    if suffix == ".npy":
        found = np.load(out)
    elif suffix == ".csv":
        header, *rows = csv.reader(out.open(newline=""))
        assert header[:3] == ["number", "0", "1"] and [row[0] for row in rows] == ["1", "5"]
        found = np.array([list(map(float, row[1:])) for row in rows], np.float32)
    else:
        rows = pyarrow.parquet.read_table(out).to_pylist()
        assert [row["number"] for row in rows] == [1, 5]
        found = np.array([row["vector"] for row in rows], np.float32)
    assert np.allclose(found, expected, atol=1e-5)


def test_a_name_that_no_vectors_are_written_under_is_refused(capsys, model, spoiled, tmp_path):
    line = mistake(capsys, "embed", "--input", spoiled, "--model", model, "--out", tmp_path / "v.xlsx")
    assert "vectors are not written as .xlsx; name a file that ends in .npy, .csv, .parquet" in line


def test_classify_skips_bad_lines(capsys, run, tmp_path):
    (tmp_path / "texts.txt").write_bytes(b"the sun\n\na\tb\tc\nthe tea\n")
    words = ("classify", "--input", tmp_path / "texts.txt", "--model", run / "run", "--json")
    assert bertsmith(capsys, *words).code == 2
    told = bertsmith(capsys, *words, "--skip-bad")
    assert [json.loads(line)["line"] for line in told.out.splitlines()] == [1, 4]
    assert "2 bad lines were skipped, first: " in told.err


def test_a_file_of_bad_lines_only_is_told_with_the_first_reason(capsys, model, tmp_path):
    (tmp_path / "texts.txt").write_bytes(b"\xff\n\xfe\n")
    words = ("embed", "--input", tmp_path / "texts.txt", "--model", model, "--out", tmp_path / "v.npy")
    line = mistake(capsys, *words, "--skip-bad")
    assert "texts.txt:1: is not UTF-8 text (byte 0), and all other lines are bad, too" in line
