"""Pairs of texts, where nothing else will do."""

from collections.abc import Iterable

from bertsmith.ground.errors import UserError
from bertsmith.inference.engine import listed


def listed_pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """All pairs; what is none is refused by its number."""
    several = listed(pairs)
    for number, pair in enumerate(several):
        if not isinstance(pair, tuple) or len(pair) != 2:
            kind = type(pair).__name__
            what = (
                "is one text, not a pair"
                if isinstance(pair, str)
                else f"is {kind}, neither a text nor a pair"
            )
            raise UserError(what, where=f"text {number}", remedy="a pair is a tuple of two texts")
    return several
