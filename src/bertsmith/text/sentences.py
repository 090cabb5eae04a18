"""Sentence splitting, by sentencex: it knows the abbreviations of many languages and loses no character."""

import re

from sentencex import segment  # type: ignore[import-untyped]

from bertsmith.core.errors import UserError

# Those for which sentencex 1.0 has rules of their own (a file each in its src/languages). For others it takes
# the rules of a related language, and where it knows of none, those of English.
_WITH_RULES = re.compile(
    "am|ar|bg|bn|ca|da|de|el|en|es|fi|fr|gu|hi|hy|it|ja|kk|kn|ml|mr|my|nl|pa|pl|pt|ru|sk|ta|te|uk"
)


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
    # sentencex takes any word for a language.
    if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", language):
        remedy = "write the two or three letters of ISO 639: en, de, zh"
        raise UserError(f"{language!r} is no language code", where="--language", remedy=remedy)
    return language


def has_rules(language: str) -> bool:
    """Whether sentences of this language are split by rules of its own."""
    return _WITH_RULES.fullmatch(language) is not None
