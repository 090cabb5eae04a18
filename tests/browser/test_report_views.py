"""The views that reports of `bertsmith look` leave: numbers of heads, relations and the map of heads."""

import numpy as np
import pytest

from bertsmith.insight.clusters import HeadMap
from bertsmith.insight.clusters_report import clusters_report
from bertsmith.insight.coreference import ALL, TOWARDS, AntecedentScore, Coreference, QuestionSet
from bertsmith.insight.coreference_report import coreference_report
from bertsmith.insight.direction import SHARES, Direction, direction_report
from bertsmith.insight.relations import HeadRelations, RelationScore
from bertsmith.insight.relations_report import relations_report
from bertsmith.insight.report import view_data
from bertsmith.insight.surface import MEASURES, WITH_MASKED_LM, Surface
from bertsmith.insight.surface_report import surface_report
from tests.browser.contrast import unreadable, violations
from tests.browser.playground import THEMES

LAYERS, HEADS = 2, 3
PRESSED = "[aria-pressed=true]"
HEAT = "all => all.map((each) => Number(each.style.getPropertyValue('--heat')))"


def surface_of(seed):
    chance = np.random.default_rng(seed)
    measures = {name: chance.uniform(0, 0.9, (LAYERS, HEADS)) for name in (*MEASURES, *WITH_MASKED_LM)}
    return Surface(measures, texts=4, tokens=60)


def relations_of(seed):
    accuracy_L2HR = np.random.default_rng(seed).uniform(0, 1, (LAYERS, 2, HEADS, 2))
    scores = [
        RelationScore("det", 120, 1, 2, "from the head", 0.8, 0.7, 0.9, 1, 0.6),
        RelationScore("all", 400, 0, 1, "to the head", 0.3, 0.2, 0.4, -1, 0.35),
    ]
    return HeadRelations(tuple(scores), accuracy_L2HR, sentences=20, skipped=0)


def coreference_of(seed):
    accuracy_L2H = np.random.default_rng(seed).uniform(0, 1, (LAYERS, 2, HEADS))
    scores = [AntecedentScore(who, ALL, 40, 0.6, 0.5, 0.7) for who in ("head", "nearest mention")]
    return Coreference(1, 2, TOWARDS[0], tuple(scores), accuracy_L2H)


def direction_of(seed):
    shares_4LH = np.random.default_rng(seed).dirichlet(np.ones(4), (LAYERS, HEADS)).transpose(2, 0, 1)
    return Direction(dict(zip(SHARES, shares_4LH, strict=True)), texts=3, words=30)


def head_map():
    points_A2 = np.array([[0, 0], [1, 0], [1.1, 0.1], [0, 3], [2, 2], [3, 1]], np.float64)
    distances_AA = np.linalg.norm(points_A2[:, None] - points_A2[None], axis=-1) / 10
    return HeadMap(distances_AA, points_A2, (LAYERS, HEADS))


@pytest.fixture
def shown(view):
    """Opens the view of a report, which everybody can read in both themes."""

    def show(report):
        page = view(report.view.script, view_data(report, report.view))
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            assert unreadable(page, "main") == {} and violations(page, colours_alone=theme == "dark") == []
        assert page.locator("table.report").count() == len(report.tables)
        return page

    return show


