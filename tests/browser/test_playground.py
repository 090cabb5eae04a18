"""The playground in a real browser, against a real server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.playground import Visit, browsing, served, tuned_models, visit
from tests.tuning import quickly, shared_lesson, toy_model  # noqa: F401

PANELS = (
    "fill",
    "answer",
    "classify",
    "entities",
    "next",
    "compare",
    "tokens",
    "attention",
    "senses",
    "models",
)
DESK = {"viewport": {"width": 1200, "height": 860}, "reduced_motion": "reduce", "color_scheme": "light"}
WINDOWS = {
    "desk": DESK,
    "phone": {**DESK, "viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True},
}
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(browser: Browser, lesson: Callable[..., Path]) -> Iterator[str]:
    with served(tuned_models(lesson)) as where:
        yield where


@pytest.fixture(scope="module")
def opened(browser: Browser, address: str) -> Iterator[Visit]:
    with browser.new_context(**DESK) as context:
        made = visit(context, address)
        made.page.goto(address)  # whichever test comes first here
        yield made


@pytest.fixture
def seen(opened: Visit) -> Iterator[Visit]:
    """The page; whatever a test does with it, nothing may go wrong and nothing may leave this machine."""
    opened.complaints.clear()
    yield opened
    opened.page.unroute_all()
    assert opened.complaints == []
    assert opened.strangers == []


def shares(page: Page, panel: str) -> list[tuple[str, float]]:
    """The names and widths of the bars of a panel."""
    script = """bars => bars.map(bar => [bar.querySelector(".bar-name").textContent,
        Number(bar.querySelector(".bar-track").style.getPropertyValue("--share"))])"""
    return [(name, share) for name, share in page.locator(f"#panel-{panel} .bar").evaluate_all(script)]


# ---- what each panel does


def test_blanks_are_guessed_while_you_type(seen: Visit) -> None:
    seen.open("fill")
    assert shares(seen.page, "fill")[0][0] == "capital"
    seen.page.get_by_label("Text", exact=True).press_sequentially(" The [MASK] barked.")
    expect(seen.page.locator("#panel-fill .card")).to_have_count(2)
    found = shares(seen.page, "fill")
    assert len(found) == 12
    assert 0 < sum(share for _, share in found[:6]) <= 1


def test_a_word_is_hidden_by_a_press_and_a_guess_put_in_by_another(seen: Visit) -> None:
    seen.open("fill")
    box = seen.page.get_by_label("Text", exact=True)
    box.fill("Paris 🗼 is the [MASK] of France.")
    expect(seen.page.locator("#panel-fill .sentence")).to_contain_text("🗼")
    seen.page.get_by_role("button", name="France", exact=True).click()
    expect(box).to_have_value("Paris 🗼 is the [MASK] of [MASK].")
    expect(seen.page.locator("#panel-fill .card")).to_have_count(2)
    seen.page.locator("#panel-fill .card").nth(0).get_by_role("button", name="capital").click()
    expect(box).to_have_value("Paris 🗼 is the capital of [MASK].")


def test_a_text_without_a_blank_gets_a_hint_and_no_request(seen: Visit) -> None:
    seen.open("fill")
    seen.page.get_by_label("Text", exact=True).fill("Nothing is missing.")
    expect(seen.page.locator("#panel-fill .note")).to_contain_text("[MASK]")
    expect(seen.page.locator("#panel-fill .bar")).to_have_count(0)


def test_the_answer_is_marked_where_it_stands_behind_an_emoji(seen: Visit) -> None:
    seen.open("answer")
    seen.page.get_by_label("Question").fill("where is the cat?")
    seen.page.get_by_label("Passage").fill("the 🌞 boy and the 👩‍👩‍👧 walks under paris with my dog")
    expect(seen.page.locator("#panel-answer .verdict")).to_contain_text("paris")
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_text("paris")


def test_another_answer_is_marked_when_it_is_pointed_at(seen: Visit) -> None:
    seen.open("answer")
    seen.page.get_by_label("Question").fill("where is the cat?")
    seen.page.get_by_label("Passage").fill("the 🌞 boy walks under paris with my dog")
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_text("paris")
    other = seen.page.locator("#panel-answer .candidate").nth(1)
    other.focus()
    wanted = other.locator("span").first.inner_text()
    assert wanted != "paris"
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_text(wanted)


def test_a_passage_that_does_not_answer_is_said_to(seen: Visit) -> None:
    seen.open("answer")
    seen.page.get_by_label("Question").fill("where is the cat?")
    seen.page.get_by_label("Passage").fill("the boy sits under the tree and walks with my cat")
    expect(seen.page.locator("#panel-answer .verdict")).to_contain_text("does not say")
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_count(0)


def test_a_text_is_classified_by_the_model_that_was_chosen(seen: Visit) -> None:
    seen.open("classify")
    seen.page.get_by_label("Text", exact=True).fill("the boy sits under the hot sun")
    expect(seen.page.locator("#panel-classify .verdict")).to_have_text("positive")
    assert sum(share for _, share in shares(seen.page, "classify")) == pytest.approx(1, abs=1e-4)
    seen.page.locator("#panel-classify").get_by_role("combobox", name="Model").select_option("stsb")
    expect(seen.page.locator("#panel-classify .verdict")).to_have_text(re.compile(r"^-?\d\.\d\d$"))


def test_names_are_marked_in_place_behind_emoji(seen: Visit) -> None:
    seen.open("entities")
    seen.page.get_by_label("Text", exact=True).fill("the 🇬🇧 boy walks with 🐈‍⬛ and london under my tree")
    expect(seen.page.locator("#panel-entities mark")).to_have_count(1)
    assert seen.page.locator("#panel-entities mark").evaluate("mark => mark.firstChild.data") == "london"
    expect(seen.page.locator("#panel-entities mark small")).to_have_text("location")


def test_a_dialogue_is_clicked_through_to_its_end(seen: Visit) -> None:
    seen.open("next")
    assert "Yes" in seen.text("#panel-next .verdict")
    for turn in range(5):
        seen.page.locator("#panel-next .line").nth(turn % 2).click()
        expect(seen.page.locator("#panel-next .said li")).to_have_count(turn + 2)
    expect(seen.page.locator("#panel-next .line")).to_have_count(0)
    expect(seen.page.locator("#panel-next .chance")).to_have_count(5)
    seen.page.get_by_role("button", name="Start again").click()
    expect(seen.page.locator("#panel-next .said li")).to_have_count(1)


def test_sentences_are_compared_each_with_each(seen: Visit) -> None:
    seen.open("compare")
    seen.page.get_by_label("Sentences", exact=True).fill(
        "A cat sleeps.\n\nA dog sleeps.\nShares fell on Monday."
    )
    expect(seen.page.locator("#panel-compare tbody tr")).to_have_count(3)
    expect(seen.page.locator("#panel-compare tbody td")).to_have_count(9)
    expect(seen.page.locator("#panel-compare .nearest")).to_contain_text(
        "“A cat sleeps.” and “A dog sleeps.”"
    )


def test_tokens_show_three_rows_and_each_draw_is_another(seen: Visit) -> None:
    seen.open("tokens")
    columns = seen.page.locator("#panel-tokens .token:not(.rows)")
    assert columns.nth(3).locator(".segment, .position").all_inner_texts() == ["A", "3"]
    assert columns.last.locator(".segment").inner_text() == "B"
    seeds = set()
    for _ in range(2):
        with seen.page.expect_response("**/look/tokens") as reply:
            seen.page.get_by_role("button", name="Draw another masking").click()
        seeds.add(reply.value.request.post_data_json["seed"])
        drawn = reply.value.json()["tokens"]
        looks = [f"token fate-{token['masking']}" if token["masking"] else "token" for token in drawn]
        expect(columns).to_have_class(looks)
        assert columns.locator(".piece").all_inner_texts() == [token["shown"] for token in drawn]
    assert len(seeds) == 2


def test_a_token_of_a_chosen_head_shows_what_it_reads(seen: Visit) -> None:
    seen.open("attention")
    seen.page.get_by_role("button", name="Layer 4, head 3").click()
    panel = seen.page.locator("#panel-attention")
    expect(panel.get_by_role("combobox", name="Layer")).to_have_value("3")
    expect(panel.get_by_role("combobox", name="Head")).to_have_value("2")
    first = panel.locator(".from").first
    first.focus()
    first.press("ArrowDown")
    expect(panel.locator(".from").nth(1)).to_be_focused()
    expect(panel.locator(".from").nth(1)).to_have_attribute("aria-pressed", "true")
    heats = panel.locator(".to").evaluate_all(
        "all => all.map(to => Number(to.style.getPropertyValue('--heat')) ** 2)"
    )
    assert sum(heats) == pytest.approx(1, abs=0.02)
    assert panel.locator("canvas").count() == 16
    inked = (
        "map => map.getContext('2d').getImageData(0, 0, map.width, map.height).data.some(value => value > 0)"
    )
    assert panel.locator("canvas").last.evaluate(inked)


def test_the_senses_of_a_word_lie_apart_on_the_map(seen: Visit) -> None:
    seen.open("senses")
    spots = seen.page.locator("#panel-senses .dot").evaluate_all(
        "all => all.map(dot => Number(dot.dataset.left))"
    )
    assert len(spots) == 6
    assert max(spots[:3]) < min(spots[3:]) or min(spots[:3]) > max(spots[3:])  # fruit, and the company
    assert seen.page.locator("#panel-senses .sense b").all_inner_texts() == ["apple"] * 3 + ["Apple"] * 3


# ---- what is there and what is missing


def test_only_what_the_models_can_do_is_shown_and_the_rest_named_with_its_command(
    browser: Browser, model: Path
) -> None:
    with served({"toy": model}) as where, browser.new_context(**DESK) as context:
        seen = visit(context, where)
        seen.open("models")
        assert [tab.get_attribute("id") for tab in seen.page.get_by_role("tab").all()] == [
            f"tab-{panel}" for panel in PANELS if panel not in ("answer", "classify", "entities")
        ]
        assert seen.text("#missing-answer pre").splitlines() == [
            "bertsmith finetune squad2 --data squad/ --out runs/squad2",
            "bertsmith serve --model qa=runs/squad2",
        ]
        assert seen.complaints == []


def test_a_server_with_a_key_asks_for_it_once(browser: Browser, model: Path) -> None:
    with (
        served({"toy": model}, api_key="sesame") as where,
        browser.new_context(**DESK) as context,
    ):
        seen = visit(context, where)
        seen.page.goto(where)
        seen.page.get_by_label("This server asks for a key").fill("sesame")
        seen.page.get_by_role("button", name="Use it").click()
        seen.settle("fill")


# ---- what goes wrong


def test_what_the_server_refuses_is_said_in_one_line(opened: Visit) -> None:
    opened.open("attention")
    opened.page.get_by_label("A", exact=True).fill("word " * 70)
    note = opened.page.locator("#panel-attention .note.wrong")
    expect(note).to_contain_text("64")
    assert "\n" not in note.inner_text()
    opened.page.get_by_label("A", exact=True).fill("A word.")
    expect(opened.page.locator("#panel-attention .note")).to_be_empty()


LONG_LINE = "[MASK] apple " * 4000
PASTED = {
    "fill": ("Text", LONG_LINE, "50000"),
    "answer": ("Passage", LONG_LINE, "50000"),
    "classify": ("Text", LONG_LINE, "50000"),
    "entities": ("Text", LONG_LINE, "50000"),
    "next": ("A", LONG_LINE, "50000"),
    "compare": ("Sentences", f"{LONG_LINE}\n{LONG_LINE}", "50000"),
    "tokens": ("A", "word " * 1000, "takes 512"),
    "attention": ("A", "word " * 200, "202 tokens"),
    "senses": ("Sentences with it, one a line", f"{LONG_LINE}\n{LONG_LINE}", "8000 times"),
}
"""By panel: the field, more than it takes, and a part of what the server says of it."""


@pytest.mark.parametrize("panel", PASTED)
def test_a_long_paste_is_kept_whole_and_the_server_says_why_it_is_too_much(opened: Visit, panel: str) -> None:
    label, text, reason = PASTED[panel]
    opened.open(panel)
    box = opened.page.locator(f"#panel-{panel}").get_by_label(label, exact=True)
    box.fill(text)
    assert box.input_value() == text
    note = opened.page.locator(f"#panel-{panel} .note.wrong")
    expect(note).to_contain_text(reason)
    assert "\n" not in note.inner_text()


def test_a_word_that_is_too_long_gets_a_hint_and_stays_whole(seen: Visit) -> None:
    seen.open("senses")
    box = seen.page.get_by_label("Word", exact=True)
    box.fill("x" * 100_000)
    expect(seen.page.locator("#panel-senses .note")).to_have_text("A word of at most 100 characters, please.")
    assert box.input_value() == "x" * 100_000


def test_a_hint_goes_at_once_when_there_is_something_to_read(seen: Visit) -> None:
    seen.open("answer")
    box, note = seen.page.get_by_label("Passage"), seen.page.locator("#panel-answer .note")
    box.fill("")
    expect(note).to_have_text("Write or paste a passage.")
    held: list[Route] = []
    seen.page.route("**/answer", lambda route: held.append(route))
    paste = """box => {
        box.value = "the boy walks under paris ".repeat(200);
        box.dispatchEvent(new Event("input", { bubbles: true }));
        return document.querySelector("#panel-answer .note").textContent;
    }"""
    with seen.page.expect_request("**/answer"):
        assert box.evaluate(paste) == "Reading …"
    expect(note).to_have_text("Reading …")
    expect(seen.page.locator("#panel-answer .result")).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    seen.settle("answer")
    expect(note).to_be_empty()


def test_a_busy_server_is_said_to_be_with_when_to_try_again(opened: Visit) -> None:
    opened.open("fill")
    error = {"error": {"message": "too much is waiting\nsecond line", "type": "busy", "request_id": "1"}}
    busy = {"status": 429, "headers": {"retry-after": "3"}, "content_type": "application/json"}
    opened.page.route("**/fill", lambda route: route.fulfill(body=json.dumps(error), **busy))
    opened.page.get_by_label("Text", exact=True).fill("A [MASK] day.")
    expect(opened.page.locator("#panel-fill .note.wrong")).to_have_text(
        "too much is waiting (try again in 3 s)"
    )
    opened.page.unroute_all()


def test_a_server_that_is_gone_is_said_to_be(opened: Visit) -> None:
    opened.open("fill")
    opened.page.route("**/fill", lambda route: route.abort())
    opened.page.get_by_label("Text", exact=True).fill("A [MASK] day.")
    expect(opened.page.locator("#panel-fill .note.wrong")).to_contain_text("the server does not answer")
    opened.page.unroute_all()


def test_a_reply_that_comes_late_does_not_replace_a_newer_one(seen: Visit) -> None:
    seen.open("fill")
    held: list[Route] = []
    seen.page.route("**/fill", lambda route: held.append(route))
    box = seen.page.get_by_label("Text", exact=True)
    box.fill("An old [MASK].")
    seen.page.wait_for_timeout(500)
    box.fill("A new [MASK].")
    seen.page.wait_for_timeout(500)
    old, new = held
    for route, token in ((new, "newer"), (old, "older")):
        mask = {"start": 6, "end": 12, "guesses": [{"token": token, "probability": 0.5}]}
        route.fulfill(json={"model": "default", "masks": [mask]})
    expect(seen.page.locator("#panel-fill .bar-name")).to_have_text(["newer"])


def test_markup_in_a_text_stays_text(seen: Visit) -> None:
    seen.open("next")
    seen.page.evaluate("location.hash = '#fill'")
    seen.settle("fill")
    seen.page.get_by_label("Text", exact=True).fill("<img src=x onerror=alert(1)> [MASK] <b>bold</b>")
    expect(seen.page.locator("#panel-fill .sentence")).to_contain_text("<b>bold</b>")
    assert seen.page.locator("#panel-fill .result img, #panel-fill .result b").count() == 0


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
    browser: Browser, address: str, tmp_path: Path, window: str
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
                seen.page.screenshot(path=tmp_path / f"{panel}-{theme}.png", full_page=True)
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
