"""Sentence splitting: where sentences end, and that nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.core.errors import UserError
from bertsmith.corpus.documents import check_language, has_rules, spaced_sentences

snippets = st.sampled_from(
    ["Dr. ", "e.g. ", "iron", " ", "  ", ".", "!", "?", "。", '"', ")", "\t", "…", "A"]
)
any_character = st.characters(exclude_categories=["Cs"], exclude_characters="\n")
any_line = st.lists(snippets | any_character, max_size=20).map("".join)


def without_spaces(text: str) -> str:
    return "".join(text.split())


def split_sentences(line: str, *, language: str = "en") -> list[str]:
    return [sentence.lstrip() for sentence in spaced_sentences(line, language=language)]


def test_an_abbreviation_ends_no_sentence() -> None:
    assert split_sentences("Mr. Smith forges iron. Dr. Jones, e.g., does not!") == [
        "Mr. Smith forges iron.",
        "Dr. Jones, e.g., does not!",
    ]


def test_chinese_sentences_end_without_a_space() -> None:
    assert split_sentences("铁匠打铁。火花飞溅。", language="zh") == ["铁匠打铁。", "火花飞溅。"]


def test_the_language_decides_about_abbreviations() -> None:
    text = "Wir schmieden bzw. gießen. Ja."
    assert split_sentences(text, language="de") == ["Wir schmieden bzw. gießen.", "Ja."]
    assert split_sentences(text.replace("gießen", "Gießen"), language="pt")[0] == "Wir schmieden bzw."


def test_a_space_stands_before_each_sentence_that_was_set_apart_in_its_line() -> None:
    assert spaced_sentences("Hot!  Not.\tYes.") == ["Hot!", " Not.", " Yes."]
    assert spaced_sentences("热。不热。") == ["热。", "不热。"]


def test_white_space_alone_is_no_sentence() -> None:
    assert split_sentences("  \t") == []


@given(any_line)
def test_sentences_hold_every_character_but_white_space_in_order(line: str) -> None:
    assert without_spaces("".join(split_sentences(line))) == without_spaces(line)
    assert all(sentence == sentence.strip() != "" for sentence in split_sentences(line))


def test_a_language_whose_rules_are_borrowed_is_distinguished_from_one_with_its_own() -> None:
    assert has_rules("en") and has_rules("uk")
    assert not has_rules("xx") and not has_rules("de-at")
    text = "Wir schmieden bzw. Gießen. Ja."
    assert split_sentences(text, language="xx") == split_sentences(text, language="en")
    assert split_sentences(text, language="de-at") == split_sentences(text, language="de")


def test_a_language_is_a_code() -> None:
    assert check_language("zh-hans") == "zh-hans"
    with pytest.raises(UserError, match="'English' is not a language code; write the two or three letters"):
        check_language("English")
