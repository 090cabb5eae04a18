"""What worker processes do in tests; they import it by name."""

import os
import time
from pathlib import Path

from bertsmith.core.errors import UserError
from tests.tokenizer_makers import PARAGRAPH

MANY = [f"{PARAGRAPH}\n\nword{number} word{number % 3}\n\n{PARAGRAPH[number:]}" for number in range(11)]
"""Batches of text, for those who count words."""


def double_slowly(number: int, tools: str) -> tuple[int, str]:
    time.sleep(0.02 * (number % 3 == 0))
    return 2 * number, tools


def fail_at_seven(number: int, _: str) -> int:
    if number == 7:
        raise UserError("is no good", where=f"item {number}", remedy="mend it")
    return number


def read_process(_: int, __: str) -> int:
    return os.getpid()


def split_at_blank_lines(batch: str) -> list[str]:
    return batch.split("\n\n")


def refuse(batch: str) -> list[str]:
    raise UserError("is no text", where=batch, remedy="give text")


def open_slowly(mark: Path) -> list[str]:
    time.sleep(0.5)
    mark.touch()
    return ["word"]
