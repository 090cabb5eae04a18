"""What is drawn of a finished model."""

import sys

import numpy as np

from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.finetuned_model import draw_confusion
from tests.tuning import SHORT, Notebook, toy_assignment


def test_classes_that_training_has_not_have_no_place_among_the_others(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)  # the room's tests draw nothing
    targets, predictions = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 1])
    draw_confusion(tmp_path / "known.png", targets, predictions, ("a", "b"))
    strange = np.append(targets, [-2, -3]), np.append(predictions, [0, 1])
    draw_confusion(tmp_path / "strange.png", *strange, ("a", "b"))
    assert (tmp_path / "strange.png").read_bytes() == (tmp_path / "known.png").read_bytes()


def test_that_nothing_can_be_drawn_is_said_once(model, tmp_path, caplog):
    assert finetune(toy_assignment("sst2", model, tmp_path, *SHORT), Notebook()).finished
    assert caplog.text.count("no plots are drawn: pip install bertsmith[plots]") == 1
