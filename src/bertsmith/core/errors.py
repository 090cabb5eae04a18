"""The exception for errors that users can fix, and the remedies that each interface words differently."""

import re
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

MAX_SHOWN = 2000
"""Maximum characters of a message: a value quoted in it may have a megabyte."""
CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Terminal control characters, lone surrogates, and characters that change the writing direction."""


class Remedy(StrEnum):
    """Remedies for callers of the Python API that the command line words differently."""

    TRUNCATE = "shorten it, split it, or pass truncate=True"
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
    """Location: a file, a line, an option or a key; if given, `field` and `index` are not shown."""
    field: str = "text"
    """Name of the input of a call that `index` refers to."""
    index: int | None = None
    """Index of the wrong item in that input, counted from 0."""
    remedy: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.line())

    def line(self) -> str:
        """Return the whole message as one line: `where: what; remedy`."""
        where = self.where or (f"{self.field} {self.index}" if self.index is not None else "")
        location = f"{where}: " if where else ""
        advice = f"; {self.remedy}" if self.remedy else ""
        return shown(" ".join(f"{location}{self.what}{advice}".split()))


class Diverged(UserError):
    """A run whose loss, weights or gradients are no longer finite; running it again would diverge again."""


class DoesNotFit(UserError):
    """A run that requires more memory than is available."""


def shown(text: str) -> str:
    """Return a text that is safe to print: cut to `MAX_SHOWN`, with control characters escaped."""
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], cut)
