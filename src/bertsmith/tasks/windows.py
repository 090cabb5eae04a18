"""Texts that are too long, shown in overlapping windows, and the window that shows each token best.

Shapes: U texts, W windows, X tokens of all windows one after the other.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.examples.pairs import ranges

Numbers = NDArray[np.int64]

LENGTH_SHARE = 100
"""run_squad.py scores a token's context as min(left, right) + 0.01 * length; here in whole hundredths."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of texts, in the order of the texts and from their beginnings to their ends."""

    texts_W: Numbers
    firsts_W: Numbers
    """The first token of each window, counted from the beginning of its text."""
    lengths_W: Numbers


def cut_windows(lengths_U: Numbers, rooms_U: Numbers, *, step: int) -> Windows:
    """Windows of at most `rooms_U` tokens that begin every `step` tokens until the end; at least one."""
    steps_U = np.minimum(step, rooms_U)  # a larger step would jump over tokens
    counts_U = 1 + np.maximum(0, -(-(lengths_U - rooms_U) // steps_U))
    texts_W = np.repeat(np.arange(len(lengths_U)), counts_U)
    firsts_W = ranges(np.zeros_like(counts_U), counts_U) * steps_U[texts_W]
    return Windows(texts_W, firsts_W, np.minimum(rooms_U[texts_W], lengths_U[texts_W] - firsts_W))


def best_context(windows: Windows, lengths_U: Numbers) -> NDArray[np.bool_]:
    """For each token of each window whether it has its most context there; on a tie the first has it."""
    lengths_X = np.repeat(windows.lengths_W, windows.lengths_W)
    left_X = ranges(np.zeros_like(windows.lengths_W), windows.lengths_W)
    scores_X = LENGTH_SHARE * np.minimum(left_X, lengths_X - 1 - left_X) + lengths_X
    begins_U = np.cumsum(lengths_U) - lengths_U
    tokens_X = ranges(begins_U[windows.texts_W] + windows.firsts_W, windows.lengths_W)
    most = np.zeros(int(lengths_U.sum()), np.int64)
    np.maximum.at(most, tokens_X, scores_X)
    rivals = np.flatnonzero(scores_X == most[tokens_X])
    winner = np.full(len(most), len(tokens_X))
    np.minimum.at(winner, tokens_X[rivals], rivals)
    best_X = np.zeros(len(tokens_X), np.bool_)
    best_X[winner] = True  # every token of a text stands in some window
    return best_X
