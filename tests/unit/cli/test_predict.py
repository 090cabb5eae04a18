"""`bertsmith predict` as people use it."""

import json

import pytest

from tests.command_line import bertsmith, mistake
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """Two models for SST-2, one for WNUT-17, one for SQuAD."""
    place = tmp_path_factory.mktemp("runs")
    names = {"one": "sst2", "two": "sst2", "tags": "wnut17", "questions": "squad"}
    return {
        key: (tune(name, model, place / key, *SHORT, f"run.seed={seed}").folder, place / key / "data" / name)
        for seed, (key, name) in enumerate(names.items())
    }


@pytest.fixture
def new(tmp_path):
    (tmp_path / "new.tsv").write_text("sentence\nthe sun\nthe snow\n")
    return tmp_path / "new.tsv"


def shares(file):
    return [float(line.split("\t")[3]) for line in file.read_text().splitlines()[1:]]


def test_a_file_without_labels_is_predicted(capsys, runs, new, tmp_path):
    told = bertsmith(
        capsys, "predict", "--model", runs["one"][0], "--input", new, "--out", tmp_path / "out.tsv"
    )
    assert (told.code, told.out) == (0, f"2 examples -> {tmp_path / 'out.tsv'}\n")
    header, *lines = (tmp_path / "out.tsv").read_text().splitlines()
    assert header == "id\tprediction\tnegative\tpositive"
    assert [line.split("\t")[0] for line in lines] == ["0", "1"]


def test_an_ensemble_gives_the_mean(capsys, runs, new, tmp_path):
    for key in ("one", "two"):
        bertsmith(
            capsys, "predict", "--model", runs[key][0], "--input", new, "--out", tmp_path / f"{key}.tsv"
        )
    folders = (runs["one"][0], runs["two"][0])
    told = bertsmith(capsys, "predict", "--model", *folders, "--input", new, "--out", tmp_path / "both.tsv")
    assert told.code == 0, told
    means = [
        sum(pair) / 2 for pair in zip(shares(tmp_path / "one.tsv"), shares(tmp_path / "two.tsv"), strict=True)
    ]
    assert shares(tmp_path / "both.tsv") == pytest.approx(means, abs=2e-6)


def test_the_official_file_comes_with_it(capsys, runs, new, tmp_path):
    words = ("--out", tmp_path / "out.tsv", "--official", tmp_path / "site", "--json")
    told = bertsmith(capsys, "predict", "--model", runs["one"][0], "--input", new, *words)
    written = [str(tmp_path / "out.tsv"), str(tmp_path / "site" / "SST-2.tsv")]
    assert json.loads(told.out) == {"examples": 2, "skipped": 0, "written": written}


def test_tags_and_answers_have_their_own_files(capsys, runs, tmp_path):
    folder, data = runs["tags"]
    assert (
        bertsmith(capsys, "predict", "--model", folder, "--input", data, "--out", tmp_path / "tags.txt").code
        == 0
    )
    assert len((tmp_path / "tags.txt").read_text().split("\n\n")) == 40
    folder, data = runs["questions"]
    words = ("--input", data / "dev-v1.1.json", "--out", tmp_path / "answers")
    assert bertsmith(capsys, "predict", "--model", folder, *words).code == 0
    names = {file.name for file in (tmp_path / "answers").iterdir()}
    assert names == {"predictions.json", "nbest_predictions.json", "null_odds.json"}


@pytest.mark.parametrize(
    ("name", "columns"),
    [("tags", ["id", "text", "words", "tags"]), ("questions", ["id", "question", "passage", "prediction"])],
)
def test_tags_and_answers_are_a_table_under_the_name_of_one(capsys, runs, tmp_path, name, columns):
    folder, data = runs[name]
    out = tmp_path / "answers.tsv"
    told = bertsmith(capsys, "predict", "--model", folder, "--input", data, "--out", out, "--with-text")
    assert (told.code, told.out) == (0, f"40 examples -> {out}\n")
    header, *lines = [line.split("\t") for line in out.read_text().splitlines()]
    assert header[: len(columns)] == columns
    assert {len(line) for line in lines} == {len(header)} and len(lines) == 40


def test_several_files_are_not_put_into_a_folder_that_is_called_like_a_file(capsys, runs, tmp_path):
    folder, data = runs["questions"]
    words = ("predict", "--model", folder, "--input", data, "--out")
    line = mistake(capsys, *words, tmp_path / "answers.txt")
    assert "the ending '.txt' is not a format's; name it .tsv, .csv" in line
    assert line.endswith("or without an ending for a folder of several files")
    assert list(tmp_path.iterdir()) == []
    assert bertsmith(capsys, *words, tmp_path / "squad-1.1").code == 0
    assert (tmp_path / "squad-1.1" / "predictions.json").is_file()


