"""Files without labels are neither trained nor evaluated on: a run says so before its first step."""

import csv
import json

import pytest

from bertsmith.core.errors import UserError
from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.splits import read_splits
from tests.tuning import SHORT, Notebook, toy_assignment

LABELLED = {
    "swag": ("train.csv", "val.csv"),
    "pos": ("en_toy-ud-train.conllu", "en_toy-ud-dev.conllu"),
    "squad": ("train-v1.1.json", "dev-v1.1.json"),
}


def bare_swag(file):
    with file.open(newline="") as lines:
        rows = [row[:-1] for row in csv.reader(lines)]
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)


def bare_pos(file):
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    rows = [[*row[:3], "_", *row[4:]] if len(row) > 1 else row for row in rows]
    file.write_text("\n".join("\t".join(row) for row in rows) + "\n")


def bare_squad(file):
    content = json.loads(file.read_text())
    for article in content["data"]:
        article["paragraphs"][0]["qas"][0]["answers"] = []
    file.write_text(json.dumps(content))


BARE = {"swag": bare_swag, "pos": bare_pos, "squad": bare_squad}


@pytest.mark.parametrize("name", LABELLED)
def test_training_without_labels_is_rejected(model, tmp_path, name):
    assignment = toy_assignment(name, model, tmp_path, *SHORT)
    BARE[name](assignment.data / LABELLED[name][0])
    with pytest.raises(UserError, match=rf"{LABELLED[name][0]}.*none of the training examples has a label"):
        finetune(assignment, Notebook())
    assert not assignment.out.exists()


@pytest.mark.parametrize("name", LABELLED)
def test_an_exam_without_labels_is_rejected_before_the_first_step(model, tmp_path, name):
    assignment = toy_assignment(name, model, tmp_path, *SHORT)
    BARE[name](assignment.data / LABELLED[name][1])
    with pytest.raises(UserError, match=rf"{LABELLED[name][1]}.*40 of 40 examples to evaluate lack a label"):
        finetune(assignment, Notebook())
    assert not assignment.out.exists()


def test_some_training_examples_may_lack_a_label(model, tmp_path):
    assignment = toy_assignment("swag", model, tmp_path, *SHORT)
    file = assignment.data / "train.csv"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([first, rest[0].rpartition(",")[0] + ",", *rest[1:]]) + "\n")
    found = read_splits(assignment.task, assignment.data, skip_bad=False)
    assert [example.label is None for example in found.splits["train"]].count(True) == 1
