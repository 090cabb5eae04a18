"""`bertsmith choose` as people use it."""

import json
from tempfile import TemporaryFile
from types import SimpleNamespace

import pytest

import bertsmith as package
from tests.command_line import bertsmith, mistake
from tests.toy_folder import write_toy_folder
from tests.untrained_heads import untrained

CONTEXT, OPTIONS = "the boy sits", ["he eats", "the dog runs in the park", "snow"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    untrained(place / "choice", {"choice": 1})
    write_toy_folder(place / "plain")
    return place / "choice"


@pytest.fixture(scope="module")
def expected(folder):
    return package.load(folder).choose([(CONTEXT, option) for option in OPTIONS])


def test_help_teaches_by_example(capsys):
    told = bertsmith(capsys, "choose", "--help").out
    assert 'bertsmith choose "The boy sits down." "He eats an apple." "He flies away."' in " ".join(
        told.split()
    )


def test_the_options_of_one_question_get_bars_the_best_first(capsys, folder, expected):
    told = bertsmith(capsys, "choose", CONTEXT, *OPTIONS, "--model", folder)
    lines = told.out.splitlines()
    order = sorted(range(3), key=lambda index: -expected.probabilities[index])
    assert [line.endswith(OPTIONS[index]) for line, index in zip(lines, order, strict=True)] == [True] * 3
    found = json.loads(bertsmith(capsys, "choose", CONTEXT, *OPTIONS, "--model", folder, "--json").out)
    assert (found["index"], found["option"]) == (expected.index, OPTIONS[expected.index])
    assert found["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)


@pytest.mark.parametrize("form", ["lines", "stdin", "columns", "lists"])
def test_a_file_gets_a_line_for_each_question(capsys, folder, expected, tmp_path, monkeypatch, form):
    line = "\t".join([CONTEXT, *OPTIONS])
    (tmp_path / "questions.txt").write_text(f"{line}\n{line}\n")
    rows = [{"context": CONTEXT, "options": OPTIONS}] * 2
    (tmp_path / "lists.json").write_text(json.dumps(rows))
    cells = ["context,a,b,c", *[",".join([CONTEXT, *OPTIONS])] * 2]
    (tmp_path / "columns.csv").write_text("\n".join(cells))
    with TemporaryFile() as stdin:
        stdin.write((tmp_path / "questions.txt").read_bytes())
        stdin.seek(0)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stdin))
        words = {
            "lines": ("--input", tmp_path / "questions.txt"),
            "stdin": ("-",),
            "columns": ("--input", tmp_path / "columns.csv", "--text", "context", "--options", "a,b,c"),
            "lists": ("--input", tmp_path / "lists.json", "--text", "context", "--options", "options"),
        }[form]
        told = bertsmith(capsys, "choose", *words, "--model", folder)
    assert told.code == 0, told.err
    chosen = OPTIONS[expected.index]
    for number, _, option in (line.split("\t") for line in told.out.splitlines()):
        assert (int(number), option) == (expected.index, chosen)
    assert len(told.out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "nothing to choose among; give a context and its options"),
        (("a cat", "--input", "x.txt"), "nothing to choose among"),
        (
            ("a cat", "one"),
            "the question: has 1 option, but a choice needs at least two; give the context, then",
        ),
        (("--input", "TABLE"), "is a table; give the column of the texts with --text COLUMN"),
        (("--input", "TABLE", "--text", "context"), "--text and --options: a table needs columns"),
        (("--input", "LINES"), "questions.txt:2: has 1 option, but a choice needs at least two"),
        (("a cat", "one", "snow " * 200), "the question, option 1: has 205 tokens"),
    ],
)
def test_mistakes_are_one_line(capsys, folder, tmp_path, words, what):
    (tmp_path / "questions.txt").write_text("a\tb\tc\nd\te\n")
    (tmp_path / "table.csv").write_text("context,a,b\nx,y,z\n")
    names = {"TABLE": tmp_path / "table.csv", "LINES": tmp_path / "questions.txt"}
    told = bertsmith(capsys, "choose", *(names.get(word, word) for word in words), "--model", folder)
    assert told.code == 2 and what in told.err, told.err


def test_a_model_that_cannot_choose_says_how_to_get_one(capsys, folder):
    line = mistake(capsys, "choose", "a", "b", "c", "--model", folder.parent / "plain")
    assert "this model cannot choose among texts" in line and "bertsmith finetune swag" in line
