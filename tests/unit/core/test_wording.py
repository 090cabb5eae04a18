"""Numbers in sentences."""

import pytest

from bertsmith.core.wording import counted


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 steps"),
        (1, "1 step"),
        (2040, "2,040 steps"),
        (1.0, "1 step"),
        (0.5, "0.5 steps"),
        (3.0, "3 steps"),
    ],
)
def test_one_is_singular_and_all_else_plural(number, text):
    assert counted(number, "step") == text
