"""Lone surrogates are found where they stand."""

import pytest

from bertsmith.core.files import lone_surrogate


@pytest.mark.parametrize("text", ["", "plain", "grün", "𝒳 and 😀", "\ufffd"])
def test_whole_characters_are_nothing_to_report(text: str) -> None:
    assert lone_surrogate(text) is None


def test_the_first_lone_surrogate_is_named_with_its_offset() -> None:
    assert lone_surrogate("ab\ud83d \udc00") == r"character 2 is a lone surrogate ('\ud83d')"
