"""What lies in the folder of a finished run."""

import json
import sys

import pytest

from bertsmith.tasks.kinds.registry import kind_named
from bertsmith.tasks.predictions import HardError, errors_table
from tests.tuning import SHORT, tune


def files_of(folder):
    return {file.name for file in folder.iterdir() if not file.name.startswith(".")}


@pytest.fixture
def pictures_are_drawn(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)


def test_a_finished_folder_has_facts_pictures_and_the_hardest_errors(model, tmp_path, pictures_are_drawn):
    folder = tune("sst2", model, tmp_path, *SHORT).folder
    pictures = {"curves.png", "confusion-dev.png", "calibration-dev.png"}
    facts = {"result.json", "card.md", "recipe.toml", "versions.json", "metrics.jsonl", "assignment.json"}
    assert files_of(folder) >= {"model", "errors-dev.md", *pictures, *facts}
    for name in pictures:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert files_of(folder / "model") >= {
        "config.json",
        "model.safetensors",
        "task.json",
        "card.md",
        "recipe.toml",
    }


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("sst2", "classify", {"0": "negative", "1": "positive"}),
        ("stsb", "regress", {"0": "score"}),
    ],
)
def test_the_config_names_labels_and_the_kind_of_the_problem(model, tmp_path, name, kind, labels):
    folder = tune(name, model, tmp_path, "run.epochs=0.1").folder / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == labels
    assert config["label2id"] == {label: int(number) for number, label in labels.items()}
    assert config["problem_type"] == kind_named(kind).problem_type


@pytest.mark.parametrize("name", ["sst2", "stsb", "wnut17", "squad", "swag"])
def test_errors_are_listed_from_the_surest_on(model, tmp_path, name):
    folder = tune(name, model, tmp_path, "run.epochs=0.1").folder
    lines = [line for line in (folder / "errors-dev.md").read_text().splitlines() if line.startswith("| ")][
        1:
    ]
    sureties = [float(line.split("|")[1].rstrip("% ")) for line in lines]
    assert sureties
    assert sureties == sorted(sureties, reverse=True)
    assert all(str(tmp_path) in line for line in lines)


def test_a_table_of_errors_survives_pipes_and_line_ends():
    error = HardError("file:1", "a | b\nc", "yes", "no", 0.5)
    assert errors_table([error]).splitlines()[-1] == "| 50.0% | yes | no | a \\| b c | file:1 |"


def test_the_card_tells_how_the_model_came_to_be(model, tmp_path):
    result = tune("sst2", model, tmp_path, *SHORT)
    card = (result.folder / "card.md").read_text()
    assert "160 training examples, 0.5 epochs, 5 steps of 16 examples" in card
    assert "the head classify starts from fresh weights" in card
    assert f"| dev | accuracy | {100 * result.metrics['dev']['accuracy']:.2f} |" in card  # as in the terminal
    header = dict(line.split(": ", 1) for line in card.split("---")[1].strip().splitlines())
    assert json.loads(header["pipeline_tag"]) == "text-classification"
    assert json.loads(header["tags"]) == ["bertsmith", "sst2"]


def test_the_usage_on_a_card_runs_and_its_picture_lies_beside_it(model, tmp_path, pictures_are_drawn, capsys):
    folder = tune("sst2", model, tmp_path, *SHORT).folder / "model"
    card = (folder / "card.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace("path/to/this/folder", folder.as_posix()), {})
    assert capsys.readouterr().out.strip() in ("negative", "positive")
    assert "![Learning curve](curves.png)" in card
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
