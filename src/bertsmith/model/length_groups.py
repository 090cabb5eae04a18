"""Which sequences of a packed row to compute together, by their lengths."""

import os
from itertools import pairwise

import numpy as np

KEPT_PLANS = 16 + 2 * (os.cpu_count() or 1)
"""All layers of a pass ask for the same plan, and on a CPU as many passes are at work as there are cores."""


def groups_by_length(lengths: np.ndarray, group_scores: int) -> list[np.ndarray]:
    """The members of each group, as masks over the sequences; empty sequences are in none.

    A group of G sequences up to the length N costs G * N * N + `group_scores` scores of a head; with 0 for
    the latter, a group holds one length only and no filler.
    """
    found, counts = np.unique(lengths[lengths > 0], return_counts=True)
    edges = cheapest_edges(found, counts, group_scores)
    return [(lengths > low) & (lengths <= high) for low, high in pairwise(edges)]


def cheapest_edges(lengths: np.ndarray, counts: np.ndarray, group_scores: int) -> list[int]:
    """Between which lengths to cut, so that filler and groups together cost least; 0 comes first."""
    if not group_scores:
        return [0, *lengths.tolist()]
    before = np.append(0, np.cumsum(counts))
    costs, cuts = np.zeros(len(lengths) + 1, np.int64), np.zeros(len(lengths) + 1, np.int64)
    for end, length in enumerate(lengths, start=1):
        ways = costs[:end] + (before[end] - before[:end]) * length * length + group_scores
        cuts[end] = np.argmin(ways)
        costs[end] = ways[cuts[end]]
    edges = [len(lengths)]
    while edges[-1]:
        edges.append(int(cuts[edges[-1]]))
    return [0, *(int(lengths[edge - 1]) for edge in reversed(edges) if edge)]
