"""The loss of each predicted word, and its hits: plain, and on CUDA by one kernel per pass.

Shapes: P predicted rows, V vocabulary.

For 30,528 scores a row, the compiler's kernel sums exponentials and finds the largest in five times the time
of reading them. Our kernel reads them once in each pass and keeps a normaliser per row; it computes in fp32,
like the plain form.
"""

from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional

from bertsmith.model.kernels.triton_ready import needs_operator, triton_runs_on

MIN_WORDS = 1024
"""Minimum words for the kernel; it is not worthwhile for, say, the two scores of a pair."""
ALIGNED = 8
"""Values of half precision in 16 bytes, which a thread reads at once."""


def word_losses(scores_PV: Tensor, labels_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each label, in fp32, and True if it is the first of the largest.

    Every label is a word: an ignore index is not supported.
    """
    if kernel_takes(scores_PV):
        return fused_word_losses(scores_PV, labels_P)
    scores_PV = scores_PV.float()  # a softmax over 30,000 words needs more than eight bits
    losses_P = functional.cross_entropy(scores_PV, labels_P, reduction="none")
    return losses_P, scores_PV.detach().argmax(-1) == labels_P


def kernel_takes(scores_PV: Tensor) -> bool:
    """True if the kernel supports these: many words in half precision, in rows of whole 16 bytes."""
    half = scores_PV.dtype in (torch.bfloat16, torch.float16)
    fits = scores_PV.shape[-1] >= MIN_WORDS and scores_PV.shape[-1] % ALIGNED == 0
    return half and fits and triton_runs_on(scores_PV.device)


def fused_word_losses(scores_PV: Tensor, labels_P: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses by the kernel."""
    forward = _forward_operator if needs_operator() else _forward
    losses_P, hits_P, _ = forward(scores_PV, labels_P)
    return losses_P, hits_P


def _forward(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from bertsmith.objectives.word_losses_triton import forward

    return forward(scores.contiguous(), labels.contiguous())


_forward_operator = library.custom_op("bertsmith::word_losses", _forward, mutates_args=())


@_forward_operator.register_fake
def _forward_shapes(scores: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[0]  # `len` would specialise the graph to this number of rows
    losses, normalisers = (scores.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return losses, scores.new_empty(rows, dtype=torch.bool), normalisers


@library.custom_op("bertsmith::word_losses_backward", mutates_args=())
def _backward(to_losses: Tensor, scores: Tensor, labels: Tensor, normalisers: Tensor) -> Tensor:
    from bertsmith.objectives.word_losses_triton import backward

    return backward(to_losses.contiguous(), scores.contiguous(), labels.contiguous(), normalisers)


@_backward.register_fake
def _backward_shape(_to_losses: Tensor, scores: Tensor, *_: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.set_materialize_grads(False)  # the other outputs never get gradients


def _gradients(ctx: Any, to_losses: Tensor | None, *_others: Tensor | None) -> tuple[Tensor | None, None]:
    return None if to_losses is None else _backward(to_losses, *ctx.saved_tensors), None


_forward_operator.register_autograd(_gradients, setup_context=_keep)
