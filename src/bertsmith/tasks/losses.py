"""The losses of the kinds: from a scorer's outputs to each target's loss and its fraction predicted right.

Shapes: T packed tokens, S sequences, M items, P tagged words, C classes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.model.encoder import largest_of_rows, mean_of_rows
from bertsmith.packed import Layout
from bertsmith.tasks.batches import TaskBatch


def class_loss(scores_SC: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each item's class."""
    return _cross_entropy(scores_of_items(scores_SC, batch), batch.targets)


def multilabel_loss(scores_SC: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return each item's binary cross-entropy and fraction of right decisions, as means over the classes."""
    scores_MC = scores_of_items(scores_SC, batch)
    losses_MC = functional.binary_cross_entropy_with_logits(
        scores_MC, batch.targets.to(scores_MC.dtype), reduction="none"
    )
    hits_MC = ((scores_MC.detach() > 0) == (batch.targets > 0)).to(scores_MC.dtype)
    return losses_MC.mean(-1), hits_MC.mean(-1)


def number_loss(scores_S1: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return the squared error of each item; a number is never counted as right."""
    scores_M = scores_of_items(scores_S1, batch).squeeze(-1)
    losses_M = (scores_M - batch.targets.to(scores_M.dtype)).square()
    return losses_M, torch.zeros_like(losses_M)


def tag_loss(scores_TC: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each tagged word."""
    return _cross_entropy(scores_TC[batch.rows_P], batch.targets)


def choice_loss(scores_S1: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the right option among each item's options."""
    items = layout_of_items(batch)
    return _losses_of_rows(scores_S1, items, (items.starts_S1[:-1] + batch.targets)[:, None])


def span_loss(scores_T2: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of start and end over a sequence (run_squad.py); a hit needs both."""
    layout = batch.inputs.layout
    return _losses_of_rows(scores_T2, layout, layout.starts_S1[:-1, None] + batch.targets)


def passage_loss(scores_T2: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return `span_loss` over the passage's rows and the first row, which means "no answer"."""
    return span_loss(in_passages(scores_T2, batch), batch)


def in_passages(scores_T2: Tensor, batch: TaskBatch) -> Tensor:
    """Return the scores with a very low number in rows outside of passages, so that answers stay inside."""
    starts_S1 = batch.inputs.layout.starts_S1
    sequences_T = _segments_of_rows(scores_T2, starts_S1)
    rows_T = torch.arange(len(scores_T2), device=scores_T2.device)
    first_T, past_T = batch.passages_S2[sequences_T].unbind(-1)
    open_T = ((rows_T >= first_T) & (rows_T < past_T)) | (rows_T == starts_S1[sequences_T])
    # Not -inf: its gradient is NaN. exp of this number is 0 relative to any score.
    lowest = torch.finfo(scores_T2.dtype).min / 2
    return scores_T2.masked_fill(~open_T[:, None], lowest)


# ---- softmax and means over rows of packed sequences


def logsumexp_of_rows(values_TC: Tensor, layout: Layout) -> Tensor:
    """Return the log of the summed exponentials of each sequence's rows [S, C]; empty ones are invalid."""
    largest_SC = largest_of_rows(values_TC.detach(), layout)
    sequences_T = _segments_of_rows(values_TC, layout.starts_S1)
    return sums_of_rows((values_TC - largest_SC[sequences_T]).exp(), layout).log() + largest_SC


def log_softmax_of_rows(values_TC: Tensor, layout: Layout) -> Tensor:
    """Return the log-probability of each row among the rows of its sequence [T, C]."""
    sequences_T = _segments_of_rows(values_TC, layout.starts_S1)
    return values_TC - logsumexp_of_rows(values_TC, layout)[sequences_T]


def sums_of_rows(values_TC: Tensor, layout: Layout) -> Tensor:
    """Return the sum of each sequence's rows [S, C]."""
    # segment_reduce sums in a fixed order; index_add does not on CUDA.
    return torch.segment_reduce(values_TC, "sum", offsets=layout.starts_S1.long(), axis=0, unsafe=True)


def _losses_of_rows(scores_TC: Tensor, layout: Layout, rows_SC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of rows within their sequences, a mean over C; ties are hits."""
    right_SC = scores_TC[rows_SC, torch.arange(scores_TC.shape[1], device=scores_TC.device)]
    losses_SC = logsumexp_of_rows(scores_TC, layout) - right_SC
    hits_SC = right_SC.detach() >= largest_of_rows(scores_TC.detach(), layout)
    return losses_SC.mean(-1), hits_SC.all(-1)


def _cross_entropy(scores_PC: Tensor, targets_P: Tensor) -> tuple[Tensor, Tensor]:
    losses_P = functional.cross_entropy(scores_PC, targets_P, reduction="none")
    return losses_P, scores_PC.detach().argmax(-1) == targets_P


def _segments_of_rows(values_TC: Tensor, starts_S1: Tensor) -> Tensor:
    """Return the sequence of each row [T]."""
    rows_T = torch.arange(values_TC.shape[0], dtype=starts_S1.dtype, device=starts_S1.device)
    # Not in starts_S1[1:]: on CUDA, torch 2.11 compiles a search that begins at the view's storage.
    return torch.searchsorted(starts_S1, rows_T, right=True) - 1


def layout_of_items(batch: TaskBatch) -> Layout:
    """Return the start of each item's sequences in the batch, as if sequences were rows."""
    numbers_M1 = torch.arange(batch.targets.shape[0] + 1, device=batch.items_S.device)
    return Layout(torch.searchsorted(batch.items_S, numbers_M1), longest=0)


def scores_of_items(scores_SC: Tensor, batch: TaskBatch) -> Tensor:
    """Return the mean scores over an item's windows [M, C]."""
    return mean_of_rows(scores_SC, layout_of_items(batch))
