"""Heads that attend alike: divergences by loops over transformers' attentions, and the map."""

import json
import math

import numpy as np
import pytest

from bertsmith.insight.clusters import HeadMap, kinds_of_heads, plane_of, study_clusters
from bertsmith.insight.clusters_report import clusters_report
from bertsmith.insight.surface import MEASURES, Surface
from tests.command_line import bertsmith
from tests.unit.insight.slow_attention import eager_maps

TEXTS = ["The dog runs, zap.", ("My cat sits.", "It is cold."), "A hot tea."]


def slow_divergence(one, other):
    """The Jensen-Shannon divergence of two distributions, as its definition says it."""
    size, total = len(one), 0.0
    for first, second in ((one, other), (other, one)):
        for p, q in zip(first, second, strict=True):
            p, q = 0.999 * p + 0.001 / size, 0.999 * q + 0.001 / size
            total += 0.5 * p * math.log(p / ((p + q) / 2))
    return total


@pytest.mark.usefixtures("groups")
def test_divergences_are_those_of_the_definition(bert, eager):
    found = study_clusters(bert, TEXTS, longest=128)
    expected, tokens = np.zeros((8, 8)), 0
    for encoded in bert.reader.encode(TEXTS, truncate=False):
        maps = eager_maps(eager, encoded).reshape(8, len(encoded), len(encoded))
        tokens += len(encoded)
        for one, other in np.ndindex(8, 8):
            expected[one, other] += sum(map(slow_divergence, maps[one], maps[other]))
    np.testing.assert_allclose(found.distances_AA, expected / tokens, atol=1e-5)
    within, across = found.within_and_across()
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    same = [found.distances_AA[a, b] for a, b in pairs if a // 4 == b // 4]
    other = [found.distances_AA[a, b] for a, b in pairs if a // 4 != b // 4]
    assert within == np.mean(same) and across == np.mean(other)


def test_a_map_of_points_in_the_plane_has_their_distances():
    points = np.random.default_rng(1).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found = plane_of(distances)
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=-1), distances, atol=1e-6)


def test_a_map_of_what_is_not_flat_has_no_better_neighbour():
    distances = np.ones((5, 5)) - np.eye(5)  # five points, all equally far: no plane holds them
    found = plane_of(distances)

    def stress(points):
        return ((np.linalg.norm(points[:, None] - points[None], axis=-1) - distances) ** 2).sum()

    chance = np.random.default_rng(0)
    assert all(stress(found) <= stress(found + chance.normal(0, 1e-3, (5, 2))) + 1e-9 for _ in range(200))


def test_heads_are_named_by_the_published_thresholds():
    rows = [
        {"previous": 0.51},
        {"next": 0.6},
        {"[SEP]": 0.4, "[CLS]": 0.15, "punctuation": 0.1},
        {"entropy": 3.9},
    ]
    measures = {name: np.array([[row.get(name, 0.0) for row in [*rows, {}]]]) for name in MEASURES}
    assert kinds_of_heads(Surface(measures, 1, 1)) == ["previous", "next", "special", "broad", "other"]


def test_the_command_leaves_a_map(capsys, tmp_path, lively_folder):
    (tmp_path / "texts.txt").write_text("The dog runs.\nA cat sleeps.\n")
    words = ("look", "clusters", "--model", lively_folder, "--input", tmp_path / "texts.txt")
    told = bertsmith(capsys, *words, "--out", tmp_path / "look")
    assert told.code == 0 and "one layer" in told.out and "untrained 3" in told.out
    values = json.loads((tmp_path / "look" / "clusters.json").read_text())
    assert np.shape(values["points"]) == (8, 2) and len(values["untrained"]) == 3
    assert (tmp_path / "look" / "clusters.png").exists()
    assert '"heads": 4' in (tmp_path / "look" / "clusters.html").read_text()


def two_layers(within, across):
    """Two layers of two heads, so far from each other in a layer and across."""
    distances = np.full((4, 4), across)
    distances[:2, :2] = distances[2:, 2:] = within
    np.fill_diagonal(distances, 0.0)
    return HeadMap(distances, np.zeros((4, 2)), (2, 2))


def test_a_layer_whose_heads_are_alike_is_told_with_the_untrained_ones_that_are_as_near():
    def told(*untrained):
        report = clusters_report(two_layers(0.4, 0.5), ["other"] * 4, untrained, model="toy")
        return report.tables[0].notes[1]

    # A thousandth below 1 is what chance gives; it is no finding to be marked.
    assert "are nearer to each other; in 0 of 2" in told(two_layers(0.00999, 0.01), two_layers(0.01, 0.01))
    assert "are nearer to each other; in 1 of 2" in told(two_layers(0.01, 0.01), two_layers(0.007, 0.01))
