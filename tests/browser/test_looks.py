"""The playground by keyboard, in both themes, on a desk and on a phone, and its marks in odd texts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect

from tests.browser.playground import PANELS, THEMES, WINDOWS, Visit, visit

# ---- keyboard, theme, looks


def test_arrow_keys_walk_through_the_tabs_and_focus_can_be_seen(seen: Visit) -> None:
    seen.open("fill")
    tabs = seen.page.get_by_role("tab")
    tabs.first.focus()
    seen.page.keyboard.press("ArrowDown")
    expect(tabs.nth(1)).to_be_focused()
    expect(seen.page.locator("#panel-answer")).to_be_visible()
    expect(seen.page.locator("#panel-fill")).to_be_hidden()
    assert tabs.nth(1).evaluate("tab => getComputedStyle(tab).outlineStyle") == "solid"
    seen.page.keyboard.press("End")
    expect(seen.page.locator("#panel-models")).to_be_visible()
    assert seen.page.url.endswith("#models")
    assert [tab.get_attribute("tabindex") for tab in tabs.all()].count("0") == 1


@pytest.mark.parametrize("window", WINDOWS)
def test_tab_starts_at_the_skip_link_whichever_panel_the_page_opens_with(
    browser: Browser, address: str, window: str
) -> None:
    with browser.new_context(**WINDOWS[window]) as context:
        seen = visit(context, address)
        seen.open("senses")
        for stop in (".skip", "#theme", "#tab-senses"):
            seen.page.keyboard.press("Tab")
            expect(seen.page.locator(stop)).to_be_focused()


def test_the_tab_of_the_panel_that_a_phone_opens_is_in_view(browser: Browser, address: str) -> None:
    with browser.new_context(**WINDOWS["phone"]) as context:
        seen = visit(context, address)
        for panel in (PANELS[0], PANELS[-1], PANELS[4]):
            seen.open(panel)
            expect(seen.page.locator(f"#tab-{panel}")).to_be_in_viewport(ratio=1)


def test_every_field_and_button_has_a_name(seen: Visit) -> None:
    nameless = """() => [...document.querySelectorAll("input, textarea, select, button")].filter((each) =>
        !(each.labels?.[0] ?? each).textContent.trim() && !each.getAttribute("aria-label")).length"""
    seen.open("attention")
    assert seen.page.evaluate(nameless) == 0


def test_the_theme_follows_the_system_until_it_is_chosen_and_is_remembered(
    browser: Browser, address: str
) -> None:
    with browser.new_context(color_scheme="dark") as context:
        seen = visit(context, address)
        seen.open("models")
        ground = "() => getComputedStyle(document.body).backgroundColor"
        dark = seen.page.evaluate(ground)
        seen.page.get_by_role("button", name="Light").click()
        light = seen.page.evaluate(ground)
        assert light != dark
        seen.open("models")
        assert seen.page.evaluate(ground) == light


@pytest.mark.parametrize("window", WINDOWS)
def test_every_panel_fits_its_window_and_has_its_picture_taken(
    browser: Browser, address: str, tmp_path: Path, window: str, full: bool
) -> None:
    with browser.new_context(**WINDOWS[window]) as context:
        seen = visit(context, address)
        seen.page.goto(address)
        for panel in PANELS:
            seen.page.locator(f"#tab-{panel}").click()
            seen.settle(panel)
            for theme in THEMES:
                seen.page.emulate_media(color_scheme=theme)
                assert seen.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, panel
                seen.page.screenshot(path=tmp_path / f"{panel}-{theme}.png", full_page=full)
            light, dark = ((tmp_path / f"{panel}-{theme}.png").read_bytes() for theme in THEMES)
            assert light != dark, panel
        assert seen.complaints == []
        assert seen.strangers == []


@pytest.mark.parametrize("window", WINDOWS)
def test_the_matrix_stays_in_sight_beside_words_without_an_end(
    browser: Browser, address: str, window: str
) -> None:
    ends = """name => {
        const text = document.createRange();
        text.selectNodeContents(name);
        const cell = name.closest("tr").cells[1];
        return text.getBoundingClientRect().right - cell.getBoundingClientRect().left;
    }"""
    with browser.new_context(**WINDOWS[window]) as context:
        seen = visit(context, address)
        seen.open("compare")
        seen.page.get_by_label("Sentences", exact=True).fill("\n".join(letter * 300 for letter in "xyz"))
        expect(seen.page.locator("#panel-compare .nearest")).to_contain_text("xxx")
        frame = seen.page.locator("#panel-compare .wide")
        assert frame.evaluate("frame => frame.scrollWidth - frame.clientWidth") <= 0
        for name in seen.page.locator("#panel-compare .numbered").all():
            assert name.evaluate(ends) <= 0
        frame.scroll_into_view_if_needed()
        for cell in seen.page.locator("#panel-compare tbody td").all():
            expect(cell).to_be_in_viewport(ratio=1)
        assert seen.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


# ---- code points and UTF-16

LETTERS = st.text(
    alphabet=st.sampled_from("ab é😀👩‍👧🇬🇧") | st.characters(exclude_categories=["Cs"]), max_size=12
)


@given(text=LETTERS, data=st.data())
def test_places_counted_in_code_points_cut_the_same_stretches_as_in_python(
    opened: Visit, text: str, data: st.DataObject
) -> None:
    place = st.integers(0, len(text))
    spans = [sorted(pair) for pair in data.draw(st.lists(st.tuples(place, place), max_size=4))]
    script = """async ([text, spans]) => {
        const { pieces, replace, slice } = await import("/page/codepoints.js");
        const cut = pieces(text, spans.map(([start, end]) => ({ start, end })));
        return [spans.map(([start, end]) => [slice(text, start, end), replace(text, start, end, "x")]),
            cut.map((piece) => piece.text).join(""),
            cut.filter(({ span }) => span).map(({ text, span }) => [span.start, span.end, text])];
    }"""
    each, joined, marked = opened.page.evaluate(script, [text, spans])
    assert each == [[text[start:end], text[:start] + "x" + text[end:]] for start, end in spans]
    assert joined == text
    assert all(text[start:end] == piece for start, end, piece in marked)
