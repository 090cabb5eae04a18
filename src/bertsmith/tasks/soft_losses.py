"""Distillation losses of the kinds: the distance of a scorer's outputs from the teacher scores of a batch.

Shapes: T packed tokens, S sequences, M items, P tagged words, C classes.
"""

from torch import Tensor
from torch.nn import functional

from bertsmith.packed import Layout
from bertsmith.tasks.batches import TaskBatch
from bertsmith.tasks.losses import (
    in_passages,
    layout_of_items,
    log_softmax_of_rows,
    scores_of_items,
    sums_of_rows,
)
from bertsmith.training.soft_targets import soft_losses


def soft_class_loss(scores_SC: Tensor, batch: TaskBatch, temperature: float) -> Tensor:
    """Return the divergence of each item's class probabilities."""
    return soft_losses(scores_of_items(scores_SC, batch), _teacher(batch), temperature)


def soft_multilabel_loss(scores_SC: Tensor, batch: TaskBatch, temperature: float) -> Tensor:
    """Return the mean divergence of each item's labels, taken as independent yes-or-no decisions."""
    ours_MC = scores_of_items(scores_SC, batch) / temperature
    theirs_MC = _teacher(batch) / temperature
    given_MC = theirs_MC.sigmoid()
    of_given_MC = given_MC * (functional.logsigmoid(theirs_MC) - functional.logsigmoid(ours_MC))
    of_others_MC = (1 - given_MC) * (functional.logsigmoid(-theirs_MC) - functional.logsigmoid(-ours_MC))
    return (of_given_MC + of_others_MC).mean(-1) * temperature**2


def soft_number_loss(scores_S1: Tensor, batch: TaskBatch, temperature: float) -> Tensor:  # noqa: ARG001
    """Return the squared difference of each item's numbers; the temperature is unused."""
    return (scores_of_items(scores_S1, batch) - _teacher(batch)).square().squeeze(-1)


def soft_tag_loss(scores_TC: Tensor, batch: TaskBatch, temperature: float) -> Tensor:
    """Return the divergence of each word's tag probabilities."""
    return soft_losses(scores_TC[batch.rows_P], _teacher(batch), temperature)


def soft_choice_loss(scores_S1: Tensor, batch: TaskBatch, temperature: float) -> Tensor:
    """Return the divergence over each item's options."""
    return _losses_of_rows(scores_S1, _teacher(batch)[:, None], layout_of_items(batch), temperature)


def soft_span_loss(scores_T2: Tensor, batch: TaskBatch, temperature: float) -> Tensor:
    """Return the mean divergence of the start and end probabilities over each sequence's rows."""
    return _losses_of_rows(scores_T2, _teacher(batch), batch.inputs.layout, temperature)


def soft_passage_loss(scores_T2: Tensor, batch: TaskBatch, temperature: float) -> Tensor:
    """Return `soft_span_loss` over the passage's rows and the first row."""
    # Divide before masking: at a low temperature the mask's very low number would become -inf.
    ours_T2, theirs_T2 = (in_passages(each / temperature, batch) for each in (scores_T2, _teacher(batch)))
    return _divergences(ours_T2, theirs_T2, batch.inputs.layout) * temperature**2


def _losses_of_rows(ours_TC: Tensor, theirs_TC: Tensor, layout: Layout, temperature: float) -> Tensor:
    """Return the divergence of softmaxes at a temperature over each sequence's rows, a mean over C [S]."""
    return _divergences(ours_TC / temperature, theirs_TC / temperature, layout) * temperature**2


def _divergences(ours_TC: Tensor, theirs_TC: Tensor, layout: Layout) -> Tensor:
    """Return the divergence of softmaxes over each sequence's rows, a mean over C [S]."""
    ours_TC, theirs_TC = log_softmax_of_rows(ours_TC, layout), log_softmax_of_rows(theirs_TC, layout)
    return sums_of_rows(theirs_TC.exp() * (theirs_TC - ours_TC), layout).mean(-1)


def _teacher(batch: TaskBatch) -> Tensor:
    assert batch.teacher is not None, "the batch must have a teacher's scores"
    return batch.teacher
