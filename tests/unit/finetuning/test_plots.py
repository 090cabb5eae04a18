"""What is drawn of a finished model."""

import sys

import numpy as np
import pytest

from bertsmith.finetuning.finetune import finetune
from bertsmith.finetuning.run_plots import (
    LearningCurve,
    draw_calibration,
    draw_confusion,
    draw_learning_curve,
)
from bertsmith.tasks.metrics import Metric, reliability
from tests.tuning import SHORT, Notebook, toy_assignment


def test_classes_that_training_has_not_have_no_place_among_the_others(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)  # the room's tests draw nothing
    targets, predictions = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 1])
    draw_confusion(tmp_path / "known.png", targets, predictions, ("a", "b"))
    strange = np.append(targets, [-2, -3]), np.append(predictions, [0, 1])
    draw_confusion(tmp_path / "strange.png", *strange, ("a", "b"))
    assert (tmp_path / "strange.png").read_bytes() == (tmp_path / "known.png").read_bytes()


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be written."""
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    figures = []
    monkeypatch.setattr("bertsmith.finetuning.run_plots._save", lambda figure, _: figures.append(figure))
    return figures


def test_the_learning_curve_is_smoothed_and_read_against_the_constant_answer(drawn, tmp_path):
    training = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 101)]
    held_out = [{"kind": "held-out", "step": step, "loss": 0.5, "accuracy": step / 200} for step in (50, 100)]
    curve = LearningCurve([*training, *held_out], Metric("accuracy"), 0.25)
    draw_learning_curve(tmp_path / "run" / "curves.png", curve)
    left, right = drawn[0].axes
    raw, smooth = left.lines[:2]
    assert raw.get_ydata()[0] == 1 > smooth.get_ydata()[0]
    assert left.get_legend().get_texts()[0].get_text().startswith("training, now 0.010")
    assert [each.get_text() for each in right.get_legend().get_texts()] == [
        "held-out, now 50.00%",
        "constant answer, 25.00%",
    ]
    assert list(right.lines[-1].get_ydata()) == [0.25, 0.25]
    assert drawn[0].get_suptitle() == "run  ·  step 100"


def test_calibration_says_how_many_examples_are_in_each_bin(drawn, tmp_path):
    shares = np.array([[0.97, 0.03], [0.96, 0.04], [0.4, 0.6]])
    draw_calibration(tmp_path / "calibration.png", reliability(shares, np.array([0, 1, 1])))
    above, below = drawn[0].axes
    for scale in (above.yaxis, below.xaxis):
        assert scale.get_major_formatter()(0.25) == "25%"
    assert sorted(int(bar.get_height()) for bar in below.patches if bar.get_height()) == [1, 2]
    assert {text.get_text() for text in below.texts} == {"", "1", "2"}


def test_a_confusion_matrix_says_that_its_shades_are_per_row(drawn, tmp_path):
    draw_confusion(tmp_path / "c.png", np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]), ("a", "b"))
    axes, legend = drawn[0].axes
    assert axes.images[0].get_array().tolist() == [[2 / 3, 1 / 3], [0, 1]]
    assert "fraction of the row" in legend.get_ylabel()


def test_that_nothing_can_be_drawn_is_said_once(model, tmp_path, caplog):
    assert finetune(toy_assignment("sst2", model, tmp_path, *SHORT), Notebook()).finished
    assert caplog.text.count("plots are not drawn: pip install bertsmith[plots]") == 1
