"""Interruptible work: a generator that yields the remaining fraction, and at the end returns its result."""

from collections.abc import Generator
from typing import TypeVar, cast

Result = TypeVar("Result")
Steps = Generator[float, None, Result]
"""Work in steps; the caller may do other work between two of them."""


def finished(steps: Steps[Result]) -> Result:
    """Take all steps one after the other and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("Result", end.value)
