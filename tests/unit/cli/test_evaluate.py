"""`bertsmith evaluate` as people use it."""

import json

import pytest

from tests.command_line import bertsmith, mistake
from tests.toy_folder import write_toy_folder
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    return tune("sst2", model, place, *SHORT), place / "data" / "sst2"


def test_a_labelled_file_is_judged_as_the_run_was(capsys, run):
    result, data = run
    told = bertsmith(capsys, "evaluate", result.folder, "--data", data / "dev.tsv")
    assert told.code == 0, told
    accuracy = 100 * result.measures["dev"]["accuracy"]
    assert told.out.splitlines() == ["SST-2, 40 examples", f"  accuracy: {accuracy:.2f}"]


@pytest.mark.parametrize("words", [(), ("--split", "dev")])
def test_a_folder_is_judged_by_its_development_set(capsys, run, words):
    result, data = run
    told = bertsmith(capsys, "evaluate", result.folder / "model", "--data", data, *words, "--json")
    assert json.loads(told.out) == {
        "examples": 40,
        "skipped": 0,
        "measures": pytest.approx(result.measures["dev"]),
    }


def test_another_split_can_be_chosen(capsys, run):
    told = bertsmith(capsys, "evaluate", run[0].folder, "--data", run[1], "--split", "train")
    assert told.out.startswith("SST-2, 160 examples")


def test_a_file_of_any_name_is_judged(capsys, run, tmp_path):
    (tmp_path / "mine.tsv").write_text((run[1] / "dev.tsv").read_text())
    told = bertsmith(capsys, "evaluate", run[0].folder, "--data", tmp_path / "mine.tsv")
    assert told.out.startswith("SST-2, 40 examples")


def test_bad_lines_stop_it_or_are_counted(capsys, run, tmp_path):
    file = tmp_path / "dev.tsv"
    file.write_text((run[1] / "dev.tsv").read_text() + "the cat\tlukewarm\n")
    assert "dev.tsv:42: has the unknown label" in mistake(capsys, "evaluate", run[0].folder, "--data", file)
    told = bertsmith(capsys, "evaluate", run[0].folder, "--data", file, "--skip-bad")
    assert told.out.startswith("SST-2, 40 examples (1 bad lines left out)")


def test_mistakes_are_one_line(capsys, run, tmp_path):
    folder, data = run[0].folder, run[1]
    (tmp_path / "new.tsv").write_text("sentence\nthe sun\n")
    write_toy_folder(tmp_path / "plain")
    for words, said in (
        ((folder, "--data", tmp_path / "new.tsv"), "have no label to compare with"),
        ((folder, "--data", tmp_path / "gone.tsv"), "gone.tsv: no such file or folder"),
        ((folder, "--data", data, "--split", "exam"), "SST-2 has no split 'exam'"),
        ((tmp_path / "gone", "--data", data), "there is no such folder"),
        ((tmp_path / "plain", "--data", data), "was not fine-tuned here"),
    ):
        assert said in mistake(capsys, "evaluate", *words)
