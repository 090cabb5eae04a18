"""The programs of examples/ run, at toy scale, and are short enough to read."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.tiny_runs import without_pictures
from tests.toy_folder import write_toy_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *words):
    """Run an example in this process, with these words on its command line."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(word) for word in words])


@pytest.fixture(scope="module")
def own_csv(tmp_path_factory):
    """A folder with a toy model, a run of the first example, and its table."""
    place = tmp_path_factory.mktemp("own-csv")
    write_toy_folder(place / "toy")
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        run("own_csv", "--model", place / "toy", "--epochs", 1, "--out", place / "run")
    return place


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent / "src"))  # for the commands that it starts


def test_each_example_is_short_and_linked_from_the_docs():
    told = (EXAMPLES.parent / "docs" / "README.md").read_text()
    programs = sorted(EXAMPLES.glob("*.py"))
    assert len(programs) == 5
    for program in programs:
        assert len(program.read_text().splitlines()) <= 60, program
        assert f"(../examples/{program.name})" in told


def test_own_csv_fine_tunes_and_predicts(own_csv):
    assert (own_csv / "run" / "model" / "config.json").is_file()
    assert (own_csv / "run.csv").read_text().startswith("review,verdict\n")


def test_own_corpus_pretrains_from_text_and_fills_a_mask(tmp_path, capfd):
    with without_pictures():
        run("own_corpus", "--steps", 2, "--out", "all", "--size", 300)
    printed = capfd.readouterr().out
    assert (tmp_path / "all" / "run" / "model" / "config.json").is_file()
    assert re.search(r"held-out token_loss +\d", printed)
    assert len(re.findall(r"(?m)^ *\d+\.\d% \S+$", printed)) == 3


def test_heads_shows_what_a_word_reads(own_csv, capsys):
    run("heads", "My dog plays in the snow.", "--word", "dog", "--top", 3, "--model", own_csv / "toy")
    lines = capsys.readouterr().out.splitlines()
    assert [bool(re.match(r"head [12]-[1-4]  dog reads ", line)) for line in lines[:4]] == [True] * 3 + [
        False
    ]
    assert lines[-1].startswith("layer  2")


def test_distil_and_serve_answers_over_http_with_the_smaller_model(own_csv, tmp_path, capfd):
    words = (own_csv / "run", own_csv / "run.csv", "--drop", 1, "--epochs", 1, "--out", tmp_path / "small")
    with without_pictures():
        run("distil_and_serve", *words)
    assert re.search(r"http://\S+ \{'label': '(good|bad)'", capfd.readouterr().out)
    assert '"num_hidden_layers": 1' in (tmp_path / "small" / "student" / "model" / "config.json").read_text()


def test_study_names_the_best_rate(own_csv, capsys):
    words = ("--rates", "1e-3", "--folds", 2, "--epochs", 1, "--model", own_csv / "toy", "--out", "study")
    with without_pictures():
        run("study", own_csv / "run.csv", *words)
    printed = capsys.readouterr().out
    assert re.search(r"rate 0\.001 +accuracy \d\.\d+ ± \d", printed)
    assert "best: 0.001" in printed
