"""The objective of a task's training step: a scorer's outputs under the loss of the task's kind.

Shapes: T packed tokens, S sequences, M items, P tagged words, C classes. A scorer returns [S, C] for sentence
kinds (C is 1 for a number and for an option of a choice), [T, C] for tags and [T, 2] for spans.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from bertsmith.model.encoder_config import PassSize
from bertsmith.model.heads import OutputHead
from bertsmith.model.kernels.torch_internals import compiled_whole, mark_dynamic
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch
from bertsmith.recipe.distill_section import TaskDistillSection
from bertsmith.recipe.finetuning_schema import HeadSection
from bertsmith.tasks import losses, soft_losses
from bertsmith.tasks.batches import TaskBatch
from bertsmith.tasks.kinds.kind import AnyKind

USUAL_HEAD, LABELS_ALONE = HeadSection(), TaskDistillSection()
LossFunction = Callable[[Tensor, TaskBatch], tuple[Tensor, Tensor]]
"""Maps a scorer's outputs to the loss of each target, and the fraction of it predicted right."""
SoftLossFunction = Callable[[Tensor, TaskBatch, float], Tensor]
"""Maps a scorer's outputs to each target's distance from a teacher's scores, at a temperature."""
LOSSES: Mapping[str, tuple[LossFunction, SoftLossFunction]] = {
    "class": (losses.class_loss, soft_losses.soft_class_loss),
    "multilabel": (losses.multilabel_loss, soft_losses.soft_multilabel_loss),
    "number": (losses.number_loss, soft_losses.soft_number_loss),
    "tag": (losses.tag_loss, soft_losses.soft_tag_loss),
    "choice": (losses.choice_loss, soft_losses.soft_choice_loss),
    "span": (losses.span_loss, soft_losses.soft_span_loss),
    "passage": (losses.passage_loss, soft_losses.soft_passage_loss),
}
"""The loss of each kind, and its distillation loss, by `Kind.loss_name`."""


class Scorer(nn.Module, ABC):
    """Scores of sequences: an encoder with what reads its states; a frozen encoder never drops anything."""

    network: Network

    @abstractmethod
    def last_layer(self) -> nn.Linear:
        """Return the layer that computes the scores."""

    def operations(self, size: PassSize) -> float:
        """Return the operations of a forward pass without the last layer."""
        return self.network.config.operations(size)

    def own_state(self) -> dict[str, Tensor]:
        """Return the weights that are not part of the network; {} for a head of the network."""
        state = self.state_dict()
        return {name: tensor.cpu() for name, tensor in state.items() if not name.startswith("network.")}

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but keep a frozen encoder in evaluation mode, without dropout."""
        super().train(mode)
        learned = any(parameter.requires_grad for parameter in self.network.encoder.parameters())
        self.network.encoder.train(mode and learned)
        return self


class NetworkScorer(Scorer):
    """The outputs of one head of a network."""

    def __init__(self, network: Network, head: str) -> None:
        super().__init__()
        self.network = network
        self.head = head

    def forward(self, inputs: PackedBatch) -> Tensor:
        if self.network.heads[self.head].reads == "tokens":
            return self.network.scores(self.head, self.network.encoder(inputs), inputs.layout)
        return self.network.sentence_scores(self.head, inputs)

    def last_layer(self) -> nn.Linear:
        """Return the head's last layer."""
        head = self.network.heads[self.head]
        assert isinstance(head, OutputHead)
        return head.output


def freeze_encoder(network: Network, *, fresh: Collection[str] = ()) -> None:
    """Freeze the encoder, and the pooler unless it is among the freshly initialised heads."""
    network.encoder.requires_grad_(False).eval()
    if "pooler" in network.heads and "pooler" not in fresh:
        network.heads["pooler"].requires_grad_(False)


class TaskObjective(nn.Module):
    """A scorer with the loss of its task, in one forward pass."""

    def __init__(
        self,
        scorer: nn.Module,
        kind: AnyKind,
        head: HeadSection = USUAL_HEAD,
        distill: TaskDistillSection = LABELS_ALONE,
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.kind = kind
        self.distill = distill
        self._losses, self._soft_losses = LOSSES[kind.loss_name(head)]
        self._forward: Callable[[TaskBatch, Tensor], tuple[Tensor, Tensor]] = self._plain
        self.compiled = False

    def compile_whole(self) -> None:
        """Compile loss and scorer as one graph; requires `can_compile`, and no LSTM."""
        self._forward, self.compiled = compiled_whole(self._plain), True

    def forward(self, batch: TaskBatch, scales_1: Tensor) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's part of the step's loss, and its sums; `scales_1` is 1 / the step's count.

        The sums are the weighted losses and the weighted fraction of right predictions.
        """
        if not (self.compiled and self.training):  # an evaluation is too short to pay for a second graph
            return self._plain(batch, scales_1)
        mark_sizes_as_changing(batch)
        return self._forward(batch, scales_1)

    def scores(self, batch: TaskBatch) -> Tensor:
        """Return logits for prediction: [M, C] averaged over windows, tag [P, C], span [T, 2], choice [S]."""
        scores = self._outputs(batch)
        if self.kind.unit == "word":
            return scores[batch.rows_P]
        if self.kind.unit == "token":
            return scores
        return scores.squeeze(-1) if self.kind.unit == "sequence" else losses.scores_of_items(scores, batch)

    def _outputs(self, batch: TaskBatch) -> Tensor:
        if batch.states_LTD is None:
            return _exact(self.scorer(batch.inputs))
        return _exact(self.scorer(batch.inputs, tuple(batch.states_LTD)))

    def _plain(self, batch: TaskBatch, scales_1: Tensor) -> tuple[Tensor, Tensor]:
        outputs, distill = self._outputs(batch), self.distill
        each, hits = self._losses(outputs, batch)
        if batch.teacher is not None:
            soft = self._soft_losses(outputs, batch, distill.temperature)
            each = distill.soft_weight * soft + (1 - distill.soft_weight) * each
        loss = (each * batch.weights).sum()
        hit = (hits.to(batch.weights.dtype) * batch.weights).sum()
        return loss * scales_1[0], torch.stack((loss, hit.to(loss.dtype))).detach()


def mark_sizes_as_changing(batch: TaskBatch) -> None:
    """Declare to the compiler that T, S, M and P vary, before it treats them as constants."""
    inputs = batch.inputs
    per_token = (inputs.tokens_T, inputs.segments_T, inputs.positions_T)
    per_sequence = (inputs.layout.starts_S1, batch.items_S, batch.passages_S2)
    teacher = () if batch.teacher is None else (batch.teacher,)
    for tensor in (*per_token, *per_sequence, batch.targets, batch.weights, batch.rows_P, *teacher):
        if len(tensor):
            mark_dynamic(tensor)


def _exact(scores: Tensor) -> Tensor:
    """Return scores in fp32 or better, because the 8 bits of bf16 are too few for a softmax."""
    return scores if scores.dtype == torch.float64 else scores.float()