def test_the_measures_of_heads_are_shades_and_numbers(shown):
    surface = surface_of(1)
    page = shown(surface_report(surface, [surface_of(2)], model="toy"))
    page.get_by_label("Measure").select_option("next")
    values = surface.measures["next"]
    assert page.locator(".head-cell").evaluate_all(HEAT) == pytest.approx(
        (values / values.max()).ravel(), abs=1e-3
    )
    assert page.locator(".head-cell").all_inner_texts() == [
        f"{each:.{1 if each < 9.95 else 0}f}" for each in 100 * values.ravel()
    ]
    page.locator(".head-cell[tabindex='0']").focus()
    for key in ("Home", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    told = page.locator("[role=status]").inner_text()
    assert told.startswith("Head 2-2: next") and f"{100 * values[1, 1]:.1f} %" in told
    assert page.locator(".bar").count() == len(MEASURES) + len(WITH_MASKED_LM)
    importance = 1000 * surface.measures["importance"][1, 1]
    assert f"{importance:.1f} × 10⁻³" in page.locator(".bar").last.inner_text()


@pytest.mark.parametrize("study", ["coref", "direction"])
def test_antecedents_and_directions_are_measures_of_heads_too(shown, study):
    if study == "coref":
        found, asked = coreference_of(1), QuestionSet((), (ALL,), ("nearest mention",))
        report = coreference_report(found, [coreference_of(2)], asked, model="toy", how="As chosen.")
        values = {name: found.accuracy_L2H[:, at] for at, name in enumerate(TOWARDS)}
    else:
        values = direction_of(1).shares
        report = direction_report(direction_of(1), [direction_of(2)], None, model="toy")
    page = shown(report)
    for name, values_LH in values.items():
        page.get_by_label("Measure").select_option(name)
        page.locator(".head-cell").last.click()
        told = page.locator("[role=status]").inner_text()
        assert told.startswith(f"Head {LAYERS}-{HEADS}: {name}")
        assert f"{100 * values_LH[-1, -1]:.1f} %" in told


def test_a_relation_shows_its_layers_and_its_heads(shown):
    found = relations_of(1)
    page = shown(relations_report(found, [relations_of(2)], model="toy", how="As chosen."))
    best = found.accuracy_L2HR.max((1, 2)).T
    assert page.locator(".relations td.heated").evaluate_all(HEAT) == pytest.approx(best.ravel(), abs=1e-3)
    # It opens with the first relation and the head and direction that were chosen for it.
    assert "head 2-3 (95 %: 70 % to 90 %)" in page.locator(".bars").inner_text()
    assert page.locator(".head-cell").evaluate_all(HEAT) == pytest.approx(
        found.accuracy_L2HR[:, 1, :, 0].ravel(), abs=1e-3
    )
    assert page.locator(f".head-cell{PRESSED}").get_attribute("title").startswith("Layer 2, head 3")
    page.locator(f".relation{PRESSED}").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(f".relation{PRESSED}").inner_text() == "all"
    assert "does not beat" in page.locator("section").nth(1).inner_text()
    # Who comes back by Tab finds the relation that was chosen by its row, not another one.
    page.locator(".relations td.heated").first.click()
    assert page.locator(".relation[tabindex='0']").inner_text() == "det"
    page.locator(".relations td.heated").last.click()
    assert page.locator(".relation[tabindex='0']").inner_text() == "all"
    page.get_by_label("Direction").select_option("from the head")
    values = found.accuracy_L2HR[:, 1, :, 1]
    layer, head = np.unravel_index(values.argmax(), values.shape)
    assert f"Head {layer + 1}-{head + 1} is right about" in page.locator("[role=status]").inner_text()


def test_the_nearest_of_a_head_stand_beside_the_map(shown):
    kinds = ["previous", "other", "other", "special", "next", "broad"]
    page = shown(clusters_report(head_map(), kinds, [head_map()], model="toy"))
    assert page.locator(".head-dot").count() == 6
    # It opens with one of the two that are most alike.
    assert page.locator("[role=status]").inner_text().startswith("Most alike: 1-3")
    page.locator(f".head-dot{PRESSED}").focus()
    page.keyboard.press("Home")
    assert "1-1, previous" in page.locator("h2").first.inner_text()
    nearest = page.locator(".near li").all_inner_texts()
    assert nearest[0].split() == ["1-2,", "other", "0.100"] and len(nearest) == 5
    page.locator(".near button").last.click()
    assert page.locator(f".head-dot{PRESSED}").get_attribute("aria-label") == "Head 2-3, broad"
    page.get_by_label("Colour").select_option("its layer")
    assert page.locator(".legend li").all_inner_texts() == ["layer 1", "layer 2"]
    assert unreadable(page, "main") == {}
