"""The one exception meant for people, and the remedies that each interface words in its own way."""

import re
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

MAX_SHOWN = 2000
"""Characters of a message: what is quoted in it may be a megabyte."""
CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Escapes that a terminal would obey, halves of characters, and what turns the direction of writing."""


class Remedy(StrEnum):
    """What a caller of the Python API is told to do, where the command line has other words for it."""

    TRUNCATE = "shorten it, split it, or pass truncate=True"
    PASS_PAIR = "pass a tuple of two texts"
    PASS_TEXT = "pass one str"


@dataclass(eq=False, repr=False)
class UserError(Exception):
    """Something the user can fix: what is wrong, where it stands, and what to do about it.

    The parts are data: `dataclasses.replace` gives the same error with another `where`, `index` or `remedy`.
    Only the edge (the command line's `main`, the server's error response) makes a sentence of them.
    """

    what: str
    _: KW_ONLY
    where: str = ""
    """A file, a line, an option, a key; it goes before `field` and `index` in the sentence."""
    field: str = "text"
    """Which part of a call's inputs is meant, where `index` is given."""
    index: int | None = None
    """Which of a call's inputs is meant, counted from 0."""
    remedy: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.line())

    def line(self) -> str:
        """The whole message as one line: `where: what; remedy`."""
        where = self.where or (f"{self.field} {self.index}" if self.index is not None else "")
        location = f"{where}: " if where else ""
        advice = f"; {self.remedy}" if self.remedy else ""
        return shown(" ".join(f"{location}{self.what}{advice}".split()))


def shown(text: str) -> str:
    """A text from a file as a terminal may get it: of readable length, its control characters spelled out."""
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], cut)
