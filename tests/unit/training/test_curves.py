import json
import logging
import math
import struct
import sys

import numpy as np
import pytest

from bertsmith.objectives.registry import declaration
from bertsmith.training.curves import (
    FIXED,
    HELD_OUT,
    Series,
    by_stage,
    draw_curves,
    panels,
    series_of,
    smoothed,
)
from bertsmith.training.journal import Journal
from tests.tiny_runs import tiny_recipe

DECLARED = declaration(tiny_recipe())
DRAWN = panels(DECLARED, unigram_entropy=None)


def write_run(folder, *, steps=40):
    """A journal with every kind of line."""
    with Journal.open(folder, resume_step=0) as journal:
        journal.write("event", 0, {"what": "started"})
        for step in range(1, steps + 1):
            values = {"token_loss": 10 / step, "token_accuracy": step / 50, "learning_rate": 1e-4 / step}
            values |= {"tokens_per_second": 900.0, "tokens": 100 * step, "seconds": 2.0 * step}
            values["token_loss"] = math.nan if step == 7 else values["token_loss"]
            journal.write("train", step, values | {"pair_accuracy": 0.6})
            if step % 10 == 0:
                values = {"token_loss": 10 / step, "token_accuracy": step / 60, "stage": int(step > 20)}
                journal.write("held-out", step, {**values, "pair_majority": 0.58 if step > 20 else 0.56})


def size_of(picture):
    """Width and height in the header of a PNG file."""
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_a_run_is_drawn_as_a_picture_without_pyplot(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    write_run(tmp_path)
    picture = draw_curves(tmp_path, panels(DECLARED, unigram_entropy=6.5))
    assert picture == tmp_path / "curves.png"
    assert size_of(picture) == (1650, 902)
    assert "matplotlib.pyplot" not in sys.modules


def test_the_loss_is_read_against_the_unigram_entropy():
    drawn = panels(DECLARED, unigram_entropy=6.5)[0]
    assert (drawn.metric, drawn.level) == ("token_loss", 6.5)
    assert "unigram entropy 6.50" in drawn.level_label
    assert DRAWN[0].level is None


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        ((), []),
        (("examples.pairs=nsp",), ["pair_accuracy"]),
        (("examples.objective=replaced",), ["replaced_accuracy"]),
        (("examples.objective=replaced", "examples.pairs=nsp"), ["replaced_accuracy", "pair_accuracy"]),
    ],
)
def test_what_is_judged_has_a_panel_each(settings, judged, tmp_path):
    recipe = tiny_recipe("model.type=modernbert", "model.segments=0", "examples.pairs=none", *settings)
    drawn = panels(declaration(recipe), unigram_entropy=None)
    metrics = [panel.metric for panel in drawn]
    assert metrics == ["token_loss", "token_accuracy", *judged, "learning_rate", "tokens_per_second"]
    if len(judged) == 1:  # fewer and more panels than these are drawn
        return
    lines = [{"kind": "train", "step": step, **dict.fromkeys(metrics, 0.5)} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert size_of(draw_curves(tmp_path, drawn)) == (1650, 902)


def test_held_out_results_of_different_stages_are_lines_of_their_own():
    entries = [
        {"step": step, "kind": "held-out", "stage": stage} for step, stage in ((5, 0), (9, 0), (12, 1))
    ]
    entries.insert(2, {"step": 10, "kind": "train"})
    assert [[entry["step"] for entry in part] for part in by_stage(entries)] == [[5, 9], [12]]
    older = [{"step": 5, "kind": "held-out"}]
    assert by_stage(older) == [older]


def lines_drawn(folder, monkeypatch):
    """The steps, values and manner of each line in a run's picture."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    drawn, plot = [], Axes.plot

    def spy(axes, steps, values, **manner):
        drawn.append((list(steps), list(values), manner))
        return plot(axes, steps, values, **manner)

    monkeypatch.setattr(Axes, "plot", spy)
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.touch())  # takes a second
    draw_curves(folder, DRAWN)
    return drawn


def test_the_picture_joins_no_held_out_points_of_different_stages(tmp_path, monkeypatch):
    write_run(tmp_path)
    drawn = [steps for steps, _, manner in lines_drawn(tmp_path, monkeypatch) if manner["color"] == HELD_OUT]
    assert drawn == [[10, 20], [30, 40]] * 2  # losses and accuracies


def test_the_fixed_evaluation_is_one_line_over_all_stages(tmp_path, monkeypatch):
    with Journal.open(tmp_path, resume_step=0) as journal:
        for step in (0, 10, 20):
            values = {"token_loss": 9.0, "fixed_token_loss": 9.0 - step / 10, "stage": int(step > 10)}
            journal.write("held-out", step, values)
    drawn = [line for line in lines_drawn(tmp_path, monkeypatch) if line[2]["color"] == FIXED]
    assert [(steps, values) for steps, values, _ in drawn] == [([0, 10, 20], [9.0, 8.0, 7.0])]
    assert drawn[0][2]["label"] == "fixed evaluation, now 7.000"


def test_pairs_are_read_against_always_giving_the_commoner_answer_of_the_stage(tmp_path, monkeypatch):
    write_run(tmp_path)
    drawn = [line for line in lines_drawn(tmp_path, monkeypatch) if line[2].get("linestyle") == ":"]
    assert [values for _, values, _ in drawn] == [[0.56, 0.56], [0.58, 0.58]]
    assert drawn[0][2]["label"] == "always the more frequent answer, now 58.0%"


def test_a_run_with_one_number_and_an_odd_name_is_drawn(tmp_path):
    with Journal.open(tmp_path / "$odd$", resume_step=0) as journal:
        journal.write("held-out", 0, {"token_loss": 10.0})
    assert size_of(draw_curves(tmp_path / "$odd$", DRAWN))


def test_a_run_without_metrics_is_not_drawn(tmp_path, caplog):
    with Journal.open(tmp_path, resume_step=0) as journal:
        journal.write("event", 0, {"what": "started"})
    assert draw_curves(tmp_path, DRAWN) is None
    assert "the log is still empty" in caplog.text


def test_without_matplotlib_the_log_says_what_is_missing(tmp_path, monkeypatch, caplog):
    write_run(tmp_path, steps=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING, logger="bertsmith"):
        assert draw_curves(tmp_path, DRAWN) is None
    assert "bertsmith[plots]" in caplog.text
    assert not (tmp_path / "curves.png").exists()


def test_a_series_leaves_out_other_kinds_and_what_is_no_number():
    entries = [
        {"step": 1, "kind": "train", "loss": 4.0},
        {"step": 2, "kind": "train", "loss": None},
        {"step": 2, "kind": "held-out", "loss": 9.0},
        {"step": 3, "kind": "train", "rate": 1.0},
        {"step": 4, "kind": "train", "loss": 2.0},
    ]
    series = series_of(entries, "train", "loss")
    assert (series.steps.tolist(), series.values.tolist()) == ([1.0, 4.0], [4.0, 2.0])
    assert series_of(entries, "train", "none").values.tolist() == []


def plain_running_mean(values, reach):
    return [np.mean(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]


def test_smoothing_is_a_running_mean():
    values = np.random.default_rng(0).normal(size=500)
    for count, reach in ((500, 5), (100, 4), (30, 3)):  # short curves are as noisy as long ones
        mean = smoothed(Series(np.arange(float(count)), values[:count])).values
        np.testing.assert_allclose(mean, plain_running_mean(values[:count], reach), atol=1e-12)
    np.testing.assert_array_equal(smoothed(Series(np.arange(3.0), values[:3])).values, values[:3])
