"""The fixed questions for embedded models can be answered: every right answer stands in its passage."""

import tomllib
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "bench" / "embedded_questions.toml"
ASKED = tomllib.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("asked", ASKED["answers"], ids=lambda each: each["question"])
def test_right_answers_are_parts_of_the_passage(asked):
    passage = asked["passage"].strip()
    assert "\n" not in passage
    for right in asked["right"]:
        assert right in passage


def test_every_cloze_has_one_mask_and_right_words_in_small_letters():
    assert len(ASKED["masks"]) == 10
    for asked in (*ASKED["masks"], *ASKED["numbers"]):
        assert asked["text"].count("[MASK]") == 1
        assert asked["right"] == [word.lower() for word in asked["right"]]
    for asked in ASKED["negations"]:
        assert asked["text"].count("[MASK]") == asked["negated"].count("[MASK]") == 1
