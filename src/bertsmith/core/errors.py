"""The exception for errors that users can fix, and the settings in its text that each interface spells.

A message mentions a setting by its key: `out`, `run.epochs=3`. The command line (`--out`, `--epochs 3`), the
Python functions (out=, epochs=3) and recipe files (run.epochs = 3) give a `Spelling` for it.
"""

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Self

MAX_SHOWN = 2000
"""Maximum characters of a message: a value quoted in it may have a megabyte."""
CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Terminal control characters, lone surrogates, and characters that change the writing direction."""
MENTION = re.compile(r"`([a-z_]\w*(?:\.\w+)*)(?:=([^`]*))?`")
"""A setting in a message: its key, and its value if one is proposed."""
Spelling = Callable[[str, str], str | None]
"""Function of a key and its value ("" for none); returns None for a key that the interface does not have."""


TRUNCATE = "shorten it, split it, or pass `truncate=True`"


class Remedy(StrEnum):
    """Remedies for callers of the Python API that the command line words differently."""

    PASS_PAIR = "pass a tuple of two texts"
    PASS_TEXT = "pass one str"


@dataclass(eq=False, repr=False)
class UserError(Exception):
    """An error that the user can fix: its cause, its location and the remedy.

    The parts are data: `dataclasses.replace` returns the same error with another `where`, `index` or
    `remedy`. Only the command line's `main` and the server's error response make a sentence of them.
    """

    what: str
    _: KW_ONLY
    where: str = ""
    """Location: a file, a line or several settings; if given, `key`, `field` and `index` are not shown."""
    key: str = ""
    """Setting at fault: a parameter such as out, or the dotted key of a recipe."""
    field: str = "text"
    """Name of the input of a call that `index` refers to."""
    index: int | None = None
    """Index of the wrong item in that input, counted from 0."""
    remedy: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.line())

    def line(self) -> str:
        """Return the whole message as one line: `where: what; remedy`."""
        where = MENTION.sub(lambda found: found[0].strip("`"), self.where) or self.key
        if not where and self.index is not None:
            where = f"{self.field} {self.index}"
        location = f"{where}: " if where else ""
        advice = f"; {self.remedy}" if self.remedy else ""
        return shown(" ".join(f"{location}{self.what}{advice}".split()))

    def spelled(self, spelling: Spelling) -> Self:
        """Return the same error with its settings as an interface spells them."""
        where = spelled(self.where or (f"`{self.key}`" if self.key else ""), spelling, location=True)
        what, remedy = spelled(self.what, spelling), spelled(self.remedy, spelling)
        return replace(self, what=what, where=where, remedy=remedy)


class Diverged(UserError):
    """A run whose loss, weights or gradients are no longer finite; running it again would diverge again."""


class DoesNotFit(UserError):
    """A run that requires more memory than is available."""


def spelled(text: str, spelling: Spelling, *, location: bool = False) -> str:
    """Return a message with the settings that it mentions as an interface spells them.

    In a location, which a colon follows, an argument has no equals sign. Elsewhere a clause behind a
    semicolon is left out if the interface does not have an argument that it mentions.
    """

    def spell(found: re.Match[str]) -> str:
        chosen = spelling(found[1], found[2] or "")
        if chosen is None:
            return found[0].strip("`") if location else found[0]
        return chosen.removesuffix("=") if location else chosen

    def applies(clause: str) -> bool:
        return all("." in key or spelling(key, value) is not None for key, value in MENTION.findall(clause))

    if not location and "\n" not in text:  # a recipe with comments keeps every word
        first, *more = text.split("; ")
        text = "; ".join([first, *filter(applies, more)])
    return MENTION.sub(spell, text)


def in_file(key: str, value: str) -> str | None:
    """Spell a setting as a recipe file has it."""
    return f"{key} = {value}" if value else key


def shown(text: str) -> str:
    """Return a text that is safe to print: cut to `MAX_SHOWN`, with control characters escaped."""
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], cut)
