"""What is written in pictures can be read: names of points, and what stands around grids of heads."""

from itertools import combinations

import numpy as np
import pytest

from bertsmith.insight.clusters import HeadMap
from bertsmith.insight.clusters_report import clusters_report
from bertsmith.insight.pictures import draw_head_grids, name_points
from bertsmith.insight.relations import HeadRelations, RelationScore
from bertsmith.insight.relations_report import relations_report
from tests.lazily import Lazily

matplotlib_figure, matplotlib_text = Lazily("matplotlib.figure"), Lazily("matplotlib.text")


def named(points, **more):
    figure = matplotlib_figure.Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points.values(), strict=True), "o")
    axes.margins(0.2)
    name_points(axes, points, **more)
    figure.draw_without_rendering()
    # Of the letters alone, without the line to the point.
    return axes, {text.get_text(): matplotlib_text.Text.get_window_extent(text) for text in axes.texts}


def test_names_of_points_that_lie_close_together_do_not_overlap():
    random = np.random.default_rng(0)
    points = {f"a model, number {n}": tuple(random.normal(0, 0.02, 2)) for n in range(9)}
    points |= {f"another model, number {n}": (1.0, 0.5 + n / 200) for n in range(9)}
    axes, boxes = named(points)
    assert set(boxes) == set(points)
    for one, other in combinations(boxes.values(), 2):
        assert not one.overlaps(other)
    frame = axes.get_window_extent()
    for box in boxes.values():
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1


def test_a_point_by_itself_has_its_name_at_its_right():
    axes, boxes = named({"left": (0.0, 0.0), "middle": (1.0, 1.0), "far": (4.0, 4.0)})
    x, y = axes.transData.transform((0.0, 0.0))
    box = boxes["left"]
    assert 0 < box.x0 - x < 15 and box.y0 < y < box.y1


def test_a_name_keeps_away_from_a_bar_through_another_point():
    points = {"one that has a name": (2.0, 2.0), "other": (2.3, 3.0), "near": (0.0, 0.0), "far": (4.0, 4.0)}

    def crosses(axes, box):
        x, _ = axes.transData.transform((2.3, 2.0))
        return box.x0 < x < box.x1

    plain, boxes = named(points)
    assert crosses(plain, boxes["one that has a name"])
    barred, boxes = named(points, bars={"other": (1.0, 3.5)})
    assert not crosses(barred, boxes["one that has a name"])


def test_names_that_find_no_room_are_written_all_the_same():
    points = {f"{'a name that is wider than the picture ' * 4}{n}": (0.0, 0.0) for n in range(3)}
    _, boxes = named(points)
    assert len(boxes) == 3


@pytest.mark.parametrize(("measures", "height"), [(4, 3.8), (12, 9.0)])
def test_what_stands_around_grids_of_heads_covers_none_of_it(measures, height):
    figure = matplotlib_figure.Figure(figsize=(13, height))
    grids = {f"measure {number}": np.eye(12) for number in range(measures)}
    draw_head_grids(figure, grids, title="a model: what its heads attend to, 277 texts")
    figure.draw_without_rendering()
    title, below = figure._suptitle.get_window_extent(), figure._supxlabel.get_window_extent()
    for axes in figure.axes:
        around = axes.get_tightbbox()
        assert not around.overlaps(title) and not around.overlaps(below)


@pytest.mark.parametrize("count", [1, 30])
def test_the_picture_of_relations_has_room_for_its_labels(count):
    score = RelationScore("det", 120, 1, 2, "to the head", 0.8, 0.7, 0.9, 1, 0.6)
    found = HeadRelations((score,) * count, np.full((2, 2, 3, count), 0.5), sentences=20, skipped=0)
    report = relations_report(found, [found], model="toy", how="As chosen.")
    figure = matplotlib_figure.Figure(figsize=report.size)
    report.draw(figure)
    figure.draw_without_rendering()
    bars, grid = figure.axes
    assert bars.xaxis.label.get_window_extent().y0 >= 0 and grid.xaxis.label.get_window_extent().y0 >= 0
    title = next(text for text in figure.texts if "toy" in text.get_text())
    assert grid.title.get_window_extent().y1 <= title.get_window_extent().y0


def test_the_map_of_heads_names_each_beside_the_others():
    points = np.random.default_rng(3).normal(size=(24, 2)) * 0.05
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found = HeadMap(distances, points, (4, 6))
    report = clusters_report(found, ["other"] * 24, [found], model="toy")
    figure = matplotlib_figure.Figure(figsize=report.size)
    report.draw(figure)
    figure.draw_without_rendering()
    boxes = {text.get_text(): matplotlib_text.Text.get_window_extent(text) for text in figure.axes[0].texts}
    assert len(boxes) == 24 and "4-6" in boxes
    assert not any(one.overlaps(other) for one, other in combinations(boxes.values(), 2))
