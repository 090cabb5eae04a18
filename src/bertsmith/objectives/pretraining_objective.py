"""The base class of pre-training objectives: a declaration, and the sums of a micro-batch that it names.

Shapes: T packed tokens, P predicted rows, S sequences, V vocabulary, C counts.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bertsmith.core.measures import Declaration
from bertsmith.data.collate import PretrainingBatch
from bertsmith.model.encoder import can_compile
from bertsmith.model.encoder_config import PassSize
from bertsmith.model.flops import flops_per_step
from bertsmith.model.kernels.torch_internals import compiled_whole, mark_dynamic
from bertsmith.model.network import Network
from bertsmith.objectives.word_losses import word_losses


class PretrainingObjective(nn.Module):
    """A network with its pre-training losses, in one forward pass, so that DDP and FSDP can wrap it."""

    def __init__(self, network: Network, declared: Declaration) -> None:
        super().__init__()
        self.network, self.declared = network, declared
        self._forward: Callable[[PretrainingBatch, Tensor], tuple[Tensor, Tensor]] = self.plain
        self.compiled = False

    def networks(self) -> Mapping[str, Network]:
        """Trained networks: the model, under an empty name, and others by their folder inside the model's."""
        return {"": self.network}

    def flops(self, tokens: int, sequences: int, predicted: int) -> float:
        """The operations of training on so much, by the count that every share of a chip is told by."""
        return flops_per_step(self.networks().values(), PassSize(tokens, sequences, predicted))

    def summed(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """The declared sums of a micro-batch by name; those of loss terms have gradients."""
        raise NotImplementedError

    def plain(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the sums of a micro-batch, not compiled."""
        sums, declared = self.summed(batch), self.declared
        scales = dict(zip(declared.counts, loss_scales_C.unbind(), strict=True))
        first, *others = (each.weight * sums[each.sum] * scales[each.over] for each in declared.terms)
        loss = sum(others, start=first)
        return loss, torch.stack([sums[name].detach().to(loss.dtype) for name in declared.sums])

    def compile_whole(self) -> None:
        """Compile losses and network as one graph for all batch sizes, where the encoder can be."""
        if not can_compile(self):
            return
        self._forward, self.compiled = compiled_whole(self.plain), True

    def forward(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """This micro-batch's part of the step's loss, and its sums; `loss_scales_C` are 1 / counts."""
        if not (self.compiled and self.training):  # an evaluation is too short to be worth a second graph
            return self.plain(batch, loss_scales_C)
        mark_sizes_as_changing(batch)
        return self._forward(batch, loss_scales_C)


def mark_sizes_as_changing(batch: PretrainingBatch) -> None:
    """Tell the compiler that T, S and P differ from step to step, before it takes them for constants."""
    for name, tensor in batch.named_tensors().items():
        if name != "end_1":
            mark_dynamic(tensor)


def weighted_sums(scores_PV: Tensor, labels_P: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood of the labels and how many are the best guess, weighted."""
    losses_P, hits_P = word_losses(scores_PV, labels_P)
    return (losses_P * weights_P).sum(), (hits_P.to(weights_P.dtype) * weights_P).sum()