@pytest.mark.parametrize("text", ["ada sleeps .\nbob runs .\n", "ada sleeps\nthe cat\n"])
def test_plain_sentences_are_not_taken_for_columns_of_words_and_tags(capsys, runs, tmp_path, text):
    (tmp_path / "plain.txt").write_text(text)
    words = ("--input", tmp_path / "plain.txt", "--out", tmp_path / "tags.txt")
    line = mistake(capsys, "predict", "--model", runs["tags"][0], *words)
    assert "plain.txt:1: " in line
    assert not (tmp_path / "tags.txt").exists()


def test_words_alone_and_words_with_some_known_tag_are_tagged(capsys, runs, tmp_path):
    for text in ("ada\nsleeps\n.\n", "ada B-person\nsleeps VERB\n. .\n"):
        (tmp_path / "words.txt").write_text(text)
        words = ("--input", tmp_path / "words.txt", "--out", tmp_path / "tags.txt")
        assert bertsmith(capsys, "predict", "--model", runs["tags"][0], *words).code == 0
        assert [line.split()[0] for line in (tmp_path / "tags.txt").read_text().splitlines()] == [
            "ada",
            "sleeps",
            ".",
        ]


def test_bad_lines_are_counted(capsys, runs, new, tmp_path):
    new.write_text(new.read_text() + "a\tb\n")
    words = ("predict", "--model", runs["one"][0], "--input", new, "--out", tmp_path / "out.tsv")
    assert "new.tsv:4: has 2 columns instead of 1" in mistake(capsys, *words)
    assert bertsmith(capsys, *words, "--skip-bad").out.endswith("1 bad lines were skipped\n")


def test_mistakes_are_one_line_and_write_nothing(capsys, runs, new, tmp_path):
    one, two, tags = (runs[key][0] for key in ("one", "two", "tags"))
    out = ("--out", tmp_path / "out.tsv")
    for words, said in (
        ((one, tags, "--input", new), "was not fine-tuned for the same task and labels"),
        ((tmp_path / "gone", "--input", new), "this folder does not exist"),
        ((one, "--input", tmp_path / "gone.tsv"), "gone.tsv: does not exist"),
        (
            (tags, "--input", runs["tags"][1], "--official", tmp_path),
            "the GLUE site does not accept predictions",
        ),
    ):
        assert said in mistake(capsys, "predict", "--model", *words, *out)
        assert not (tmp_path / "out.tsv").exists()


@pytest.mark.parametrize("name", ["p.xyz", "p", "p.txt"])
def test_a_name_that_tells_no_format_is_refused_before_anything_is_computed(
    capsys, runs, new, tmp_path, name
):
    words = ("predict", "--model", runs["one"][0], "--input", tmp_path / "gone.tsv", "--out", tmp_path / name)
    assert "name it .tsv, .csv, .jsonl" in mistake(capsys, *words)
    assert not (tmp_path / name).exists()


def test_the_input_is_not_overwritten(capsys, runs, new, tmp_path):
    before = new.read_text()
    (tmp_path / "link.tsv").symlink_to(new)
    for out in (new, tmp_path / "link.tsv", tmp_path / "." / "new.tsv"):
        line = mistake(capsys, "predict", "--model", runs["one"][0], "--input", new, "--out", out)
        assert "is the input itself; choose another file" in line
    assert new.read_text() == before


def test_neither_is_the_file_of_a_folder_that_is_read(capsys, runs):
    folder, data = runs["one"]
    before = (data / "dev.tsv").read_text()
    line = mistake(capsys, "predict", "--model", folder, "--input", data, "--out", data / "dev.tsv")
    assert "dev.tsv: is the input itself" in line
    assert (data / "dev.tsv").read_text() == before


def test_nor_the_input_that_has_the_name_of_the_official_file(capsys, runs, tmp_path):
    file = tmp_path / "SST-2.tsv"
    file.write_text("sentence\nthe sun\n")
    words = ("--out", tmp_path / "out.tsv", "--official", tmp_path)
    line = mistake(capsys, "predict", "--model", runs["one"][0], "--input", file, *words)
    assert "SST-2.tsv: is the input itself" in line
    assert file.read_text() == "sentence\nthe sun\n"


def test_labels_that_are_not_known_are_no_matter(capsys, runs, tmp_path):
    (tmp_path / "new.tsv").write_text("sentence\tlabel\nthe sun\tlukewarm\nthe snow\t0\n")
    words = ("--input", tmp_path / "new.tsv", "--out", tmp_path / "out.tsv")
    told = bertsmith(capsys, "predict", "--model", runs["one"][0], *words)
    assert (told.code, told.out.split(" ->")[0]) == (0, "2 examples")


def test_a_table_of_another_format_is_predicted_by_the_columns_of_the_task(capsys, runs, tmp_path):
    (tmp_path / "new.csv").write_text('number,sentence\n1,"the sun, and tea"\n')
    words = ("--input", tmp_path / "new.csv", "--out", tmp_path / "out.tsv")
    assert bertsmith(capsys, "predict", "--model", runs["one"][0], *words).out.startswith("1 examples")
