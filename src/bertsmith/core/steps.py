"""Work that can be interrupted: a generator that gives the fraction which remains, and in the end returns."""

from collections.abc import Generator
from typing import TypeVar, cast

Result = TypeVar("Result")
Steps = Generator[float, None, Result]
"""What is computed a step at a time; between two of them somebody else may have a turn."""


def finished(steps: Steps[Result]) -> Result:
    """What comes of it, all steps taken one after the other."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("Result", end.value)
