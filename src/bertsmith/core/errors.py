"""The one exception meant for people, and the remedies that each interface words in its own way."""

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum


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
        return " ".join(f"{location}{self.what}{advice}".split())
