"""The playground in front of a class: layers, heads, steps, reasons, two models, links and pictures."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import Visit, default_shape

LAYERS, HEADS = default_shape()


def numbers(page: Page, selector: str, name: str) -> list[float]:
    """A custom property of each of these elements."""
    script = f"all => all.map(each => Number(each.style.getPropertyValue('{name}')))"
    return page.locator(selector).evaluate_all(script)


def move(page: Page, panel: str, layer: int) -> None:
    """Set the slider over the layers."""
    page.locator(f"#panel-{panel} input[type=range]").fill(str(layer))


# ---- layers


def test_a_word_is_one_point_in_layer_0_and_lies_apart_in_the_last(seen: Visit) -> None:
    seen.open("senses")
    seen.page.get_by_role("button", name="bank", exact=True).click()
    expect(seen.page.locator("#panel-senses .sense b").first).to_have_text("bank")
    spread = """() => {
        const dots = [...document.querySelectorAll("#panel-senses .dot")];
        const lefts = dots.map(dot => Number(dot.dataset.left));
        return Math.max(...lefts) - Math.min(...lefts);
    }"""
    shares = seen.page.locator("#panel-senses .sense .bar-share")
    last = seen.page.evaluate(spread)
    caption = seen.page.locator("#panel-senses .caption")
    expect(caption).to_have_text("")
    move(seen.page, "senses", 0)
    expect(shares).to_have_text(["1.00"] * 6)
    expect(caption).to_have_text("All in one place, drawn side by side")
    assert seen.page.evaluate(spread) < last / 2  # dots are pushed apart just so far that each can be read
    move(seen.page, "senses", LAYERS)
    plain = float(shares.nth(3).inner_text())
    seen.page.get_by_label("Less their mean").check()
    expect(shares.nth(3)).not_to_have_text(f"{plain:.2f}")
    assert float(shares.nth(3).inner_text()) < plain


def test_sentences_are_compared_layer_by_layer(seen: Visit) -> None:
    seen.open("compare")
    seen.page.get_by_label("Layer by layer").check()
    slider = seen.page.locator("#panel-compare input[type=range]")
    expect(slider).to_have_attribute("max", str(LAYERS))
    cell = seen.page.locator("#panel-compare tbody td").nth(1)
    last = cell.inner_text()
    move(seen.page, "compare", 0)
    expect(cell).not_to_have_text(last)
    expect(seen.page.locator("#panel-compare output")).to_have_text("0, the words alone")


def test_guesses_are_followed_from_layer_to_layer(seen: Visit) -> None:
    seen.open("fill")
    seen.page.get_by_label("Layer by layer").check()
    rows = seen.page.locator("#panel-fill .by-layer tbody tr")
    expect(rows).to_have_count(LAYERS + 1)
    expect(rows.first).to_contain_text("capital")
    traced = numbers(seen.page, "#panel-fill .traced .bar-track", "--share")
    assert traced[0] > 0.5 > traced[-1]
    best = numbers(seen.page, "#panel-fill .bar-track", "--share")[0]
    assert traced[0] == pytest.approx(best, abs=1e-4)


# ---- heads


def test_attention_opens_on_a_moment_worth_seeing_and_names_kinds_of_heads(seen: Visit) -> None:
    with seen.page.expect_response("**/look/heads") as reply:
        seen.open("attention")
    heads = reply.value.json()
    panel = seen.page.locator("#panel-attention")
    expect(panel.locator(".from[aria-pressed=true]")).to_have_text("it")
    read = heads["tokens"][heads["moment"]["target"]]
    assert read in ("animal", "street")
    expect(panel.locator("[role=status]").last).to_contain_text(f"“it” reads {read}")
    assert panel.locator(".axis-layer").all_inner_texts() == ["layer 1", *map(str, range(2, LAYERS + 1))]
    assert panel.locator(".axis-head").all_inner_texts() == ["head 1", *map(str, range(2, HEADS + 1))]
    layer, head = next(
        (layer, head)
        for layer, of_layer in enumerate(heads["kinds"], 1)
        for head, seen_as in enumerate(of_layer, 1)
        if seen_as["kind"] == "previous"
    )
    panel.get_by_role("button", name=f"Layer {layer}, head {head}", exact=False).first.click()
    expect(panel.locator(".kind-of-head")).to_contain_text("reads the token before")


def test_special_tokens_can_be_hidden_and_heads_averaged(seen: Visit) -> None:
    seen.open("attention")
    panel = seen.page.locator("#panel-attention")
    panel.get_by_label("Hide special tokens").check()
    expect(panel.locator(".from").first).to_be_hidden()
    expect(panel.locator(".to").last).to_be_hidden()
    with seen.page.expect_request("**/look/head") as asked:
        panel.get_by_role("combobox", name="Head").select_option("mean")
    assert asked.value.post_data_json["head"] is None
    expect(panel.locator(".map[aria-pressed=true]")).to_have_count(HEADS)


def test_a_head_is_shown_step_by_step_with_numbers_that_add_up(seen: Visit) -> None:
    seen.open("attention")
    with seen.page.expect_response("**/look/head-steps") as reply:
        seen.page.get_by_label("Step by step").check()
    steps = reply.value.json()
    table = seen.page.locator("#panel-attention .steps")
    expect(table.locator("tbody tr")).to_have_count(6)
    expect(table.locator("tbody th").first).to_have_text(re.compile("animal|street"))
    assert sum(steps["weights"]) == pytest.approx(1, abs=0.01)
    product = sum(one * other for one, other in zip(steps["query"], steps["keys"][0], strict=True))
    assert float(table.locator(".figure").first.inner_text()) == pytest.approx(product, abs=0.05)
    assert seen.page.locator("#panel-attention .strip").count() == 14


def test_512_tokens_are_shown_and_answer_a_press_within_a_second(seen: Visit) -> None:
    seen.open("attention")
    words = "The old ship left the harbour because it was late . " * 47
    seen.page.get_by_label("A", exact=True).fill(" ".join(words.split()[:510]))
    from_tokens = seen.page.locator("#panel-attention .from")
    expect(from_tokens).to_have_count(512, timeout=15_000)
    seen.settle("attention")
    drawn = """() => {
        const began = performance.now();
        document.querySelectorAll("#panel-attention .from")[300].click();
        document.querySelector("#panel-attention").getBoundingClientRect();
        return [performance.now() - began, document.querySelectorAll("#panel-attention .lines line").length];
    }"""
    _, lines = seen.page.evaluate(drawn)
    expect(from_tokens.nth(300)).to_have_attribute("aria-pressed", "true")
    assert 0 < lines < 2100  # not one for each of 262,144 pairs: that is what makes it quick


# ---- vectors and reasons


@pytest.mark.parametrize(
    ("model", "added"), [("default", ["token"]), ("sst2", ["token", "position", "segment"])]
)
def test_a_token_is_the_sum_of_its_vectors(seen: Visit, model: str, added: list[str]) -> None:
    seen.open("tokens")
    seen.page.locator("#panel-tokens").get_by_label("Model").select_option(model)
    seen.settle("tokens")
    with seen.page.expect_response("**/look/embedding") as reply:
        seen.page.locator("#panel-tokens .piece").nth(2).click()
    assert reply.value.json()["model"] == model
    parts = {part["name"]: part["values"] for part in reply.value.json()["parts"]}
    assert list(parts) == [*added, "sum", "normalised"]
    for total, *each in zip(parts["sum"], *(parts[name] for name in added), strict=True):
        assert total == pytest.approx(sum(each), abs=2e-4)
    expect(seen.page.locator("#panel-tokens .strip")).to_have_count(len(parts))
    strips = seen.page.locator("#panel-tokens .strips")
    expect(strips.locator("h3")).to_contain_text("dog")
    rows = [f"+ {name}" if name in added else name for name in ("segment", "position")]
    assert seen.page.locator("#panel-tokens .rows span").all_inner_texts() == ["", "token", *rows]
    missing = "This model adds no vector of segment or position"
    expect(strips).to_contain_text(re.compile(missing if added == ["token"] else "^(?!.*adds no vector)"))


def test_why_shades_the_words_that_decided(seen: Visit) -> None:
    seen.open("classify")
    seen.page.get_by_label("Text", exact=True).fill("the boy sits under the hot sun")
    expect(seen.page.locator("#panel-classify .verdict")).to_have_text("positive")
    with seen.page.expect_response("**/look/words") as reply:
        seen.page.get_by_role("button", name="Why?").click()
    words = reply.value.json()["words"]
    assert len(words) == 7
    expect(seen.page.locator("#panel-classify .weighed")).to_have_count(7)
    strongest = max(words, key=lambda word: abs(word["change"]))
    shades = numbers(seen.page, "#panel-classify .weighed", "--weight")
    assert shades.index(max(shades)) == words.index(strongest)


def test_why_tells_what_an_answer_rests_on(seen: Visit) -> None:
    seen.open("answer")
    seen.page.get_by_label("Question").fill("where is the cat?")
    seen.page.get_by_label("Passage").fill("the boy walks under paris with my dog")
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_text("paris")
    seen.page.get_by_role("button", name="Why?").click()
    expect(seen.page.locator("#panel-answer .why-section .weighed")).to_have_count(13)  # "?" is one
    expect(seen.page.locator("#panel-answer .why-section .weighed", has_text="paris")).to_have_class(
        re.compile(r"\bfor\b")
    )


# ---- two models, one sentence, links


def test_two_models_answer_side_by_side(seen: Visit) -> None:
    seen.open("compare")
    panel = seen.page.locator("#panel-compare")
    panel.get_by_label("Compare with").select_option("sst2")
    expect(panel.locator(".beside > section > h3")).to_have_text(["default", "sst2"])
    expect(panel.locator("table.heat")).to_have_count(2)


def test_what_the_second_model_cannot_do_is_said_in_its_place(seen: Visit) -> None:
    seen.open("classify")
    panel = seen.page.locator("#panel-classify")
    panel.get_by_label("Compare with").select_option("stsb")
    expect(panel.locator(".of-model .note.wrong")).to_contain_text("pairs")
    expect(panel.locator(".verdict")).to_have_count(1)
    seen.complaints.clear()  # the browser itself notes every reply with a status of 422


def test_a_sentence_is_carried_from_panel_to_panel(seen: Visit) -> None:
    seen.open("tokens")
    seen.page.locator("#panel-tokens").get_by_label("A", exact=True).fill("The small dog barked.")
    for panel, label in (("attention", "A"), ("next", "A"), ("entities", "Text"), ("answer", "Passage")):
        seen.page.locator(f"#tab-{panel}").click()
        box = seen.page.locator(f"#panel-{panel}").get_by_label(label, exact=True)
        expect(box).to_have_value("The small dog barked.")
    seen.page.locator("#tab-compare").click()
    expect(seen.page.get_by_label("Sentences", exact=True)).to_have_value(
        re.compile(r"^The small dog barked\.\nA dog slept")
    )


def test_a_link_opens_the_same_panel_with_the_same_text_head_and_token(seen: Visit) -> None:
    seen.open("attention")
    seen.page.get_by_label("A", exact=True).fill("She sold the boat & kept the sail?")
    expect(seen.page.locator("#panel-attention .from").nth(4)).to_have_text("boat")
    seen.page.get_by_role("button", name="Layer 1, head 2").click()
    seen.page.locator("#panel-attention .from").nth(4).click()
    link = seen.page.url
    seen.open("fill")
    seen.page.goto(link.replace("/?", "/?again="))
    expect(seen.page.get_by_label("A", exact=True)).to_have_value("She sold the boat & kept the sail?")
    expect(seen.page.locator("#panel-attention .from[aria-pressed=true]")).to_have_text("boat")
    expect(seen.page.get_by_role("button", name="Layer 1, head 2")).to_have_attribute("aria-pressed", "true")


def test_a_link_opens_why_and_another_text_closes_it(seen: Visit) -> None:
    seen.open("classify")
    panel = seen.page.locator("#panel-classify")
    panel.get_by_role("button", name="Why?").click()
    shaded = panel.locator(".why-section .weighed")
    expect(shaded.first).to_be_visible()
    words = shaded.all_inner_texts()
    seen.page.goto(seen.page.url.replace("/?", "/?again="))
    expect(shaded.first).to_be_visible()
    assert shaded.all_inner_texts() == words
    panel.get_by_label("Text", exact=True).fill("A film without a soul.")
    expect(panel.get_by_role("button", name="Why?")).to_be_visible()
    assert "why=" not in seen.page.url


def test_an_example_says_what_to_notice_until_the_text_is_changed(seen: Visit) -> None:
    seen.open("next")
    notice = seen.page.locator("#panel-next .notice")
    expect(notice).to_be_visible()
    seen.page.get_by_role("button", name="At sea").click()
    expect(notice).to_contain_text("order")
    seen.page.locator("#panel-next").get_by_label("B", exact=True).fill("Something else.")
    expect(notice).to_be_hidden()


def test_what_to_notice_stays_while_options_change_and_comes_with_a_link(seen: Visit) -> None:
    seen.open("fill")
    seen.page.get_by_label("Layer by layer").check()  # as the example asks
    expect(seen.page.locator("#panel-fill .by-layer")).to_be_visible()
    notice = seen.page.locator("#panel-fill .notice")
    expect(notice).to_contain_text("which layer")
    link = seen.page.url
    seen.open("models")
    seen.page.goto(link.replace("/?", "/?again="))
    expect(notice).to_contain_text("which layer")


def test_a_link_shows_the_same_masking(seen: Visit) -> None:
    seen.open("tokens")
    with seen.page.expect_response("**/look/tokens") as drawn:
        seen.page.get_by_role("button", name="Draw another masking").click()
    masking = drawn.value.json()
    with seen.page.expect_response("**/look/tokens") as again:
        seen.page.goto(seen.page.url.replace("/?", "/?again="))
    assert again.value.json() == masking


# ---- pictures


@pytest.mark.parametrize(
    ("panel", "name"), [("attention", "attention"), ("senses", "senses-apple"), ("compare", "similarity")]
)
def test_pictures_are_saved_as_svg_and_png(seen: Visit, tmp_path: Path, panel: str, name: str) -> None:
    seen.open(panel)
    for kind in ("SVG", "PNG"):
        with seen.page.expect_download() as kept:
            seen.page.locator(f"#panel-{panel}").get_by_role("button", name=f"picture as {kind}").click()
        assert kept.value.suggested_filename == f"{name}.{kind.lower()}"
        kept.value.save_as(tmp_path / kind)
    svg = (tmp_path / "SVG").read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "var(" not in svg
    assert "class=" not in svg
    assert (tmp_path / "PNG").read_bytes().startswith(b"\x89PNG")
