"""Where the texts of a request stand in it, by the names that whoever sent it knows."""

from collections.abc import Callable

Fields = Callable[[int], tuple[str, ...]]
"""Of the text with this number: the name of the whole, and where it is a pair those of its two parts."""


def one(name: str) -> Fields:
    """The only text of a request, which stands in this field."""
    return lambda _number: (name,)


def two(first: str, second: str) -> Fields:
    """The only pair of a request, which stands in these fields."""
    return lambda _number: (f"{first} with {second}", first, second)


def each_of(name: str) -> Fields:
    """Texts or pairs in a list."""

    def names(number: int) -> tuple[str, ...]:
        whole = f"{name}[{number}]"
        return whole, f"{whole}[0]", f"{whole}[1]"

    return names


TEXTS = each_of("texts")
"""As in most requests."""
