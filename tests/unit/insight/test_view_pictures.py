"""Attention and senses as pictures: every line that is drawn is a weight, and every dot a vector."""

import numpy as np
import pytest

from bertsmith.inference.introspection import inspect_senses
from bertsmith.insight.pictures import BLUE, RED
from bertsmith.insight.view_pictures import draw_arcs, draw_flow, draw_senses
from tests.command_line import bertsmith, mistake
from tests.lazily import Lazily

colors, matplotlib_figure = Lazily("matplotlib.colors"), Lazily("matplotlib.figure")
TOKENS = ("[CLS]", "a", "b", "[SEP]")
WEIGHTS = np.array([[0.9, 0.1, 0.0, 0.0], [0.04, 0.0, 0.9, 0.06], [0.2, 0.2, 0.2, 0.4], [0.0, 0.0, 0.0, 1.0]])
PNG = b"\x89PNG\r\n"


@pytest.fixture
def axes():
    return matplotlib_figure.Figure().subplots()


def test_an_arc_goes_from_each_token_to_those_that_it_reads(axes):
    draw_arcs(axes, TOKENS, WEIGHTS, chosen=1)
    arcs = {
        (arc.center[0], arc.width, round(arc.get_linewidth(), 3), colors.to_hex(arc.get_edgecolor()))
        for arc in axes.patches
    }
    assert arcs == {
        *((0.5, 1, 0.9, BLUE), (1.5, 1, 4.1, RED), (2.0, 2, 0.74, RED)),
        *((1.0, 2, 1.3, BLUE), (1.5, 1, 1.3, BLUE), (2.5, 1, 2.1, BLUE)),
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == list(TOKENS)


def test_a_line_leads_from_what_is_read_to_who_reads_it_in_the_next_layer(axes):
    draw_flow(axes, TOKENS, np.stack([np.eye(4), WEIGHTS]))
    (lines,) = axes.collections
    drawn = {tuple(map(tuple, line.astype(int).tolist())) for line in lines.get_segments()}
    straight = {((0, each), (1, each)) for each in range(4)}
    second = {((1, 0), (2, 0)), ((1, 1), (2, 0)), ((1, 2), (2, 1)), ((1, 3), (2, 1)), ((1, 3), (2, 3))}
    assert drawn == straight | second | {((1, each), (2, 2)) for each in range(4)}
    assert sorted(lines.get_linewidths())[-1] == pytest.approx(3.0)


def test_the_senses_of_three_layers_have_one_scale(bert):
    found = inspect_senses(bert, "cold", ["the tea is cold", "a cold day", "it is cold"])
    figure = matplotlib_figure.Figure()
    draw_senses(figure, found, ["1", "2", "3"])
    for axes, layer in zip(figure.axes, (0, 1, 2), strict=True):
        (dots,) = axes.collections
        assert np.allclose(dots.get_offsets(), found.layers[layer].plane.numpy())
        assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    assert len({round(np.diff(axes.get_xlim())[0], 6) for axes in figure.axes}) == 1


def test_a_file_that_ends_in_png_is_a_picture(capsys, lively_folder, tmp_path):
    model = ("--model", lively_folder)
    text = "The dog plays in the $now_$ ^snow^."  # no formula
    told = bertsmith(capsys, "look", "attention", text, *model, "--out", tmp_path / "view.png")
    assert told.code == 0 and "tokens -> " in told.out, told
    (tmp_path / "texts.txt").write_text("the tea is cold\na $cold$ day\nmy dog\n")
    words = ("look", "senses", "--word", "cold", "--input", tmp_path / "texts.txt", *model)
    told = bertsmith(capsys, *words, "--out", tmp_path / "senses.PNG")
    assert told.code == 0 and "2 sentences of 3" in told.out, told
    for name in ("view.png", "senses.PNG"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_what_a_picture_cannot_show_is_refused(capsys, lively_folder, tmp_path):
    out = ("--model", lively_folder, "--out", tmp_path / "x.png")
    line = mistake(capsys, "look", "attention", "the dog " * 32, *out)
    assert "has 66 tokens, but a picture shows at most 64; shorten it, or write .html" in line
    (tmp_path / "texts.txt").write_text("a cold day\n" * 31)
    senses = ("look", "senses", "--word", "cold", "--input", tmp_path / "texts.txt")
    assert "31 sentences have the word, but a picture shows at most 30" in mistake(capsys, *senses, *out)
    assert "ends in .html or .png" in mistake(capsys, "look", "attention", "a", "--out", tmp_path / "x.pdf")
    assert not (tmp_path / "x.png").exists()
