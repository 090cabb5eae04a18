"""What worker processes do in tests; they import it by name."""

import os
import time

from bertsmith.core.errors import UserError


def double_slowly(number: int, tools: str) -> tuple[int, str]:
    time.sleep(0.02 * (number % 3 == 0))
    return 2 * number, tools


def fail_at_seven(number: int, _: str) -> int:
    if number == 7:
        raise UserError("is no good", where=f"item {number}", remedy="mend it")
    return number


def read_process(_: int, __: str) -> int:
    return os.getpid()
