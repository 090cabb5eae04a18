"""The views of `bertsmith look`: one file each, opened from the disk without a network."""

import time

import pytest
from playwright.sync_api import Page, expect

import bertsmith
from bertsmith.inference.introspection import inspect_attention
from bertsmith.insight.deciding_words import deciding_words
from bertsmith.insight.html_view import bundled
from bertsmith.insight.views import attention_data, senses_data, words_data
from tests.browser.contrast import unreadable, violations
from tests.browser.playground import THEMES

SENTENCES = ["They sat on the bank of the river.", "The bank lent him money.", "A large <bank> in the city."]


@pytest.fixture(scope="module")
def bert():
    return bertsmith.load(device="cpu")


def comes_true(page: Page, condition: str, argument: str) -> bool:
    """Whether a condition is met soon; asked from here, as a view lets nobody evaluate text a second time."""
    last = time.monotonic() + 10
    while not page.evaluate(condition, argument):
        if time.monotonic() > last:
            return False
        page.wait_for_timeout(20)
    return True


def test_attention_is_walked_by_keyboard(view, bert):
    data = attention_data(bert, "The animal did not cross the street because it was too tired.")
    page = view("attention_view", data)
    assert "reads" in page.locator("[role=status]").first.inner_text()
    assert page.locator(".map").count() == data["layers"] * data["heads"]
    signs = set(page.locator(".map .kind").all_inner_texts())
    assert signs and signs == set(page.locator(".kinds .kind").all_inner_texts())  # each is explained
    page.locator(".view-token[tabindex='0']").focus()
    page.keyboard.press("Home")
    assert page.locator("[role=status]").first.inner_text().startswith("“[CLS]” reads")
    page.keyboard.press("ArrowRight")
    assert page.locator(".view-token[aria-pressed=true]").inner_text() == data["tokens"][1]
    page.locator("select").first.select_option("0")
    page.wait_for_selector(".map[aria-pressed=true]")
    page.get_by_label("Shade").select_option("read")
    expect(page.locator("[role=status]").first).to_contain_text("is read by")


def test_maps_of_heads_follow_the_theme_of_the_system(view, bert):
    page = view("attention_view", attention_data(bert, "The cat sat on the mat."))
    drawn = "document.querySelector('.map canvas').toDataURL()"
    light = page.evaluate(drawn)
    page.emulate_media(color_scheme="dark")
    assert comes_true(page, f"light => {drawn} !== light", light)
    page.emulate_media(color_scheme="light")
    assert comes_true(page, f"light => {drawn} === light", light)


def test_the_shades_are_the_weights(view, bert):
    text = "The cat sat on the mat."
    data = attention_data(bert, text)
    page = view("attention_view", data)
    weights = inspect_attention(bert, text).weights
    row = weights[data["layer"], data["head"], data["token"]].sqrt().tolist()
    heat = "all => all.map((each) => Number(each.style.getPropertyValue('--heat')))"
    shown = page.locator(".view-token").evaluate_all(heat)
    assert shown == pytest.approx(row, abs=1 / 255)


def test_a_text_of_five_hundred_tokens_is_quick(view, bert):
    longest = bert.reader.longest
    page = view("attention_view", attention_data(bert, "the cat " * ((longest - 2) // 2)))
    assert page.locator(".view-token").count() >= longest - 2
    spent = page.evaluate(
        """async () => {
          const begin = performance.now();
          const tokens = document.querySelectorAll('.view-token');
          document.querySelectorAll('.map')[0].click();
          tokens[tokens.length - 3].focus();
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          return performance.now() - begin;
        }"""
    )
    assert spent < 10_000  # a page that hangs; how fast it is, a noisy machine cannot tell
    assert page.locator(".view-token[aria-pressed=true]").count() == 1


def test_senses_are_dots_with_their_sentences(view, bert):
    page = view("senses_view", senses_data(bert, "bank", ["Nothing here.", *SENTENCES]))
    assert page.locator(".dot").count() == 3
    assert page.locator(".sense").count() == 3
    assert "<bank>" in page.locator(".senses").inner_text()
    headings = page.locator("h1, h2, h3").evaluate_all("all => all.map((each) => each.tagName)")
    assert headings == ["H1", "H2", "H3"]
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        assert violations(page, colours_alone=theme == "dark") == []
    page.locator(".sense").first.focus()
    assert page.locator(".dot.lit").count() == 1


def test_words_are_shaded_for_and_against(view, models):
    bert = bertsmith.load(models["sst2"], device="cpu")
    found = deciding_words(bert, ["a warm </script> day", "the cold morning was hot"], seed=0)
    page = view("words_view", words_data(found, model="sst2"))
    assert page.locator(".card .view-word").count() == sum(len(each.words) for each in found)
    assert page.locator("table tr").count() == 4
    assert "" not in page.locator("th").all_inner_texts()
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        assert unreadable(page, "main") == {} and violations(page, colours_alone=theme == "dark") == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_label("Shade by").select_option("gradient x input")
    best = max(range(len(found[0].words)), key=lambda at: found[0].scores["gradient x input"][at])
    assert found[0].words[best][1].text in page.locator("section [role=status]").first.inner_text()


@pytest.mark.parametrize("theme", THEMES)
def test_everything_can_be_read_in_both_themes(view, bert, theme):
    page = view("attention_view", attention_data(bert, "The cat sat on the mat."))
    page.emulate_media(color_scheme=theme)
    assert unreadable(page, "main") == {} and violations(page, colours_alone=theme == "dark") == []
    heat = "all => all.map((each) => Number(each.style.getPropertyValue('--heat')))"
    shades = page.locator(".view-token").evaluate_all(heat)
    page.locator(".view-token").nth(shades.index(max(shades))).hover()
    assert unreadable(page, "main") == {}


def test_what_is_imported_twice_is_there_once():
    code = bundled("attention_view")
    assert code.count("const elements_module = ") == 1 and "import {" not in code and "export " not in code
