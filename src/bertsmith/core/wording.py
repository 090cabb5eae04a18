"""Numbers in messages."""


def counted(number: float, noun: str) -> str:
    """Format a number with the noun that it counts: 1 example, 2,040 examples, 0.5 epochs."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}s"
