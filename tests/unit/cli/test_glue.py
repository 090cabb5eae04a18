"""`bertsmith glue` as people use it."""

import json

import pytest

from tests.command_line import bertsmith, mistake
from tests.toy_tasks import rte, sst2
from tests.tuning import QUICK, SHORT, quickly, stop_at, toy_model

__all__ = ["quickly", "toy_model"]

SETTINGS = [part for line in (*QUICK, *SHORT) for part in ("--set", line)]


@pytest.fixture
def words(model, tmp_path):
    sst2(tmp_path / "glue" / "SST-2")
    rte(tmp_path / "glue" / "RTE")
    return ["glue", "--model", model, "--data", tmp_path / "glue", "--out", tmp_path / "out", *SETTINGS]


def test_an_option_of_the_table_is_blamed_by_its_name(capsys, tmp_path):
    sst2(tmp_path / "glue" / "SST-2")
    line = mistake(capsys, "glue", "--data", tmp_path / "glue", "--out", tmp_path / "out", "--lr", "0")
    assert "--lr: optim.peak_lr = 0.0 is invalid" in line


def test_one_table_with_what_is_missing(capsys, words, tmp_path):
    told = bertsmith(capsys, *words)
    assert told.code == 0, told
    assert "[2/2] rte seed-0" in told.out
    assert "| SST-2 | dev | accuracy |" in told.out
    assert "| BERT, table 1 | – |" in told.out
    assert "Without training data here: CoLA, MRPC," in told.out
    assert (tmp_path / "out" / "table.md").read_text().strip() in told.out
    again = bertsmith(capsys, *words, "--json")
    assert again.out.count("is already finished") == 2
    summary = json.loads(again.out.splitlines()[-1])
    assert set(summary["tasks"]) == {"sst2", "rte"}
    assert summary["averages"]["BERT, table 1"] is None


def test_a_stopped_study_exits_with_130(capsys, words):
    with stop_at(6):
        told = bertsmith(capsys, *words)
    assert told.code == 130
    assert "stopped in rte seed-0; run the same command again to resume" in told.out


def test_mistakes_are_one_line(capsys, words, tmp_path):
    places = ["glue", "--data", tmp_path, "--out", tmp_path / "out"]
    line = mistake(capsys, *places)
    assert (
        "does not contain a GLUE task with training data; give the folder with some of CoLA, SST-2," in line
    )
    assert line.count("SICK") == 1
    gone = mistake(capsys, "glue", "--data", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert "nowhere: this folder does not exist" in gone
    assert "this folder does not exist" in mistake(capsys, *words, "--model", tmp_path / "nowhere")
    assert "--lr-grid: it has its own learning rates" in mistake(capsys, *words, "--lr-grid", "--lr", "1e-4")
    assert "give --seeds or --random" in mistake(capsys, *words, "--seeds", "2", "--random", "3")
    assert "optim.lr" in mistake(capsys, *words, "--set", "optim.lr=1")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").rglob("*.json"))
