"""The kernels of `word_losses.py`: they read the scores of a row once, and each place of a block keeps its
own sums.

Shapes: P predicted rows, V vocabulary, B places of a block of words.

Places are combined only at the end of a row. Until then each has its largest score so far, the block with
this score, and a sum of exponentials that is rescaled at each larger score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_LAUNCH: dict[str, int] = {"BLOCK": 2048, "num_warps": 4}
BACKWARD_LAUNCH: dict[str, int] = {"BLOCK": 4096, "num_warps": 4}
"""Two loads of 16 bytes for each thread, and four. Forward, a place keeps three values: with four loads only
half as many programs would fit."""
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
"""Constants for powers of 2, which a GPU computes natively."""
LOWEST = tl.constexpr(-1e30)
"""A value below every score of a network except -inf, which cannot be subtracted from."""
UNALIGNED = ["labels"]
"""Read one by one, at any alignment: another address must not require another kernel when recording."""


def forward(
    scores_PV: Tensor, labels_P: Tensor, *, launch: dict[str, int] = FORWARD_LAUNCH
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses, hits, and normalisers as powers of 2, each [P]."""
    rows, words = scores_PV.shape
    losses_P, normalisers_P = (scores_PV.new_empty(rows, dtype=torch.float32) for _ in range(2))
    hits_P = scores_PV.new_empty(rows, dtype=torch.bool)
    with torch.cuda.device_of(scores_PV):
        word_losses_forward[rows,](
            *(scores_PV, labels_P, losses_P, hits_P, normalisers_P), WORDS=words, **launch
        )
    return losses_P, hits_P, normalisers_P


def backward(
    to_losses_P: Tensor,
    scores_PV: Tensor,
    labels_P: Tensor,
    normalisers_P: Tensor,
    *,
    launch: dict[str, int] = BACKWARD_LAUNCH,
) -> Tensor:
    """Compute the gradient of the scores, in their type."""
    rows, words = scores_PV.shape
    to_scores_PV = torch.empty_like(scores_PV)
    with torch.cuda.device_of(scores_PV):
        word_losses_backward[rows, triton.cdiv(words, launch["BLOCK"])](
            *(to_losses_P, scores_PV, labels_P, normalisers_P, to_scores_PV), WORDS=words, **launch
        )
    return to_scores_PV


@triton.jit(do_not_specialize=UNALIGNED)
def word_losses_forward(scores, labels, losses, hits, normalisers, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    scores += row.to(tl.int64) * WORDS
    place_B = tl.arange(0, BLOCK)
    highest_B = tl.full((BLOCK,), LOWEST, tl.float32)
    sums_B = tl.zeros((BLOCK,), tl.float32)
    best_B = place_B
    for first in range(0, WORDS, BLOCK):
        word_B = first + place_B
        scores_B = _powers(tl.load(scores + word_B, mask=word_B < WORDS, other=-float("inf")))
        best_B = tl.where(scores_B > highest_B, word_B, best_B)
        higher_B = tl.maximum(highest_B, scores_B)
        sums_B = sums_B * tl.exp2(highest_B - higher_B) + tl.exp2(scores_B - higher_B)
        highest_B = higher_B
    highest = tl.max(highest_B, 0)
    normaliser = highest + tl.log2(tl.sum(sums_B * tl.exp2(highest_B - highest), 0))
    best = tl.min(tl.where(highest_B == highest, best_B, WORDS), 0)
    label = tl.load(labels + row)
    tl.store(losses + row, (normaliser - _powers(tl.load(scores + label))) * LN_2)
    tl.store(hits + row, best == label)
    tl.store(normalisers + row, normaliser)


@triton.jit(do_not_specialize=UNALIGNED)
def word_losses_backward(
    to_losses, scores, labels, normalisers, to_scores, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    word_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at_B = row.to(tl.int64) * WORDS + word_B
    scores_B = _powers(tl.load(scores + at_B, mask=word_B < WORDS, other=-float("inf")))
    probabilities_B = tl.exp2(scores_B - tl.load(normalisers + row))
    wanted_B = (word_B == tl.load(labels + row)).to(tl.float32)
    to_scores_B = (probabilities_B - wanted_B) * tl.load(to_losses + row)
    tl.store(to_scores + at_B, to_scores_B.to(to_scores.dtype.element_ty), mask=word_B < WORDS)


@triton.jit
def _powers(scores):
    """Return scores as powers of 2; their quotients are the softmax."""
    return scores.to(tl.float32) * LOG2_E
