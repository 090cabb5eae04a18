"""The playground for who reads otherwise: by keyboard, from right to left, with colours of their own."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.contrast import unreadable, violations
from tests.browser.playground import DESK, PANELS, THEMES, Visit, served, visit

# ---- contrast


def test_every_panel_can_be_read_by_all_in_both_themes(browser: Browser, address: str, full: bool) -> None:
    with browser.new_context(**DESK) as context:
        seen = visit(context, address)
        seen.page.goto(address)
        for panel in PANELS:
            seen.page.locator(f"#tab-{panel}").click()
            seen.settle(panel)
            for theme in THEMES:
                seen.page.emulate_media(color_scheme=theme)
                assert unreadable(seen.page, "body") == {}, (panel, theme)
                # What is no colour is the same in both, and so is what stands around every panel.
                root = "html" if full or panel == PANELS[0] else f"#panel-{panel}"
                found = violations(seen.page, root=root, colours_alone=theme == "dark")
                assert found == [], (panel, theme)


@pytest.mark.parametrize("theme", THEMES)
def test_a_number_is_readable_on_every_shade(seen: Visit, theme: str) -> None:
    seen.open("models")
    seen.page.emulate_media(color_scheme=theme)
    seen.page.evaluate("""async () => {
        const { heated, make } = await import("/page/elements.js");
        const shade = (heat) => heated(make("li", {}, String(heat)), heat / 100);
        const shades = Array.from({ length: 101 }, (_, heat) => shade(heat));
        document.querySelector("#panel-models").replaceChildren(make("ul", {}, ...shades));
    }""")
    assert unreadable(seen.page, "#panel-models") == {}
    seen.page.emulate_media(color_scheme="light")


def test_the_badge_of_missing_panels_is_readable_where_its_tab_is_chosen(
    browser: Browser, model: Path
) -> None:
    with served({"toy": model}) as where, browser.new_context(**DESK) as context:
        seen = visit(context, where)
        seen.open("models")
        expect(seen.page.locator(".badge")).to_have_text("+4")
        assert unreadable(seen.page, "#tab-models") == {}


def test_where_the_system_sets_the_colours_bars_and_blanks_stay(browser: Browser, address: str) -> None:
    with browser.new_context(**DESK, forced_colors="active") as context:
        seen = visit(context, address)
        seen.open("fill")
        colour = "each => getComputedStyle(each, {}).backgroundColor"
        ground = seen.page.locator("body").evaluate(colour.format("null"))
        for selector, part in ((".bar-track", "'::before'"), (".blank", "null"), (".number", "null")):
            drawn = seen.page.locator(f"#panel-fill {selector}").first.evaluate(colour.format(part))
            assert drawn not in (ground, "rgba(0, 0, 0, 0)"), selector


# ---- scales


def test_two_alike_sentences_are_not_pale_and_a_text_with_itself_is_grey(seen: Visit) -> None:
    seen.open("compare")
    seen.page.get_by_label("Sentences", exact=True).fill("A cat sleeps.\nA dog sleeps.")
    cells = seen.page.locator("#panel-compare tbody td")
    expect(cells).to_have_count(4)
    heat = cells.evaluate_all(
        "all => all.map(cell => Number(cell.style.getPropertyValue('--heat')) * (cell.textContent > 0.8))"
    )
    assert heat[0] == heat[3] == 0  # grey: no heat at all
    assert heat[1] == heat[2] > 0.4


def test_the_same_cosine_has_the_same_shade_whatever_stands_beside_it(seen: Visit) -> None:
    seen.open("compare")
    shades = """async others => {
        const { heatTable } = await import("/page/heat_table.js");
        const rows = [[1, 0.8, others], [0.8, 1, others], [others, others, 1]];
        return heatTable(rows, ["a", "b", "c"]).rows[1].cells[2].style.getPropertyValue("--heat");
    }"""
    assert seen.page.evaluate(shades, 0.1) == seen.page.evaluate(shades, 0.9)


@pytest.mark.parametrize("theme", THEMES)
def test_the_legend_runs_as_the_cells_do_in_both_themes(seen: Visit, theme: str) -> None:
    seen.open("compare")
    seen.page.emulate_media(color_scheme=theme)
    steps = seen.page.locator("#panel-compare .scale li")
    assert steps.all_inner_texts() == ["0", "0.5", "0.7", "0.8", "0.9", "1"]
    heats = steps.evaluate_all("all => all.map(each => Number(each.style.getPropertyValue('--heat')))")
    assert heats == sorted(set(heats))
    expect(seen.page.locator("#panel-compare .lead").first).to_contain_text("the stronger the colour")
    seen.page.emulate_media(color_scheme="light")


# ---- from right to left

HEBREW = "פריז היא [MASK] של צרפת."


def test_a_sentence_from_right_to_left_keeps_its_blank_in_its_place(seen: Visit) -> None:
    seen.open("fill")
    box = seen.page.get_by_label("Text", exact=True)
    box.fill(HEBREW)
    sentence = seen.page.locator("#panel-fill .sentence")
    expect(sentence).to_contain_text("צרפת")
    for each in (box, sentence):
        assert each.evaluate("each => getComputedStyle(each).direction") == "rtl"
    lefts = sentence.locator("button").evaluate_all("all => all.map(each => each.getBoundingClientRect().x)")
    assert len(lefts) == 5
    assert lefts == sorted(lefts, reverse=True)


def test_words_from_right_to_left_do_not_turn_what_stands_around_them(seen: Visit) -> None:
    seen.open("compare")
    seen.page.get_by_label("Sentences", exact=True).fill("שלום עולם\nA dog sleeps.")
    closest = seen.page.locator("#panel-compare .nearest")
    expect(closest).to_contain_text("שלום")
    assert closest.locator("bdi").all_inner_texts() == ["שלום עולם", "A dog sleeps."]
    seen.open("fill")
    assert seen.page.locator("#panel-fill .bar-name bdi").count() == 6


def test_arrows_go_the_way_they_point_in_a_sentence_from_right_to_left(seen: Visit) -> None:
    seen.open("fill")
    seen.page.get_by_label("Text", exact=True).fill(HEBREW)
    words = seen.page.locator("#panel-fill .sentence button")
    expect(words).to_have_count(5)
    words.first.focus()
    words.first.press("ArrowLeft")
    expect(words.nth(1)).to_be_focused()


# ---- the sentence and its blanks


def test_filling_the_last_blank_keeps_the_sentence_and_the_focus(seen: Visit) -> None:
    seen.open("fill")
    guess = seen.page.locator("#panel-fill .bar").first
    guess.focus()
    guess.press("Enter")
    expect(seen.page.locator("#panel-fill .sentence")).to_have_text("Paris is the capital of France.")
    expect(seen.page.get_by_role("button", name="capital", exact=True)).to_be_focused()
    expect(seen.page.locator("#panel-fill .note")).to_contain_text("press a word")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("#panel-fill .card")).to_have_count(1)


def test_the_focus_goes_from_a_hidden_word_to_its_blank_and_on_to_its_guesses(seen: Visit) -> None:
    seen.open("fill")
    seen.page.get_by_role("button", name="France", exact=True).press("Enter")
    blanks = seen.page.locator("#panel-fill .blank")
    expect(blanks).to_have_count(2)
    expect(blanks.nth(1)).to_be_focused()
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("#panel-fill .card").nth(1).locator("button").first).to_be_focused()


def test_a_long_text_is_one_stop_for_tab_and_its_guesses_stay_in_sight(seen: Visit) -> None:
    seen.open("fill")
    seen.page.get_by_label("Text", exact=True).fill(
        "The river ran past the old mill. " * 60 + "It was [MASK]."
    )
    sentence = seen.page.locator("#panel-fill .sentence")
    expect(sentence).to_contain_text("mill. The")
    expect(sentence.locator("button[tabindex='0']")).to_have_count(1)
    for size in ({"width": 390, "height": 844}, DESK["viewport"]):
        seen.page.set_viewport_size(size)
        expect(seen.page.locator("#panel-fill .bar").first).to_be_in_viewport(ratio=1)
    expect(sentence.locator(".blank")).to_be_in_viewport(ratio=1)


# ---- what was left out


def test_no_answer_is_one_of_the_best_answers(seen: Visit) -> None:
    seen.open("answer")
    seen.page.get_by_label("Question").fill("where is the cat?")
    seen.page.get_by_label("Passage").fill("the boy walks under paris with my dog")
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_text("paris")
    rows = seen.page.locator("#panel-answer .candidate")
    none = rows.filter(has_text="No answer in the passage")
    expect(none).to_have_count(1)
    shares = rows.locator(".bar-track").evaluate_all(
        "all => all.map(each => Number(each.style.getPropertyValue('--share')))"
    )
    assert shares == sorted(shares, reverse=True)
    none.focus()
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_count(0)


def test_a_lone_model_is_not_offered_as_a_choice(seen: Visit) -> None:
    for panel, shown in (("fill", False), ("classify", True)):
        seen.open(panel)
        for chooser in seen.page.locator(f"#panel-{panel} select.model").all():
            expect(chooser).to_be_visible(visible=shown)
        told = [] if shown else ["default"]  # which model answers is told all the same
        expect(seen.page.locator(f"#panel-{panel} .choosers > span")).to_have_text(told)


def test_a_word_is_found_inside_of_text_without_spaces(seen: Visit) -> None:
    seen.open("senses")
    sentences = seen.page.get_by_label("Sentences with it, one per line")
    seen.page.get_by_label("Word", exact=True).fill("東")
    sentences.fill("東京は大きい。\n東の空が明るい。")
    expect(seen.page.locator("#panel-senses .sense b")).to_have_text(["東", "東"])
    seen.page.get_by_label("Word", exact=True).fill("apple")
    sentences.fill("A pineapple.\nAn apple.")
    expect(seen.page.locator("#panel-senses .note")).to_have_text("“A pineapple.” does not contain “apple”.")
