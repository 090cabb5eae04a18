"""`bertsmith features` and `features-table` as people use them."""

import json

import pytest

import bertsmith as package
from bertsmith.core.files import write_text
from tests.command_line import bertsmith, mistake
from tests.tuning import QUICK, quickly, toy_model

__all__ = ["quickly", "toy_model"]


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("the cat sits\n\na dog\n")
    return file


def test_a_folder_of_features_is_written_and_opened(capsys, texts, model, tmp_path):
    out = tmp_path / "features"
    words = ["features", "--model", model, "--input", texts, "--out", out, "--layers", "last"]
    assert "texts.txt:2: is empty" in mistake(capsys, *words)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["texts.txt"]
    told = bertsmith(capsys, *words, "--skip-bad")
    assert told.code == 0 and "2 texts, 9 tokens of 64 numbers ->" in told.out
    assert "1 bad lines were skipped" in told.err
    found = package.open_features(out)
    assert found.lines.tolist() == [1, 3] and found.of_text(1).shape == (4, 64)
    assert "already exists" in mistake(capsys, *words)


def test_machines_get_json(capsys, texts, model, tmp_path):
    texts.write_text("a dog\n")
    words = ("--input", texts, "--out", tmp_path / "f", "--combine", "separate", "--json")
    told = bertsmith(capsys, "features", "--model", model, *words)
    assert json.loads(told.out) == {"texts": 1, "tokens": 4, "shape": [2, 64], "out": str(tmp_path / "f")}
    again = ("--input", texts, "--out", tmp_path / "g", "--combine", "sum")
    assert "unknown combine 'sum'; choose one of concat" in mistake(capsys, "features", *again)


def test_one_command_fills_the_table(capsys, model, tmp_path):
    for split, sentences in (("train", 12), ("dev", 4)):
        write_text(
            tmp_path / "ner" / f"{split}.txt", "the O\ncat B-PER\nsits O\n\na O\ndog O\n\n" * sentences
        )
    quick = [line for line in QUICK if not line.startswith(("run.epochs", "optim.peak_lr"))]
    quick += ["run.epochs=0.3", "features.width=8"]
    settings = [part for line in quick for part in ("--set", line)]
    words = ["features-table", "ner", "--model", model, "--data", tmp_path / "ner", "--seeds", "1"]
    told = bertsmith(capsys, *words, "--out", tmp_path / "out", *settings)
    assert told.code == 0, told
    assert "| concat last four hidden |" in told.out and "| 96.1 |" in told.out
    assert "Learned weights, weighted sum all layers: layer 1 0." in told.out
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert len(table) == 7 and table["sum-last4"]["layer_weights"]["scale"] != 0
    recipe = (tmp_path / "out" / "embeddings" / "seed-0" / "recipe.toml").read_text()
    assert "peak_lr = 0.001" in recipe and "width = 8" in recipe
    tuned = (tmp_path / "out" / "fine-tuning" / "seed-0" / "recipe.toml").read_text()
    assert 'encoder = "tuned"' in tuned and "peak_lr = 0.001" not in tuned
