"""The playground where something is missing, too much, late or gone."""

import json
import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.browser.playground import DESK, PANELS, PATIENCE, Visit, served, visit

# ---- what is there and what is missing


def test_only_what_the_models_can_do_is_shown_and_the_rest_named_with_its_command(
    browser: Browser, model: Path
) -> None:
    with served({"toy": model}) as where, browser.new_context(**DESK) as context:
        seen = visit(context, where)
        seen.open("models")
        assert [tab.get_attribute("id") for tab in seen.page.get_by_role("tab").all()] == [
            f"tab-{panel}" for panel in PANELS if panel not in ("answer", "classify", "choose", "entities")
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
        seen.open("tokens")
        assert seen.page.get_by_label("This server asks for a key").count() == 0


def test_no_key_is_no_mistake_and_a_wrong_one_is_said_to_be_wrong(browser: Browser, model: Path) -> None:
    with (
        served({"toy": model}, api_key="sesame") as where,
        browser.new_context(**DESK) as context,
    ):
        seen = visit(context, where)
        seen.page.goto(where)
        box, opening = seen.page.get_by_label("This server asks for a key"), seen.page.locator("#opening")
        expect(box).to_be_visible()
        expect(opening).not_to_have_class(re.compile("wrong"))
        expect(opening).not_to_contain_text("Bearer")
        box.fill("simsim")
        seen.page.get_by_role("button", name="Use it").click()
        expect(opening).to_have_text("This key is not the right one: try another.")
        expect(opening).to_have_class(re.compile("wrong"))


# ---- what goes wrong


def test_what_the_server_rejects_is_said_in_one_line(opened: Visit) -> None:
    opened.open("attention")
    opened.page.get_by_label("A", exact=True).fill("word " * 600)
    note = opened.page.locator("#panel-attention .note.wrong")
    expect(note).to_contain_text("512")
    assert "\n" not in note.inner_text()
    opened.page.get_by_label("A", exact=True).fill("A word.")
    expect(opened.page.locator("#panel-attention .note")).to_be_empty()


def test_after_a_refusal_no_older_result_is_shown_or_read_out(opened: Visit) -> None:
    opened.open("fill")
    spoken = opened.page.locator("#panel-fill [aria-live=polite]")
    box, note = opened.page.get_by_label("Text", exact=True), opened.page.locator("#panel-fill .note")
    expect(spoken).to_contain_text("Blank 1")
    box.fill("word " * 700 + "[MASK]")
    expect(note).to_contain_text(re.compile(r"^the text has 703 tokens, but the model default takes 512"))
    expect(spoken).to_be_empty()
    expect(opened.page.locator("#panel-fill .result")).to_be_empty()


def test_where_there_is_nothing_to_ask_no_older_result_is_read_out(seen: Visit) -> None:
    seen.open("fill")
    spoken = seen.page.locator("#panel-fill [aria-live=polite]")
    expect(spoken).to_contain_text("Blank 1")
    seen.page.get_by_label("Text", exact=True).fill("No blank.")
    expect(spoken).to_be_empty()


@pytest.mark.parametrize(
    ("panel", "label", "line", "said"),
    [
        ("next", "B", "second: has 9 tokens", "B has 9 tokens"),
        ("next", "B", "first with second: has 9 tokens", "A with B has 9 tokens"),
        ("answer", "Question", "question: is empty", "the question is empty"),
        ("entities", "Text", "texts[0]: has 9 tokens", "the text has 9 tokens"),
        ("compare", "Sentences", "texts[1]: has 9 tokens", "text 2 has 9 tokens"),
        ("classify", "Text", "texts[0][1]: is empty", "the second text is empty"),
        ("classify", "Text", "texts: are many", "texts: are many"),
    ],
)
def test_a_field_of_a_request_is_called_as_on_the_page(
    opened: Visit, panel: str, label: str, line: str, said: str
) -> None:
    opened.open(panel)
    error = {"error": {"message": line, "type": "invalid_request", "request_id": "1"}}
    opened.page.route(
        re.compile(r"/(next|answer|tag|compare|classify)$"),
        lambda route: route.fulfill(
            status=422, body=json.dumps(error), headers={"content-type": "application/json"}
        ),
    )
    opened.page.locator(f"#panel-{panel}").get_by_label(label, exact=True).fill("One.\nTwo.")
    expect(opened.page.locator(f"#panel-{panel} .note.wrong")).to_have_text(said)
    opened.page.unroute_all()


LONG_LINE = "[MASK] apple " * 4000
PASTED = {
    "fill": ("Text", LONG_LINE, "50000"),
    "answer": ("Passage", LONG_LINE, "50000"),
    "classify": ("Text", LONG_LINE, "50000"),
    "entities": ("Text", LONG_LINE, "50000"),
    "next": ("A", LONG_LINE, "50000"),
    "compare": ("Sentences", f"{LONG_LINE}\n{LONG_LINE}", "50000"),
    "tokens": ("A", "word " * 1000, "takes 512"),
    "attention": ("A", "word " * 600, "602 tokens"),
    "senses": ("Sentences with it, one per line", f"{LONG_LINE}\n{LONG_LINE}", "65536"),
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
    for count, text in enumerate(("An old [MASK].", "A new [MASK]."), start=1):
        box.fill(text)
        deadline = time.monotonic() + PATIENCE / 1000
        while len(held) < count and time.monotonic() < deadline:
            seen.page.wait_for_timeout(20)
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
