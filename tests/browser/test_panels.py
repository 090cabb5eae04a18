"""What each panel of the playground does, in a real browser, against a real server."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import Visit, default_shape


def shares(page: Page, panel: str) -> list[tuple[str, float]]:
    """The names and widths of the bars of a panel."""
    script = """bars => bars.map(bar => [bar.querySelector(".bar-name").textContent,
        Number(bar.querySelector(".bar-track").style.getPropertyValue("--share"))])"""
    return [(name, share) for name, share in page.locator(f"#panel-{panel} .bar").evaluate_all(script)]


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
    other = seen.page.locator("#panel-answer .candidate").nth(2)
    other.focus()
    wanted = other.locator("span").first.inner_text()
    assert wanted != "paris"
    expect(seen.page.locator("#panel-answer mark.chosen")).to_have_text(wanted)


def test_options_are_weighed_against_each_other(seen: Visit) -> None:
    seen.open("choose")
    assert len(shares(seen.page, "choose")) == 3
    seen.page.get_by_label("Options, one per line").fill("the sun\n\nthe snow 🗻\n")
    expect(seen.page.locator("#panel-choose .bar")).to_have_count(2)
    found = dict(shares(seen.page, "choose"))
    assert sum(found.values()) == pytest.approx(1, abs=1e-3)
    best = max(found, key=lambda option: found[option])
    expect(seen.page.locator("#panel-choose .verdict")).to_contain_text(best)
    seen.page.get_by_label("Options, one per line").fill("the sun")
    expect(seen.page.locator("#panel-choose .note")).to_contain_text("two options or more")


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


def test_only_examples_that_the_model_takes_are_offered(seen: Visit) -> None:
    seen.open("classify")
    panel = seen.page.locator("#panel-classify")
    chooser, note = panel.get_by_role("combobox", name="Model"), panel.locator(".note")
    for model, offered, other in (("sst2", "Not bad", "A pair"), ("stsb", "A pair", "Not bad")):
        chooser.select_option(model)
        expect(panel.get_by_role("button", name=other)).to_be_hidden()
        panel.get_by_role("button", name=offered).click()
        seen.settle("classify")
        expect(note).to_be_empty()
    panel.get_by_label("Second text, for models of pairs").fill("")
    expect(note).to_have_text("Write a second text: this model reads pairs.")


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
    layers, heads = default_shape()
    assert panel.locator("canvas").count() == layers * heads
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
