"""Masked language modelling with sentence pairs: what a pre-training step sums up.

Shapes: P predicted rows, S sequences, V vocabulary.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.data.collate import PretrainingBatch
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder import can_compile
from bertsmith.model.network import Network
from bertsmith.model.torch_internals import mark_dynamic

PairHead = Literal["nsp", "sop", "none"]


class Counts(NamedTuple):
    """How many predictions a step has over all ranks and micro-batches: what its sums are divided by."""

    masked: float
    pairs: float


class PretrainingObjective(nn.Module):
    """A network with its pre-training losses, in one forward pass, so that DDP and FSDP can wrap it."""

    def __init__(self, network: Network, pair_head: PairHead) -> None:
        super().__init__()
        self.network = network
        self.pair_head = pair_head
        # Examples say 0 where B follows A, as BERT does; ERNIE's head says 1.
        self.swaps_labels = pair_head == "nsp" and architecture_of(network.config.model_type).next_label == 1
        self._forward: Callable[[PretrainingBatch, Tensor], tuple[Tensor, Tensor]] = self._plain
        self.compiled = False

    def compile_whole(self) -> None:
        """Compile losses and network as one graph for all batch sizes, where the encoder can be."""
        if not can_compile(self):
            return
        self._forward, self.compiled = torch.compile(self._plain, fullgraph=True), True

    def forward(self, batch: PretrainingBatch, loss_scales_2: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's part of the step's loss, and its sums; `loss_scales_2` are 1 / counts.

        The sums are the masked words' losses and hits, then those of the pairs.
        """
        if not (self.compiled and self.training):  # an evaluation is too short to be worth a second graph
            return self._plain(batch, loss_scales_2)
        mark_sizes_as_changing(batch)
        return self._forward(batch, loss_scales_2)

    def _plain(self, batch: PretrainingBatch, loss_scales_2: Tensor) -> tuple[Tensor, Tensor]:
        # Only the predicted rows and those that stand for a sentence go through most of the last layer: the
        # heads read no others.
        encoder, rows_P = self.network.encoder, batch.masked_rows_P
        if self.pair_head == "none":
            hidden_PD = encoder(batch.inputs, rows=rows_P)
        else:
            rows_S = encoder.sentence_rows(batch.inputs.layout)
            assert isinstance(rows_S, Tensor), "whoever has a pair head has a row that stands for a sentence"
            hidden_RD = encoder(batch.inputs, rows=torch.cat((rows_P, rows_S)))
            hidden_PD, sentence_SD = hidden_RD[: len(rows_P)], hidden_RD[len(rows_P) :]
        scores_PV = self.network.scores_of_words(hidden_PD)
        mlm_loss, mlm_hits = weighted_sums(scores_PV, batch.masked_ids_P, batch.masked_weights_P)
        if self.pair_head == "none":
            pair_loss, pair_hits = torch.zeros_like(mlm_loss), torch.zeros_like(mlm_hits)
        else:
            scores_S2 = self.network.scores_of_sentences(self.pair_head, sentence_SD)
            labels_S = 1 - batch.pair_labels_S if self.swaps_labels else batch.pair_labels_S
            pair_loss, pair_hits = weighted_sums(scores_S2, labels_S, batch.pair_weights_S)
        loss = mlm_loss * loss_scales_2[0] + pair_loss * loss_scales_2[1]
        return loss, torch.stack((mlm_loss, mlm_hits, pair_loss, pair_hits)).detach()


def mark_sizes_as_changing(batch: PretrainingBatch) -> None:
    """Tell the compiler that T, S and P differ from step to step, before it takes them for constants."""
    inputs = batch.inputs
    per_token = (inputs.tokens_T, inputs.segments_T, inputs.positions_T)
    per_prediction = (batch.masked_rows_P, batch.masked_ids_P, batch.masked_weights_P)
    per_sequence = (inputs.layout.starts_S1, batch.pair_labels_S, batch.pair_weights_S)
    for tensor in (*per_token, *per_prediction, *per_sequence):
        mark_dynamic(tensor)


def weighted_sums(scores_PV: Tensor, labels_P: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood of the labels and how many are the best guess, weighted."""
    scores_PV = scores_PV.float()  # a softmax over 30,000 words needs more than eight bits
    losses_P = functional.cross_entropy(scores_PV, labels_P, reduction="none")
    hits_P = (scores_PV.detach().argmax(-1) == labels_P).to(weights_P.dtype)
    return (losses_P * weights_P).sum(), (hits_P * weights_P).sum()
