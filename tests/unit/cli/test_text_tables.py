"""Tables and the standard input, where texts are wanted: taken as what they are, or refused in one line."""

import json
from tempfile import TemporaryFile
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import bertsmith as package
from tests.command_line import bertsmith, mistake
from tests.toy_folder import write_toy_folder
from tests.untrained_heads import numbered_labels, untrained

TEXTS = ["the sun, and tea", "my dog runs."]
ROWS = [{"id": 7, "review": TEXTS[0], "reply": "it is hot"}, {"id": 8, "review": TEXTS[1], "reply": "a cat"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    write_toy_folder(place / "plain")
    untrained(place / "classes", {"classify": 3}, **numbered_labels("bad", "fair", "good"))
    untrained(place / "names", {"tag": 3}, **numbered_labels("O", "B-city", "I-city"))
    untrained(place / "answers", {"span": 2})
    return place


def write_table(folder, suffix):
    path = folder / f"my{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        return path
    if suffix in (".csv", ".tsv"):
        between, quote = (",", '"') if suffix == ".csv" else ("\t", "")
        lines = [
            between.join(ROWS[0]),
            *(between.join(f"{quote}{cell}{quote}" for cell in row.values()) for row in ROWS),
        ]
        path.write_text("\n".join(lines) + "\n")
        return path
    lines = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join(lines) + "\n" if suffix == ".jsonl" else json.dumps(ROWS, indent=1))
    return path


@pytest.fixture
def piped(monkeypatch):
    """A function that puts lines on the standard input."""
    with TemporaryFile() as file:

        def put(text):
            file.write(text.encode())
            file.seek(0)
            monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))

        yield put


SUFFIXES = [".csv", ".tsv", ".jsonl", ".json", ".parquet"]
each_table = pytest.mark.parametrize("suffix", SUFFIXES)
each_verb = pytest.mark.parametrize(
    "words",
    [
        ("classify", "--input", "FILE", "--model", "classes"),
        ("tag", "--input", "FILE", "--model", "names"),
        ("embed", "--input", "FILE", "--model", "plain", "--out", "v.npy"),
        ("embed", "--input", "FILE", "--model", "plain", "--out", "v.npy"),
    ],
    ids=lambda words: " ".join(words[:2]),
)


def command(words, file, folders):
    known = {"FILE": file, "classes": folders / "classes", "names": folders / "names"}
    return [{**known, "plain": folders / "plain"}.get(word, word) for word in words]


@each_table
@each_verb
def test_a_table_without_a_column_is_refused_with_its_columns(
    capsys, folders, tmp_path, monkeypatch, words, suffix
):
    monkeypatch.chdir(tmp_path)
    file = write_table(tmp_path, suffix)
    line = mistake(capsys, *command(words, file, folders))
    assert line == (
        f"bertsmith: {file}: is a table; give the column of the texts with --text COLUMN "
        "(its columns are 'id', 'review', 'reply')"
    )
    assert not (tmp_path / "v.npy").exists()


@each_table
def test_the_column_of_a_table_is_classified_row_by_row(capsys, folders, tmp_path, suffix):
    words = ("--text", "review", "--model", folders / "classes")
    told = bertsmith(capsys, "classify", "--input", write_table(tmp_path, suffix), *words)
    expected = package.load(folders / "classes").classify(TEXTS)
    rows = [line.split("\t") for line in told.out.splitlines()]
    assert [(row[0], row[2]) for row in rows] == [
        (each.label, text) for each, text in zip(expected, TEXTS, strict=True)
    ]
    told = bertsmith(capsys, "classify", "--input", write_table(tmp_path, suffix), *words, "--json")
    assert [json.loads(line)["row"] for line in told.out.splitlines()] == [1, 2]


def test_two_columns_make_pairs(capsys, folders, tmp_path):
    words = ("--text", "review", "--text2", "reply", "--model", folders / "classes", "--json")
    told = bertsmith(capsys, "classify", "--input", write_table(tmp_path, ".csv"), *words)
    expected = package.load(folders / "classes").classify([(row["review"], row["reply"]) for row in ROWS])
    found = [json.loads(line)["probability"] for line in told.out.splitlines()]
    assert found == pytest.approx([each.probability for each in expected], abs=1e-5)


@each_table
def test_the_column_of_a_table_is_embedded(capsys, folders, tmp_path, suffix):
    words = ("--text", "review", "--model", folders / "plain", "--out", tmp_path / "v.npy")
    assert bertsmith(capsys, "embed", "--input", write_table(tmp_path, suffix), *words).code == 0
    expected = package.load(folders / "plain").embed(TEXTS).numpy()
    assert np.allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-5)


