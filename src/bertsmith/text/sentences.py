"""Sentence splitting, by sentencex: it knows the abbreviations of many languages and loses no character."""

import re

from sentencex import segment  # type: ignore[import-untyped]

from bertsmith.ground.errors import UserError


def split_sentences(text: str, *, language: str = "en") -> list[str]:
    """The sentences of a text whose lines are paragraphs; no sentence reaches over the end of a line."""
    lines = text.split("\n")
    return [sentence.lstrip() for line in lines for sentence in spaced_sentences(line, language=language)]


def spaced_sentences(line: str, *, language: str = "en") -> list[str]:
    """The sentences of a line, with one space before each that the line sets apart from the one before.

    To a byte-level vocabulary a word with a space before it is another piece than one without.
    """
    found: list[str] = []
    gap = False
    for part in segment(language, line):
        if sentence := part.strip():
            spaced = found and (gap or part[:1].isspace())
            found.append(f" {sentence}" if spaced else sentence)
        gap = part[-1:].isspace()
    return found


def check_language(language: str) -> str:
    """The language code, if it is written as one."""
    # sentencex takes any word, and splits as in English what it does not know.
    if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", language):
        remedy = "write the two or three letters of ISO 639: en, de, zh"
        raise UserError(f"{language!r} is no language code", where="--language", remedy=remedy)
    return language
