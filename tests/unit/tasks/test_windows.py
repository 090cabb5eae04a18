"""Windows over long texts, and the one that shows each token best."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.tasks.text_encoding import best_context, cut_windows

sizes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6)


def plain_windows(length: int, room: int, step: int) -> list[tuple[int, int]]:
    """First token and length of each window, by the loop of run_squad.py."""
    windows, first = [], 0
    while True:
        shown = min(room, length - first)
        windows.append((first, shown))
        if first + shown == length:
            return windows
        first += min(shown, step)


def plain_best(windows: list[tuple[int, int]], token: int) -> int:
    """The window with the highest min(left, right) + 0.01 * length, the first on a tie."""
    scores = {}
    for number, (first, shown) in enumerate(windows):
        if first <= token < first + shown:
            scores[number] = 100 * min(token - first, first + shown - 1 - token) + shown
    return max(scores, key=lambda number: (scores[number], -number))


@given(sizes=sizes, step=st.integers(1, 25))
def test_windows_are_those_of_the_plain_loop(sizes, step: int) -> None:
    lengths, rooms = (np.array([size[side] for size in sizes], np.int64) for side in (0, 1))
    windows = cut_windows(lengths, rooms, step=step)
    expected = [
        (text, first, shown)
        for text, (length, room) in enumerate(sizes)
        for first, shown in plain_windows(length, room, step)
    ]
    assert list(zip(windows.texts_W, windows.firsts_W, windows.lengths_W, strict=True)) == expected


@given(sizes=sizes, step=st.integers(1, 25))
def test_each_token_has_most_context_in_exactly_one_window(sizes, step: int) -> None:
    lengths, rooms = (np.array([size[side] for size in sizes], np.int64) for side in (0, 1))
    best = iter(best_context(cut_windows(lengths, rooms, step=step), lengths).tolist())
    for length, room in sizes:
        windows = plain_windows(length, room, step)
        winners = [plain_best(windows, token) for token in range(length)]
        for number, (first, shown) in enumerate(windows):
            assert [next(best) for _ in range(shown)] == [
                winners[token] == number for token in range(first, first + shown)
            ]


def test_a_step_larger_than_the_room_loses_no_token() -> None:
    windows = cut_windows(np.array([25]), np.array([10]), step=128)
    assert windows.firsts_W.tolist() == [0, 10, 20]
    assert windows.lengths_W.tolist() == [10, 10, 5]