@each_table
def test_the_column_of_a_table_is_tagged(capsys, folders, tmp_path, suffix):
    words = ("--text", "review", "--model", folders / "names")
    told = bertsmith(capsys, "tag", "--input", write_table(tmp_path, suffix), *words)
    texts = [[line.split("\t")[0] for line in block.splitlines()] for block in told.out.split("\n\n")]
    assert texts == [["the", "sun", ",", "and", "tea"], ["my", "dog", "runs", "."]]


def test_a_column_that_is_not_there_is_told(capsys, folders, tmp_path):
    words = ("--text", "rewiev", "--model", folders / "plain", "--out", tmp_path / "v.npy")
    line = mistake(capsys, "embed", "--input", write_table(tmp_path, ".csv"), *words)
    assert "lacks the column 'rewiev'; its columns are 'id', 'review', 'reply'" in line


@pytest.mark.parametrize("option", [("--text2", "b"), ("--delimiter", ";"), ("--columns", "a,b")])
def test_options_of_tables_are_refused_for_lines(capsys, folders, tmp_path, option):
    (tmp_path / "texts.txt").write_text("a cat\n")
    words = ("--input", tmp_path / "texts.txt", "--model", folders / "classes", *option)
    line = mistake(capsys, "classify", *words)
    assert line.startswith(f"bertsmith: {option[0]}: is for tables; give the column")


# ---- lines and the standard input


def test_each_line_of_a_file_is_tagged_as_a_text(capsys, folders, tmp_path):
    (tmp_path / "texts.txt").write_text("she is in paris .\nthe dog\n")
    words = ("tag", "--input", tmp_path / "texts.txt", "--model", folders / "names")
    told = bertsmith(capsys, *words)
    blocks = [[line.split("\t")[:2] for line in block.splitlines()] for block in told.out.split("\n\n")]
    expected = package.load(folders / "names").tag(["she is in paris .", "the dog"])
    assert blocks == [[[word.word, word.tag] for word in words] for words in expected]
    found = [json.loads(line) for line in bertsmith(capsys, *words, "--json").out.splitlines()]
    assert [each["line"] for each in found] == [1, 2]
    assert [word["text"] for word in found[1]["words"]] == ["the", "dog"]


@pytest.mark.parametrize(
    ("words", "lines", "printed"),
    [
        (("tag", "-", "--model", "names"), "the dog\na cat\n", 2),
        (("tag", "--input", "-", "--model", "names"), "the dog\na cat\n", 2),
        (("classify", "-", "--model", "classes"), "the dog\na cat\n", 2),
        (("fill", "-", "--model", "plain"), "the [MASK] runs\na [MASK]\n", 2),
        (("next", "-", "--model", "plain"), "the dog\truns\na cat\tsits\n", 2),
        (("compare", "-", "--model", "plain"), "the dog\na cat\n", 1),
        (("answer", "-", "--passage-text", "the dog runs", "--model", "answers"), "who runs?\nwhat?\n", 2),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_dash_is_the_standard_input(capsys, folders, piped, words, lines, printed):
    piped(lines)
    told = bertsmith(capsys, *words[:-1], folders / words[-1], "--json")
    assert told.code == 0, told.err
    assert len([json.loads(line) for line in told.out.splitlines()]) == printed


def test_the_standard_input_has_no_columns(capsys, folders, piped):
    piped("a\tb\n")
    line = mistake(capsys, "classify", "--input", "-", "--text", "a", "--model", folders / "classes")
    assert "standard input: is read line by line, without columns" in line


@pytest.mark.parametrize("words", [(), ("a cat", "--input", "x")])
def test_either_a_text_or_a_file_is_tagged(capsys, folders, words):
    assert "nothing to tag; give a text" in mistake(capsys, "tag", *words, "--model", folders / "names")


def test_a_line_that_is_no_pair_is_told(capsys, folders, piped):
    piped("the dog\truns\nthe cat\n")
    line = mistake(capsys, "next", "-", "--model", folders / "plain")
    assert (
        line
        == "bertsmith: standard input:2: is not a pair of texts; write two texts with one tab between them"
    )


def test_one_standard_input_is_not_both_question_and_passage(capsys, folders):
    words = ("answer", "-", "--passage", "-", "--model", folders / "answers")
    assert "the standard input cannot be both" in mistake(capsys, *words)
