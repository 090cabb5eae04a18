"""The loss of predicted words without storing their scores: for CPUs, where scores dominate a small model.

Shapes: P predicted rows, R of them at a time, E embedding width, V vocabulary.

A 2 x 128 model has 30,522 scores for each predicted row. Apart from three products, most of its time goes
into passes over all of them (two softmaxes, an argmax, a bias's gradient, new memory). Here there are fewer
passes, over the rows of a chunk. The gradients are computed together with the loss, from exponentials that
are not divided: the divisor of a row is applied to its [E] operand instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.model.heads import MaskedLanguageHead
from bertsmith.model.network import Network
from bertsmith.objectives.pretraining_objective import weighted_sums

CHUNK_SCORES = 2**23
"""Maximum scores in memory at a time; with fewer, the gradient of the words would be summed more often."""


def chunk_rows(vocabulary: int) -> int:
    """Return the number of predicted rows that are scored at a time."""
    return max(1, CHUNK_SCORES // vocabulary)


def word_sums(
    network: Network, hidden_PD: Tensor, labels_P: Tensor, weights_P: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `weighted_sums` of the scores of these states, computed by the faster form in training."""
    head = network.heads["mlm"]
    assert isinstance(head, MaskedLanguageHead)
    half = torch.is_autocast_enabled("cpu") or hidden_PD.dtype not in (torch.float32, torch.float64)
    plain = half or torch.compiler.is_compiling() or not torch.is_grad_enabled()
    if hidden_PD.device.type != "cpu" or plain:
        scores_PV = network.scores_of_words(hidden_PD, aligned=hidden_PD.is_cuda)
        return weighted_sums(scores_PV, labels_P, weights_P)
    decoder_VE = head.decoder_weight(network.encoder.words.weight)
    operands = (head.transform(hidden_PD), decoder_VE, head.bias, labels_P, weights_P)
    loss, hits = _LinearCrossEntropy.apply(*operands)  # type: ignore[no-untyped-call]
    return loss, hits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - torch's signature, and the operands
        ctx: Any,
        states_PE: Tensor,
        decoder_VE: Tensor,
        bias_V: Tensor | None,
        labels_P: Tensor,
        weights_P: Tensor,
    ) -> tuple[Tensor, Tensor]:
        loss, hits = states_PE.new_zeros(()), weights_P.new_zeros(())
        to_states_PE = torch.empty_like(states_PE)
        to_decoder_VE = torch.zeros_like(decoder_VE)
        to_bias_V = torch.zeros_like(bias_V) if bias_V is not None else None
        rows = min(len(states_PE), chunk_rows(len(decoder_VE)))
        memory_RV = states_PE.new_empty(rows, len(decoder_VE))
        for states_RE, labels_R, weights_R, to_states_RE in zip(
            *(torch.split(each, rows) for each in (states_PE, labels_P, weights_P, to_states_PE)), strict=True
        ):
            scores_RV = _scores(states_RE, decoder_VE, bias_V, memory_RV[: len(states_RE)])
            largest_R, of_label_R = scores_RV.amax(-1), scores_RV.gather(1, labels_R[:, None])[:, 0]
            hits += (_best_guesses(scores_RV, labels_R, of_label_R == largest_R) * weights_R).sum()
            powers_RV = scores_RV.sub_(largest_R[:, None]).exp_()
            sums_R = powers_RV.sum(-1)
            loss += ((sums_R.log() + (largest_R - of_label_R)) * weights_R).sum()
            factors_R1 = (weights_R / sums_R)[:, None]
            to_decoder_VE.addmm_(powers_RV.t(), states_RE * factors_R1)
            torch.mm(powers_RV, decoder_VE, out=to_states_RE).mul_(factors_R1)
            if to_bias_V is not None:
                to_bias_V.addmv_(powers_RV.t(), factors_R1[:, 0])
        # The label's own part of a row's gradient, which reduces the probabilities above.
        to_decoder_VE.index_add_(0, labels_P, states_PE * weights_P[:, None], alpha=-1)
        to_states_PE.sub_(decoder_VE[labels_P] * weights_P[:, None])
        if to_bias_V is not None:
            to_bias_V.index_add_(0, labels_P, weights_P.to(to_bias_V.dtype), alpha=-1)
        ctx.save_for_backward(to_states_PE, to_decoder_VE, to_bias_V)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if each is None else each * to_loss for each in ctx.saved_tensors]
        return *gradients, None, None


def _scores(states_RE: Tensor, decoder_VE: Tensor, bias_V: Tensor | None, out: Tensor) -> Tensor:
    if bias_V is None:
        return torch.mm(states_RE, decoder_VE.t(), out=out)
    return torch.addmm(bias_V, states_RE, decoder_VE.t(), out=out)


def _best_guesses(scores_RV: Tensor, labels_R: Tensor, may_be_R: Tensor) -> Tensor:
    """True if the label is the first of the largest scores: an argmax over only the rows that can match."""
    rows = may_be_R.nonzero()[:, 0]
    hits_R = torch.zeros_like(may_be_R)
    hits_R[rows] = scores_RV[rows].argmax(-1) == labels_R[rows]
    return hits_R
