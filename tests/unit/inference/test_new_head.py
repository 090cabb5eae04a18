"""A head and a kind that nobody foresaw: one entry each, and they are trained, saved, loaded and used."""

from dataclasses import replace

import numpy as np
import pytest

import bertsmith
from bertsmith.finetuning.finetune import finetune
from bertsmith.model.architectures.bert import BERT, linear_head
from bertsmith.tasks.kinds.classify import Classify
from bertsmith.tasks.kinds.kind import TaskHead
from bertsmith.tasks.kinds.registry import KINDS
from tests.tuning import Notebook, toy_assignment

TEXTS = ["the boy sits under the warm sun", "the cat and the cold snow"]
SURE = 0.999


class Mood(Classify):
    """As any class, but whatever is not quite sure is the first."""

    name = "mood"
    head = TaskHead("mood", "sentence")
    taught_by = "moods"

    def predicted_targets(self, encoded, predictions):
        return np.where(predictions.scores.max(-1) > SURE, predictions.scores.argmax(-1), 0)


@pytest.fixture
def run(monkeypatch, folder, tmp_path):
    monkeypatch.setitem(KINDS, "mood", Mood())
    monkeypatch.setitem(BERT.heads, "mood", linear_head("mood.output", reads="pooled"))
    assignment = toy_assignment("sst2", folder, tmp_path, "run.epochs=1")
    task = replace(assignment.task, kind=KINDS["mood"])
    return finetune(replace(assignment, task=task), Notebook()).folder


def test_a_new_head_and_kind_are_trained_saved_loaded_and_used(run, tmp_path):
    bert = bertsmith.load(run)
    assert bert.heads == ("pooler", "mood")
    assert bert.abilities == ("classify", "embed", "look")
    found = bert.classify(TEXTS)
    assert set(found[0].probabilities) == {"negative", "positive"}
    bert.save(tmp_path / "copy")
    assert bertsmith.load(tmp_path / "copy").classify(TEXTS) == found


def test_the_kind_decides_which_class_it_is(run):
    for each in bertsmith.load(run).classify(TEXTS):
        likeliest = max(each.probabilities, key=lambda label: each.probabilities[label])
        expected = likeliest if each.probabilities[likeliest] > SURE else "negative"
        assert (each.label, each.labels) == (expected, (expected,))
        assert each.probability == each.probabilities[expected]
    labels = {each.label for each in bertsmith.load(run).classify(["warm sun", "hot tea", "cold snow"])}
    assert labels == {"negative"}  # one epoch makes nobody that sure


def test_a_folder_with_the_head_alone_has_its_labels_from_config_json(run):
    (run / "model" / "task.json").unlink()
    bert = bertsmith.load(run)
    assert bert.model.labels() == ("negative", "positive")
    assert bert.abilities == ("classify", "embed", "look")
    assert set(bert.classify(TEXTS)[0].probabilities) == {"negative", "positive"}


def test_a_model_without_the_head_says_what_makes_one(bert):
    with pytest.raises(bertsmith.UserError, match="make one with bertsmith finetune sst2 "):
        bert.classify(TEXTS)
