"""GAP (Webster et al. 2018): texts with a pronoun that refers to one of two names, or to neither."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.tasks.example_types import BadLine
from bertsmith.tasks.tables import rows_of

MASCULINE, FEMININE = frozenset({"he", "him", "his"}), frozenset({"she", "her", "hers"})
COLUMNS = ("Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref")
TRUTHS = {"TRUE": True, "FALSE": False}


@dataclass(frozen=True, slots=True)
class GapExample:
    """A text with the spans of a pronoun and two names; a span ends after its last character."""

    text: str
    pronoun: tuple[int, int]
    names: tuple[tuple[int, int], tuple[int, int]]
    right: int | None
    """Index of the name that the pronoun refers to; None for neither."""
    gender: str

    def nearest(self) -> int:
        """Return the index of the name with the fewest characters to the pronoun; the first if equal."""
        start, end = self.pronoun
        gaps = [max(first - end, start - last) for first, last in self.names]
        return gaps.index(min(gaps))


def is_gap(path: Path) -> bool:
    """True if the file has the header of GAP."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline().rstrip("\r\n").split("\t")[1:10] == list(COLUMNS)


def read_gap(path: Path) -> list[GapExample]:
    """Read the examples of a GAP file."""
    found = []
    for row in rows_of(path):
        if isinstance(row, BadLine):
            raise UserError(row.what, where=row.where, remedy=row.remedy)
        found.append(_example({name: str(row.values.get(name, "")) for name in COLUMNS}, row.where))
    return found


def _example(cells: dict[str, str], where: str) -> GapExample:
    text, pronoun = cells["Text"], cells["Pronoun"].lower()
    spans = []
    for name in ("Pronoun", "A", "B"):
        offset = cells[f"{name}-offset"]
        start = int(offset) if offset.isdecimal() and len(offset) < 10 else -1
        if start < 0 or text[start : start + len(cells[name])] != cells[name]:
            what = f"the text does not contain {cells[name]!r} at {offset!r}"
            raise UserError(what, where=where, remedy="download the file again")
        spans.append((start, start + len(cells[name])))
    truths = [TRUTHS.get(cells[f"{name}-coref"].upper()) for name in "AB"]
    if pronoun not in MASCULINE | FEMININE or None in truths or all(truths):
        raise UserError("is not an example of GAP", where=where, remedy="download the file again")
    right = truths.index(True) if any(truths) else None
    gender = "masculine" if pronoun in MASCULINE else "feminine"
    return GapExample(text, spans[0], (spans[1], spans[2]), right, gender)
