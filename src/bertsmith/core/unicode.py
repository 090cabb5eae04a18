"""Lone surrogates: halves of a pair that JSON and Python strings can spell, and no UTF-8 file can hold."""


def lone_surrogate(text: str) -> str | None:
    """What is wrong with a text that holds a lone surrogate, and at which offset; None if it holds none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is a lone surrogate ({text[error.start]!a})"
    return None
