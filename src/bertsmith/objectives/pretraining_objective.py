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
from bertsmith.training.step_losses import OverTheStep


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
        """Return the operations of training on this many tokens; utilisation (MFU) uses this count."""
        return flops_per_step(self.networks().values(), PassSize(tokens, sequences, predicted))

    def summed(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Return the declared sums of a micro-batch by name; sums of loss terms have gradients."""
        raise NotImplementedError

    def plain(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums of a micro-batch, not compiled."""
        sums = self.summed(batch)
        loss = self.loss(sums, loss_scales_C)
        return loss, torch.stack([sums[name].detach().to(loss.dtype) for name in self.declared.sums])

    def loss(self, sums: Mapping[str, Tensor], loss_scales_C: Tensor) -> Tensor:
        """Return the sum of the declared terms of the loss."""
        declared = self.declared
        scales = dict(zip(declared.counts, loss_scales_C.unbind(), strict=True))
        first, *others = (each.weight * sums[each.sum] * scales[each.over] for each in declared.terms)
        return sum(others, start=first)

    def compile_whole(self) -> None:
        """Compile losses and network as one graph for all batch sizes, if the encoder supports it."""
        if not can_compile(self):
            return
        self._forward, self.compiled = compiled_whole(self.plain), True

    def forward(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return this micro-batch's part of the step's loss, and its sums; `loss_scales_C` are 1 / counts."""
        if not (self.compiled and self.training):  # an evaluation is too short to be worth a second graph
            return self.plain(batch, loss_scales_C)
        mark_sizes_as_changing(batch)
        return self._forward(batch, loss_scales_C)


class StepObjective(PretrainingObjective, OverTheStep):
    """An objective over the rows of a whole step, for example sentence vectors with in-batch negatives.

    Its forward returns the rows of a micro-batch and True for those that are not filler.
    """

    def __init__(self, network: Network, declared: Declaration) -> None:
        # Evaluation compares whole blocks of rows, and counts these.
        assert declared.over_the_step and len(declared.counts) == 1
        super().__init__(network, declared)

    def rows(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's rows [S, ...], and True for rows that are not filler [S]."""
        raise NotImplementedError

    def of_rows(self, rows_Z: Tensor) -> dict[str, Tensor]:
        """Return the declared sums by name, with a value for each row of the step [Z]; it has no weights."""
        raise NotImplementedError

    def plain(self, batch: PretrainingBatch, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the rows of a micro-batch, not compiled, in fp32 at least."""
        rows_S, is_real_S = self.rows(batch)
        return rows_S.to(torch.promote_types(rows_S.dtype, torch.float32)), is_real_S

    def of_step(self, rows_Z: Tensor, loss_scales_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of all rows of a step, and each row's part of the sums [Z, N]."""
        values = self.of_rows(rows_Z)
        loss = self.loss({name: each.sum() for name, each in values.items()}, loss_scales_C)
        return loss, torch.stack([values[name].detach().to(loss.dtype) for name in self.declared.sums], 1)


def mark_sizes_as_changing(batch: PretrainingBatch) -> None:
    """Declare to the compiler that T, S and P differ between steps, before it treats them as constants."""
    for name, tensor in batch.named_tensors().items():
        if name != "end_1":
            mark_dynamic(tensor)


def weighted_sums(scores_PV: Tensor, labels_P: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed negative log-likelihood of the labels, and the weight of the right best guesses."""
    losses_P, hits_P = word_losses(scores_PV, labels_P)
    return (losses_P * weights_P).sum(), (hits_P.to(weights_P.dtype) * weights_P).sum()
