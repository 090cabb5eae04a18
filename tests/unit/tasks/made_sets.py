"""Encoded sets of every kind, made by hand: the first token of a sequence is its number."""

import numpy as np

from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.kinds.registry import KINDS as BY_NAME

KINDS = tuple(BY_NAME)
CLASSES = 3
WORDS = 99


def made_set(kind: str, seed: int = 0, *, items: int = 12, unlabelled: float = 0.2) -> EncodedSet:
    """A random set; long texts have several windows, choices two to four options, some items no label."""
    draw = np.random.default_rng(seed)
    most = {"classify": 3, "multilabel": 3, "regress": 3, "choice": 4}.get(kind, 1)
    counts_M = draw.integers(2 if kind == "choice" else 1, most + 1, items)
    lengths_N = draw.integers(3, 12, counts_M.sum())
    starts_N1 = np.append(0, np.cumsum(lengths_N))
    tokens_T = draw.integers(0, WORDS, starts_N1[-1])
    tokens_T[starts_N1[:-1]] = np.arange(len(lengths_N))
    middles_N = starts_N1[:-1] + draw.integers(1, lengths_N)
    rows_T = np.arange(starts_N1[-1])
    rows_P = rows_T[(draw.random(len(rows_T)) < 0.4) & ~np.isin(rows_T, starts_N1)]
    return EncodedSet(
        unit=BY_NAME[kind].unit,
        tokens_T=tokens_T.astype(np.int32),
        segments_T=(rows_T >= np.repeat(middles_N, lengths_N)).astype(np.uint8),
        starts_N1=starts_N1,
        items_M1=np.append(0, np.cumsum(counts_M)),
        targets=_targets(kind, draw, counts_M, lengths_N, len(rows_P), unlabelled),
        rows_P=rows_P if kind == "tag" else np.zeros(0, np.int64),
        words_P2=np.stack((rows_P, rows_P), -1) if kind == "tag" else np.zeros((0, 2), np.int64),
        passages_N2=_passages(lengths_N) if kind == "span" else np.zeros((0, 2), np.int64),
    )


def _passages(lengths_N):
    """All between the first and the last token."""
    return np.stack((np.ones_like(lengths_N), lengths_N - 1), -1)


def _targets(kind, draw, counts_M, lengths_N, words, unlabelled):
    items = len(counts_M)
    hidden = draw.random(words if kind == "tag" else items) < unlabelled
    if kind == "regress":
        return np.where(hidden, np.nan, draw.random(items) * 5).astype(np.float32)
    if kind == "multilabel":
        return np.where(hidden[:, None], -1, draw.integers(0, 2, (items, CLASSES)))
    if kind == "span":
        first = draw.integers(0, lengths_N - 1)
        last = np.where(first == 0, 0, draw.integers(first, lengths_N - 1))
        return np.where(hidden[:, None], -1, np.stack((first, last), -1))
    most = {"choice": counts_M}.get(kind, CLASSES)
    return np.where(hidden, -1, draw.integers(0, most, len(hidden)))
